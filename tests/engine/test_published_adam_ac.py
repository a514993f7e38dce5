"""DP-Adam-AC's own rule runs under the flag only, does what the paper says, and leaves its stamp."""

import pytest
import torch

from client.record_level.calibration import commit
from client.record_level.settings import RecordLevelSettings
from privacy.clipping.units import Units
from strategies.published.adam_ac import PublishedAdamAc
from tests.cases.record_level import PRIVATE, records, run, site_training

NAME = "strategies.published.adam_ac:PublishedAdamAc"
SETTINGS = PRIVATE | {"controller": NAME, "controller_options": {"clip-norm": 0.5, "micro-batch": 2}}


def _units(*norms):
    return [Units(torch.tensor(norms)[:, None])]


def test_it_is_refused_without_the_flag():
    with pytest.raises(ValueError, match=r"raw norms .* privacy.non-private"):
        commit(RecordLevelSettings(**SETTINGS), 12)


def test_it_runs_under_the_flag_with_its_own_noise_and_stamps_the_ledger(tmp_path):
    training = site_training(tmp_path, records(), **SETTINGS | {"not_private": "privacy.non-private = true"})
    plan = training.next_release().plan
    sigma = training.planner.info.noise_multiplier(1)
    noise_on_sum = plan.noise_multiplier * plan.clip.bound
    assert noise_on_sum == pytest.approx(sigma * 0.5)  # sigma C, though a micro-batch may bring C m
    run(training, 3)
    assert "published rule" in training.ledger.not_private
    assert training.ledger.epsilon_spent() == float("inf")
    assert training.state.controller.bound != 0.5


def test_the_threshold_is_the_percentile_of_what_was_seen_and_the_step_follows_the_clip_rate():
    rule = PublishedAdamAc(clip_norm=1.0, micro_batch=2, clip_rate=0.25, buffer=4)
    state = rule.see(rule.init(None, None), None, _units(1.0, 2.0, 6.0, 8.0))  # per record .5, 1, 3, 4
    assert state.history == (0.5, 1.0, 3.0, 4.0)
    assert state.bound == pytest.approx(3.25)
    assert state.scale == pytest.approx(0.995)  # half of them were beyond C = 1
    state = rule.see(state, None, _units(1.0, 1.0))
    assert state.history == (3.0, 4.0, 0.5, 0.5)
    assert state.scale == pytest.approx(0.995 * 1.01)
    assert rule.see(state, None, []) == state


def test_micro_batches_are_sums_of_rows():
    rule = PublishedAdamAc(micro_batch=2)
    chunks = [Units(torch.tensor([[1.0], [2.0], [4.0]])), Units(torch.tensor([[8.0], [16.0]]))]
    (units,) = rule.regroup_rows(chunks)
    assert units.rows.flatten().tolist() == [3.0, 12.0, 16.0]
