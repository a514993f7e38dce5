"""Synthetic texts: seeded, of bounded length, evolving by released scores; any causal model can make them."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout
from client.record_level.synthetic_texts import Synthesis, Synthesiser, draw_indices
from privacy.randomness.rng import simulation_generator
from tests.cases.cohorts import start

OPENINGS = ("We study", "Background:", "a")


@functools.cache
def base(name: str) -> tuple[Any, Any]:
    return load_base(f"random:{name}", "causal-lm")


def synthesiser(name: str = "llama", seed: int = 0, **given: Any) -> tuple[Synthesiser, torch.Tensor]:
    model, tokenizer = base(name)
    spec = LoraSpec(2, 4.0, ("c_attn",) if name == "gpt2" else ("q_proj",))
    synthesis = Synthesis(**{"samples": 6, "longest": 24, "openings": OPENINGS, **given})
    return Synthesiser(model, tokenizer, spec, synthesis, seed), start(model, spec)


def texts_of(records: Any) -> list[list[int]]:
    return [row.tolist() for row in np.split(records.tokens, records.offsets[1:-1])]


@pytest.mark.parametrize(("name", "form"), [("llama", "continuation"), ("gpt2", "instruction")])
def test_the_first_set_is_seeded_and_bounded(name: str, form: str) -> None:
    maker, adapter = synthesiser(name, form=form, instruction="{sample} {tone}:")
    state = torch.get_rng_state()
    first, again = maker.initial(adapter), maker.initial(adapter)
    assert torch.equal(torch.get_rng_state(), state)
    assert texts_of(first) == texts_of(again)
    assert texts_of(first) != texts_of(
        synthesiser(name, 1, form=form, instruction="{sample} {tone}:")[0].initial(adapter)
    )
    assert len(first) == 6
    assert 2 <= first.lengths.min() <= first.lengths.max() <= 24
    assert all(row[-1] == maker.tokenizer.eos_token_id for row in texts_of(first))


def test_a_continuation_begins_as_its_seed_and_random_texts_with_a_public_opening() -> None:
    maker, adapter = synthesiser()
    first = texts_of(maker.initial(adapter))
    openings = [tuple(maker._tokens(opening)) for opening in OPENINGS]
    for seed, variation in zip(first[:3], first[3:], strict=True):
        assert any(tuple(seed[: len(opening)]) == opening for opening in openings)
        kept = max(1, round(0.25 * (len(seed) - 1)))
        assert variation[:kept] == seed[:kept]


def test_the_next_generation_keeps_what_scored_and_varies_it_with_the_adapter_given() -> None:
    maker, adapter = synthesiser()
    first = maker.initial(adapter)
    scores = torch.tensor([0.0, 40.0, 0.0, -40.0, 40.0, float("nan")])
    second = texts_of(maker.evolve_texts(first, scores, adapter, 1))
    assert second[:3] == [texts_of(first)[i] for i in (1, 3, 4)]  # the size counts, not the sign
    assert second == texts_of(maker.evolve_texts(first, scores, adapter, 1))
    assert second != texts_of(maker.evolve_texts(first, scores, adapter, 2))
    layout = adapter_layout(maker.model, maker.spec)
    other = texts_of(
        maker.evolve_texts(first, scores, layout.with_trainable(adapter, 5 + 0 * layout.trainable_values(adapter)), 1)
    )
    assert other[:3] == second[:3]
    assert other[3:] != second[3:]


def test_seeds_are_drawn_without_replacement_with_the_stated_probabilities() -> None:
    scores = torch.tensor([-2.0, 1.0, 0.0, 0.5])
    for rule, weights in (("softmax", np.exp([2.0, 1.0, 0.0, 0.5])), ("proportional", np.array([2.0, 1.0, 0.0, 0.5]))):
        generator = simulation_generator(0, rule)
        draws = np.array([draw_indices(scores, 1, rule, generator)[0] for _ in range(4000)])
        shares = np.bincount(draws, minlength=4) / len(draws)
        assert shares == pytest.approx(weights / weights.sum(), abs=0.03)
        assert len(set(draw_indices(scores, 3, rule, generator))) == 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"samples": 5}, "multiple of variants"),
        ({"form": "rewrite"}, "form must be one of"),
        ({"rule": "top"}, "rule must be one of"),
        ({"openings": ()}, "openings must be non-empty"),
        ({"instruction": "write"}, "must contain"),
        ({"instruction": "{sample} {style}:"}, "no braces but"),
        ({"instruction": "{sample} {:"}, "no braces but"),
        ({"instruction": "{sample} {}:"}, "no braces but"),
        ({"longest": 4}, "longest must be"),
        ({"kept": (0.8, 0.2)}, "largest_kept must be"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        synthesiser(**given)
