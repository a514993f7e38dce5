"""The share of the way from public records alone to training without noise, and its interval."""

import json

import numpy as np
import pytest

from simulations.benchmarks.harness.results import RESULTS
from simulations.benchmarks.planning.worth import prediction, share, shares
from simulations.planning.signal import HALFWAY, expected_share


def test_losses_without_spread_have_a_share_without_width() -> None:
    public, ceiling = np.full((3, 50), 2.0), np.full((3, 50), 1.0)
    assert share(public, np.full((3, 50), 1.25), ceiling) == pytest.approx((0.75, 0.75, 0.75))


@pytest.mark.parametrize("over", [(10, 1), (1, 50)])
def test_the_interval_holds_what_seeds_do_and_what_test_records_do(over: tuple[int, int]) -> None:
    """Half of the way on average, with a spread of 0.2 over seeds or over blocks alone: width 4 * 0.2 / sqrt(n)."""
    spread = np.broadcast_to(np.random.default_rng(1).normal(0, 0.2, over), (10, 50))
    value, low, high = share(np.full((10, 50), 2.0), 1.5 + spread, np.full((10, 50), 1.0))
    assert value == pytest.approx(0.5 - spread.mean())
    assert low < value < high
    assert high - low == pytest.approx(3.92 * spread.std() / np.sqrt(max(over)), rel=0.25)


def test_a_table_compares_seeds_in_common() -> None:
    def cell(variant: str, seed: int, end: float, epsilon: float | None = None) -> dict[str, object]:
        losses = {"end": [end] * 50, "public": [2.0] * 50}
        return {
            "bench": "patients", "variant": variant, "epsilon": epsilon, "seed": seed, "dimension": 9, "losses": losses,
            "machine": "m", "commit": "c",
        }  # fmt: skip

    cells = [
        cell("no-noise", 0, 1.0),
        cell("no-noise", 1, 1.0),
        cell("private", 0, 1.5, 4.0),
        cell("private", 2, 9.0, 4.0),
    ]
    text = shares({"cells": {str(number): one for number, one in enumerate(cells)}})
    assert [line for line in text.splitlines() if line.startswith("| patients")] == [
        "| patients | public records alone | none |  | 7.389 |  | 2 |",
        "| patients | private, from the public start | 4 | 9 | 190.566 | 50% (one seed) | 2 |",
        "| patients | without noise | none | 9 | 2.718 |  | 2 |",
    ]


def test_what_is_predicted_holds_what_ten_seeds_measured() -> None:
    rows = [line.split(" | ") for line in prediction(json.loads((RESULTS / "worth.json").read_text())).splitlines()[2:]]
    measured = [(float(row[5]), float(row[6].rstrip("%")) / 100) for row in rows if row[-1] == "10 |"]
    assert len(measured) >= 4
    for signal, covered in measured:
        least, most = expected_share(signal)
        assert least - 0.01 <= covered <= most + 0.01
    halves = [float(row[7]) for row in rows if row[-1] == "10 |"]
    assert HALFWAY == (float(np.floor(min(halves) * 10) / 10), pytest.approx(max(halves), abs=0.1))
