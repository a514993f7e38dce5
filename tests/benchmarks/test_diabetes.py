"""The record-level tables: ratios of perplexities pair by pair, and steps to a baseline's final loss."""

import math
from typing import Any

import pytest

from simulations.benchmarks.papers.diabetes import (
    choices,
    claims,
    comparison,
    fair_chance_pairs,
    smallest_text,
    steps_shares,
)


def cell(variant: str, seed: int, perplexity: float, curve: list[tuple[int, float]], **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "seed": seed, "grid": "epsilon-2", "epsilon": 2.0, "epsilon_stated": 1.999, "delta": 1e-5,
        "test_perplexity": perplexity, "curve": curve, "last_round_loss": curve[-1][1], "rounds": 10, "dimension": 1000,
        "test_records": 50, "expected_cohort": 64, "noise_multiplier": 0.6, "first_clip_bound": 0.5,
        "last_clip_bound": 0.25, "cpu_seconds": 60.0, "machine": "m", "commit": "c", "axes": {},
    } | more  # fmt: skip


CELLS = [
    cell("dp-lora", 0, 4.0, [(5, 2.0), (10, 1.5)]),
    cell("dp-lora", 1, 5.0, [(5, 2.0), (10, 1.5)]),
    cell("rldp", 0, 3.0, [(4, 1.9), (6, 1.5), (10, 1.2)]),
    cell("rldp", 1, 5.0, [(5, 2.0), (10, 1.6)]),
    cell("dp-sgd", 0, 8.0, [(10, 3.0)]),
    cell("ceiling", 0, 2.0, [(10, 1.0)], epsilon_stated=None),
    *(
        cell("rldp", 100, 1.0, [(10, 1.0)], grid="tuning-rate", axes={"a.rate": rate}, validation_perplexity=perplexity)
        for rate, perplexity in ((0.1, 3.0), (0.2, 2.5))
    ),
]


def test_methods_are_ranked_by_perplexity_and_what_is_not_private_stands_last():
    lines = comparison({"cells": CELLS}).splitlines()
    assert lines[0].startswith("**epsilon-2**, ε ≤ 2.0")
    assert "10 steps of 64 expected records" in lines[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][2:]
    assert names == ["RLDP, sound form", "DP-LoRA (fixed C, Adam)", "DP-SGD", "*non-private upper bound*"]
    (rldp,) = (line for line in lines if line.startswith("| RLDP"))
    assert "| 4.000 ± 1.414 |" in rldp
    change = 100 * (math.sqrt(3 / 4) - 1)
    assert f"−{abs(change):.1f} %" in rldp


def test_the_caption_states_the_noise_of_the_private_rows_alone():
    without = cell("ceiling", 0, 2.0, [(10, 1.0)], epsilon_stated=None, noise_multiplier=0.15)
    moving = cell("rldp", 0, 3.0, [(10, 1.2)], noise_multiplier=0.7)
    still = cell("dp-lora", 0, 4.0, [(10, 1.5)])
    assert ", noise multiplier 0.6: 10 steps" in comparison({"cells": [without, still]})
    assert ", first noise multiplier 0.6 to 0.7: 10 steps" in comparison({"cells": [without, still, moving]})
    assert ", no noise, no guarantee: 10 steps" in comparison({"cells": [without]})


def test_the_agent_is_held_against_each_control_seed_by_seed():
    curve = [(10, 1.0)]
    cells = [cell("rl", seed, 2.0 + seed / 100, curve) for seed in range(3)]
    cells += [cell("fixed-decay", seed, 1.0 + seed / 100, curve) for seed in range(3)]
    (line,) = (line for line in fair_chance_pairs({"cells": cells}).splitlines() if "moves thresholds |" in line)
    assert line.split(" | ")[2:4] == ["", ""]
    assert line.endswith("| **+99.0 % [+96.6, +101.5]** |")
    assert fair_chance_pairs({"cells": []}) == "*Not measured yet.*\n"


def test_the_claim_takes_the_best_baseline_and_counts_steps_seed_by_seed():
    text = claims({"cells": CELLS})
    assert "DP-LoRA (fixed C, Adam) (of 2)" in text
    assert "60 % on 1 of 2 seeds, else never" in text
    assert steps_shares(CELLS[:4], "rldp", "dp-lora") == [pytest.approx(0.6), None]
    assert claims({"cells": []}) == comparison({"cells": []}) == "*Not measured yet.*\n"


def test_what_was_chosen_is_shown_by_validation_perplexity():
    lines = choices({"cells": CELLS}).splitlines()
    assert lines[2] == "| RLDP, sound form | rate 0.1 | 0.5 | 3.000 |"
    assert lines[3] == "| RLDP, sound form | rate 0.2 | 0.5 | **2.500** |"


@pytest.mark.parametrize(
    ("difference", "text"),
    [(None, ""), (math.log(1.5), "50.0 %"), (math.log(4), "×4"), (math.log(990), "×990"), (800.0, "over ×1,000")],
)
def test_the_smallest_change_that_would_show_is_told_up_to_a_thousand_times(
    difference: float | None, text: str
) -> None:
    assert smallest_text(difference) == text
