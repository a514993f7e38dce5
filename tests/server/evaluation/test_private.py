"""Private evaluation: its estimate and interval, its noise and price, what is refused, and a rule that follows it."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from privacy.accountants import composition
from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import charged_release
from privacy.randomness.noise import GaussianNoise
from privacy.randomness.rng import simulation_generator
from privacy.randomness.sampling import CohortSampler, split_units
from server.config.load import ConfigError, parse
from server.config.schema import RunConfig
from server.evaluation.private import NORMAL_95, PrivateEvaluation, accuracy_within, within
from server.runs.commitment import commit_clients, evaluation_steps, round_sampling
from strategies.controllers.dp_lac import LacState
from strategies.controllers.fixed import Fixed
from strategies.controllers.loss_following import follow_loss

N, REPEATS = 500, 200


def settings(**evaluation: object) -> RunConfig:
    evaluation = {"data": "private", "every": 4, "held-out": 0.4} | evaluation
    privacy = {"epsilon": 4.0, "delta": 1e-4}
    return parse({"rounds": 8, "clients": N, "sampling-rate": 0.2, "privacy": privacy, "evaluation": evaluation})


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    _, out = split_units(Poisson(1.0, N), 0.4, 0, 1.0)
    steps = (FloorStep("evaluation", replace(out, rate=1.0), 0.0, 3 * REPEATS),)
    commitment = Commitment("client", "add_remove", N, 1.0, 1e-4, floor=steps, not_private="a test without a budget")
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as made:
        yield made


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_estimate_is_unbiased_and_its_interval_covers(ledger: Ledger, rate: float) -> None:
    """Of losses beyond the bound, too: what is estimated is the mean of the clipped ones."""
    _, out = split_units(Poisson(1.0, N), 0.4, 0, rate)
    draws = simulation_generator(0, "answers")
    losses, hits = draws.gamma(2.0, 0.4, N), draws.uniform(0.5, 1.0, N)
    held = CohortSampler.create().draw(replace(out, rate=1.0), 0, label="evaluation").ids
    exact = {"loss": np.minimum(losses, 1.5)[held].mean(), "accuracy": hits[held].mean()}
    evaluation, sampler = PrivateEvaluation(out, 4.0, 1.5), CohortSampler.create()
    found = {"loss": list[float](), "accuracy": list[float]()}
    covered = {"loss": 0, "accuracy": 0}
    for round in range(REPEATS):
        cohort = sampler.draw(out, round, label="evaluation")
        units = Units(torch.zeros(len(cohort), 0), torch.from_numpy(losses[cohort.ids]))
        units = replace(units, accuracies=torch.from_numpy(hits[cohort.ids]))
        total = contribute(units, evaluation.plan)
        metrics = evaluation.estimate(charged_release(total, evaluation.plan, cohort, ledger=ledger))
        for name, values in found.items():
            values.append(getattr(metrics, name))
            covered[name] += abs(values[-1] - exact[name]) <= getattr(metrics, f"{name}_within")
    for name, query in zip(found, evaluation.plan.queries, strict=True):
        width = within(query, out)  # type: ignore[arg-type]
        error = np.mean(found[name]) - exact[name]
        assert abs(error) < 4 * width / NORMAL_95 / math.sqrt(REPEATS), name
        assert covered[name] >= 0.95 * REPEATS - 4 * math.sqrt(0.05 * 0.95 * REPEATS), name
        if rate == 1.0:  # the interval is of the noise alone then, and no wider than it must be
            assert np.std(found[name]) == pytest.approx(width / NORMAL_95, rel=0.25)


def test_confusions_are_unbiased_and_their_intervals_cover(ledger: Ledger) -> None:
    _, out = split_units(Poisson(1.0, N), 0.4, 0, 1.0)
    draws = simulation_generator(0, "cells")
    shares = draws.dirichlet([6.0, 1.0, 2.0, 1.0, 6.0, 2.0, 1.0, 1.0, 9.0], N)
    held = CohortSampler.create().draw(replace(out, rate=1.0), 0, label="evaluation").ids
    exact, evaluation, sampler = shares[held].sum(0), PrivateEvaluation(out, 4.0, 1.5, 3), CohortSampler.create()
    found, covered = [], 0
    for round in range(REPEATS):
        cohort = sampler.draw(out, round, label="evaluation")
        units = Units(torch.from_numpy(shares[cohort.ids]), torch.ones(len(cohort)))
        total = contribute(replace(units, accuracies=torch.ones(len(cohort))), evaluation.plan)
        metrics = evaluation.estimate(charged_release(total, evaluation.plan, cohort, ledger=ledger))
        assert metrics.confusion is not None
        assert metrics.confusion_within is not None
        found.append(np.array(metrics.confusion).ravel())
        covered += int((np.abs(found[-1] - exact) <= metrics.confusion_within + 0.5).sum())
    std = metrics.confusion_within / NORMAL_95
    assert np.abs(np.mean(found, 0) - exact).max() < 5 * std / math.sqrt(REPEATS) + 0.5
    cells = 9 * REPEATS
    assert covered >= 0.95 * cells - 4 * math.sqrt(0.05 * 0.95 * cells)
    assert np.std(found, 0).max() <= 1.25 * std, "nearest shares have no more noise than the release"


def test_all_three_answers_together_cost_what_was_committed() -> None:
    _, out = split_units(Poisson(1.0, N), 0.4, 0, 1.0)
    plan = PrivateEvaluation(out, 3.0, 1.386, 4).plan
    assert plan.effective_noise_multiplier == pytest.approx(3.0, rel=1e-9)
    assert PrivateEvaluation(out, 3.0, 1.386, tokens=500).plan.effective_noise_multiplier == pytest.approx(
        3.0, rel=1e-9
    )
    assert accuracy_within(out, 3.0, 3) == pytest.approx(within(plan.queries[1], out))  # type: ignore[arg-type]


def test_both_answers_together_cost_what_was_committed() -> None:
    _, out = split_units(Poisson(1.0, N), 0.4, 0, 1.0)
    plan = PrivateEvaluation(out, 3.0, 1.386).plan
    assert plan.effective_noise_multiplier == pytest.approx(3.0, rel=1e-12)
    assert [query.sensitivity for query in plan.queries] == [0.693, 0.5]


def test_evaluations_are_in_the_commitment_and_cost_the_rounds_nothing() -> None:
    config = settings()
    calibrated = commit_clients(config, Fixed())
    (step,) = (step for step in calibrated.commitment.floor if step.label == "evaluation")
    assert (step.count, step.sampling.expected_units) == (2, round(step.sampling.expected_units))
    for part in composition.parts(calibrated.commitment.floor):
        assert 0.99 * 4.0 < composition.epsilon(part, 1e-4) <= 4.0
    public = commit_clients(settings(data="public"), Fixed())
    assert calibrated.multipliers == public.multipliers
    assert round_sampling(config).expected_units == pytest.approx(0.2 * (N - step.sampling.expected_units))


def test_a_smaller_share_of_the_budget_is_kept_to() -> None:
    (half,), (whole,) = evaluation_steps(settings(epsilon=1.0)), evaluation_steps(settings())
    assert composition.epsilon([half], 1e-4) <= 1.0
    assert half.noise_multiplier > whole.noise_multiplier


def test_sampling_saves_work_and_never_noise() -> None:
    some, everyone = (evaluation_steps(settings(**{"sampling-rate": rate}))[0] for rate in (0.5, 1.0))
    noise = [step.noise_multiplier / step.sampling.expected_units for step in (some, everyone)]
    assert noise[0] > noise[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluation.epsilon": 5.0}, "evaluation.epsilon = 5 must be at most privacy.epsilon = 4"),
        ({"privacy.mode": "filter"}, "privacy.mode = 'filter' must be 'floor' with evaluation.data = 'private'"),
        ({"privacy.unit": "record", "clients": 1}, "privacy.unit = 'record' must be 'client'"),
        ({"audit.canaries": 4}, "audit.canaries = 4 must be 0 with evaluation.data = 'private'"),
        ({"evaluation.confusion": True, "evaluation.data": "public"}, "evaluation.confusion = true asks held-out"),
        ({"evaluation.confusion": True, "model.task": "causal-lm"}, "(now 'private', 'causal-lm')"),
        ({"evaluation.tokens": 100}, "evaluation.tokens = 100 asks held-out clients"),
        ({"evaluation.loss-bound": -1.0}, "evaluation.loss-bound"),
        ({"evaluation.held-out": 1.0}, "evaluation.held-out"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], said: str) -> None:
    table = settings().to_table()
    for key, value in changes.items():
        group, _, name = key.rpartition(".")
        (table[group] if group else table)[name] = value
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(table)


def test_too_few_held_out_clients_are_refused_with_the_interval_they_would_give() -> None:
    with pytest.raises(
        ConfigError, match=r"held-out clients, asked 8 times .* known to \+-\d+ points \(95 %\)"
    ) as caught:
        commit_clients(settings(**{"held-out": 0.02, "every": 1}), Fixed())
    assert "Raise evaluation.every (now 1), clients (now 500), evaluation.held-out (now 0.02)" in str(caught.value)
    _, out = split_units(Poisson(1.0, N), 0.02, 0, 1.0)
    assert accuracy_within(out, 4.0) > 0.25


def test_noise_ratchets_the_papers_threshold_down_and_not_the_smooth_one() -> None:
    """A loss that stays the same, seen with 5 % of noise forty times: DP-LAC's rule reads every dip as progress."""
    draws = simulation_generator(1, "losses")
    ends = {True: list[float](), False: list[float]()}
    for _ in range(50):
        for smooth, found in ends.items():
            state = LacState(1.0, 1.0, math.nan, math.nan)
            for loss in 0.6 * (1 + 0.05 * draws.standard_normal(40)):
                state = follow_loss(state, loss, smooth=smooth, floor=1 / 64)
            found.append(state.bound)
    assert 0.2 < np.mean(ends[False]) < 0.5
    assert np.mean(ends[True]) > 0.85


def test_noise_is_drawn_behind_the_charge(ledger: Ledger) -> None:
    charged = []

    class Watched(GaussianNoise):
        def draw(self, parts):  # type: ignore[no-untyped-def]
            charged.append(len(ledger.charges))
            return super().draw(parts)

    _, out = split_units(Poisson(1.0, N), 0.4, 0, 1.0)
    plan, cohort = PrivateEvaluation(out, 4.0, 1.5).plan, CohortSampler.create().draw(out, 1, label="evaluation")
    units = Units(torch.zeros(1, 0), torch.ones(1), accuracies=torch.ones(1))
    charged_release(contribute(units, plan), plan, cohort, ledger=ledger, noise=Watched())
    assert charged == [1]
