"""RLDP's own state runs under the flag only, holds the paper's statistics, and leaves its stamp."""

import math

import pytest
import torch
from scipy import stats

from client.record_level.calibration import commit
from client.record_level.settings import RecordLevelSettings
from privacy.clipping.units import Units
from server.config.load import parse
from server.config.methods import methods
from strategies.published.rldp import OF_PAIR, OF_RUN, PublishedRldp, reward, statistics
from strategies.state_files import classes_of, pack, unpack
from tests.cases.record_level import PRIVATE, records, run, site_training

NAME = "strategies.published.rldp:PublishedRldp"
SETTINGS = PRIVATE | {"steps": 8, "controller": NAME, "controller_options": {"clip-norm": 0.5, "interval": 2}}
FLAG = {"not_private": "privacy.non-private = true"}


def test_it_is_refused_without_the_flag_and_where_nobody_has_raw_gradients():
    with pytest.raises(ValueError, match=r"raw norms.* privacy.non-private"):
        commit(RecordLevelSettings(**SETTINGS), 12)
    with pytest.raises(ValueError, match=r"at record level only \(privacy.unit"):
        methods(parse({"privacy": {"non-private": True}, "strategy": {"controller": NAME}}))


def test_the_policy_of_the_sound_form_reads_another_state():
    with pytest.raises(ValueError, match=r"policy must be .*scratch.*, got 'pretrained'"):
        PublishedRldp(policy="pretrained")


def test_it_runs_under_the_flag_moves_its_thresholds_and_stamps_the_ledger(tmp_path):
    training = site_training(tmp_path, records(), **SETTINGS | FLAG)
    first = training.next_release().plan
    assert first.effective_noise_multiplier == pytest.approx(training.planner.info.noise_multiplier(1))
    assert first.queries == ()
    run(training, 8)
    state = training.state.controller
    assert "RLDP" in training.ledger.not_private
    assert training.ledger.epsilon_spent() == float("inf")
    assert state.actions == 3  # after steps 2, 4 and 6; the run ends with step 8
    assert any(scale != 0.0 for scale in state.scales)
    assert state.agent.stored == 3
    assert set(map(float, state.agent.buffer["reward"][:3])) != {0.0}


def test_the_papers_noise_is_what_its_blocks_have_together(tmp_path):
    def with_blocks(count):
        return SETTINGS | {"controller_options": {"clip-norm": 0.5, "interval": 8, "blocks": count}} | FLAG

    for folder in ("joint", "each", "more"):
        (tmp_path / folder).mkdir()
    joint = site_training(tmp_path / "joint", records(), **with_blocks(0)).next_release().plan
    count = len(joint.clip.bounds)
    assert count > 1
    training = site_training(tmp_path / "each", records(), **with_blocks(count))
    each = training.next_release().plan
    assert each.effective_noise_multiplier == pytest.approx(joint.effective_noise_multiplier / math.sqrt(count))
    assert each.clip == joint.clip
    run(training, 7)
    assert training.state.controller.scales == pytest.approx([0.0] * count), "it acts after the last step alone"
    with pytest.raises(ValueError, match=f"blocks must be 0 or the number of adapters, {count}, got {count + 1}"):
        site_training(tmp_path / "more", records(), **with_blocks(count + 1)).next_release()


def test_the_statistics_are_the_papers():
    generator = torch.Generator().manual_seed(3)
    rows, losses = torch.randn(7, 5, generator=generator), torch.rand(7, generator=generator)
    found = statistics([Units(rows[:3], losses[:3]), Units(rows[3:], losses[3:])], (2, 3)).numpy()
    norms = torch.cat([rows[:, :2].norm(dim=1), rows[:, 2:].norm(dim=1)]).double().numpy()
    quartiles = torch.quantile(torch.from_numpy(norms), torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    shape = [norms.std() / norms.mean(), stats.skew(norms), stats.kurtosis(norms)]
    loss = float(losses.mean())
    assert found[2 * OF_PAIR :] == pytest.approx([*quartiles, norms.max(), *shape, -loss, loss], rel=1e-5)
    fisher = rows.double().square().mean(dim=0).numpy()
    moments = [fisher[:2].mean(), fisher[:2].var(), fisher[2:].mean(), fisher[2:].var()]
    assert found[: 2 * OF_PAIR] == pytest.approx(moments, rel=1e-5)


def test_the_reward_is_utility_per_budget_bounded_below():
    assert reward(0.1, 0.05) == pytest.approx(math.log1p(0.1 / 0.050001))
    assert reward(0.0, 0.05) == 0.0
    assert reward(-3.0, 0.05) == -5.0


def test_its_state_survives_a_checkpoint_and_a_step_without_records_changes_nothing(tmp_path):
    training = site_training(tmp_path, records(), **SETTINGS | FLAG)
    run(training, 3)
    state = training.state.controller
    assert training.planner.controller.see(state, training.planner.info, []) is state
    assert state.sums.shape == (len(training.planner.info.blocks(1)) * OF_PAIR + OF_RUN,)
    tensors = {}
    document = pack(state, "state", tensors)
    again = unpack(document, tensors, classes_of(state))
    assert torch.equal(again.sums, state.sums)
    assert again.scales == state.scales
    assert torch.equal(again.agent.buffer["local"], state.agent.buffer["local"])
