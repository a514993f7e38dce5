"""The controller ``rl``: what it sees, what it plans, what the filter pays, and that a pause changes nothing."""

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import strategies.controllers.rl
from privacy.accountants import renyi
from privacy.accountants.calibration import filter_commitment
from privacy.clipping.norms import PerAdapterClip
from privacy.clipping.units import Units
from privacy.contribution import Contribution, contribute
from privacy.errors import BudgetExceeded
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release, charged_release
from privacy.queries import AdapterBits
from privacy.randomness.noise import InsecureSeededNoise, InsecureZeroNoise
from privacy.randomness.rng import simulation_generator, torch_generator
from server.run_folder.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.rl import spending
from strategies.controllers.rl.controller import Rl
from strategies.controllers.rl.decisions import MOST_REWARD, RlState, observation, reward
from strategies.controllers.rl.features import add, empty_interval
from strategies.controllers.rl.sac import FILE, document, fresh_weights, policy_weights
from strategies.server_update import ServerState
from tests.cases.drawn import cohort

SIZES = (4, 2, 6)
DIM = sum(SIZES)
SAMPLING = Poisson(0.1, 300)
ROUNDS = 24
EPSILON, DELTA = 4.0, 1e-4
COMMITMENT, Z = filter_commitment(EPSILON, DELTA, SAMPLING, ROUNDS)
FILTER = RunInfo(ROUNDS, (SIZES,), SAMPLING, (Z,) * ROUNDS, COMMITMENT.order)
FLOOR = replace(FILTER, order=None)
SCRATCH = Rl(policy="scratch", interval=2, warm_up=3, batch=8, clip_norm=2.0)


def rows(round: int, clients: int = 30) -> torch.Tensor:
    return torch.randn(clients, DIM, generator=torch_generator(round, "rows")) * 0.5


def release_of(plan: Any, round: int, ledger: Ledger, noise: Any = None) -> Release:
    total = contribute(Units(rows(round)), plan)
    noise = noise or InsecureSeededNoise(round)
    return charged_release(total, plan, cohort(SAMPLING, round, ledger), ledger=ledger, noise=noise)


def loss_after(round: int) -> float:
    return 0.7 * 0.97**round + 0.01 * math.sin(round)


@pytest.fixture
def filtered(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger.jsonl", replace(COMMITMENT, not_private="a test"))


def follow(controller: Rl, setting: RunInfo, ledger: Ledger, rounds: int = ROUNDS) -> list[RlState]:
    """The states before rounds 1..rounds and after the last."""
    states = [controller.init(setting, PublicSignals(0, loss_after(0)))]
    for round in range(1, rounds + 1):
        plan = controller.plan(states[-1], setting, round)
        release = release_of(plan, round, ledger)
        states.append(
            controller.update(states[-1], setting, release, PublicSignals(round, loss_after(round), ledger.rho_spent))
        )
    return states


# --- privacy ------------------------------------------------------------------------------------------------------


def test_it_sees_releases_and_public_values_only() -> None:
    """By types, and by what its modules import: a Release is made by the mechanism alone."""
    hints = get_type_hints(Rl.update)
    assert hints == {"state": RlState, "info": RunInfo, "released": Release, "public": PublicSignals, "return": RlState}
    assert get_type_hints(add)["released"] is Release
    folder = Path(strategies.controllers.rl.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            assert not names & {"Units", "Contribution", "contribute", "charged_release"}, path.name


def test_the_threshold_of_every_adapter_is_told(filtered: Ledger) -> None:
    state = follow(SCRATCH, FILTER, filtered, 6)[-1]
    clip = SCRATCH.plan(state, FILTER, 7).clip
    assert isinstance(clip, PerAdapterClip)
    assert len(set(clip.bounds)) == len(SIZES)
    told = SCRATCH.released_values(state, FILTER)
    assert [told[f"clip-bound-{number}"] for number in (1, 2, 3)] == pytest.approx(list(clip.bounds))
    assert told["clip-bound"] == pytest.approx(math.hypot(*clip.bounds))


@pytest.mark.parametrize("seed", range(6))
def test_a_ledger_pays_for_a_whole_run_whatever_the_agent_does(seed: int, filtered: Ledger) -> None:
    """Random offsets, up to the extremes; every round is held and epsilon is never exceeded."""
    generator, controller = simulation_generator(seed, "offsets"), replace(SCRATCH, noise_range=2.0)
    state = controller.init(FILTER, PublicSignals(0, 0.7))
    multipliers = []
    for round in range(1, ROUNDS + 1):
        offset = float(generator.choice([-math.log(2), math.log(2), generator.uniform(-0.7, 0.7)]))
        state = replace(state, offset=offset if seed else -math.log(2))
        plan = controller.plan(state, FILTER, round)
        multipliers.append(plan.effective_noise_multiplier)
        release = release_of(plan, round, filtered)
        state = controller.update(state, FILTER, release, PublicSignals(round, loss_after(round), filtered.rho_spent))
        assert renyi.epsilon_of(filtered.rho_spent, COMMITMENT.order or 0, DELTA) <= EPSILON
    assert len(filtered.events) == ROUNDS
    assert max(multipliers) / min(multipliers) > 1.2
    assert Z / 2.001 < min(multipliers)


def test_an_even_spender_spends_what_an_even_run_would(filtered: Ledger) -> None:
    state = Rl().init(FILTER, PublicSignals(0, 0.7))
    for round in range(1, 6):
        plan = Rl().plan(state, FILTER, round)
        assert plan.effective_noise_multiplier == pytest.approx(Z, rel=1e-6)
        state = replace(state, spent=state.spent + spending.cost(FILTER, plan.effective_noise_multiplier))


def test_less_noise_than_the_filter_pays_for_is_refused_by_the_ledger(filtered: Ledger) -> None:
    """The planted violation: a controller that ignores the rule and wishes for nine tenths of the noise."""
    state = SCRATCH.init(FILTER, PublicSignals(0, 0.7))
    greedy = [SCRATCH.plan(state, FILTER, round) for round in range(1, ROUNDS + 1)]
    for round, plan in enumerate(greedy, start=1):
        bits = replace(plan.queries[0], noise_std=0.9 * plan.queries[0].noise_std)  # type: ignore[type-var]
        plan = replace(plan, noise_multiplier=0.9 * plan.noise_multiplier, queries=(bits,))
        event = ReleaseEvent("round", round, SAMPLING, plan.components())
        if filtered.would_exceed(event) is not None:
            break
        filtered.charge(event)
    else:
        raise AssertionError("the ledger paid for everything")
    assert 1 < round < ROUNDS
    before = filtered.path.read_bytes()
    with pytest.raises(BudgetExceeded, match="add noise or stop"):
        charged_release(
            Contribution.zero(plan), plan, cohort(SAMPLING, round, filtered), ledger=filtered, noise=InsecureZeroNoise()
        )
    assert filtered.path.read_bytes() == before


def test_rounds_that_failed_are_paid_by_the_later_ones(filtered: Ledger) -> None:
    """Three charges without a release: the controller hears of them, adds noise, and all rounds are still held."""
    state = SCRATCH.init(FILTER, PublicSignals(0, 0.7))
    for round in range(1, ROUNDS + 1):
        plan = SCRATCH.plan(state, FILTER, round)
        if round in (3, 7, 15):
            filtered.charge(ReleaseEvent("round", round, SAMPLING, plan.components()))
        release = release_of(plan, round, filtered)
        state = SCRATCH.update(state, FILTER, release, PublicSignals(round, loss_after(round), filtered.rho_spent))
    assert len(filtered.events) == ROUNDS + 3


def test_in_floor_mode_every_round_has_the_runs_own_noise() -> None:
    state = replace(SCRATCH.init(FLOOR, PublicSignals(0, 0.7)), offset=-0.3)
    for round in (1, 10, ROUNDS):
        assert SCRATCH.plan(state, FLOOR, round).effective_noise_multiplier == pytest.approx(Z, rel=1e-12)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_bits_and_update_are_one_gaussian_of_the_multiplier(share: float) -> None:
    plan = replace(SCRATCH, bit_share=share).plan(SCRATCH.init(FLOOR, PublicSignals(0, 0.7)), FLOOR, 1)
    (bits,) = plan.queries
    assert isinstance(plan.clip, PerAdapterClip)
    assert isinstance(bits, AdapterBits)
    assert bits.thresholds == plan.clip.bounds
    assert bits.sensitivity == pytest.approx(math.sqrt(3) / 2)
    assert (bits.sensitivity / bits.noise_std * Z) ** 2 == pytest.approx(share)
    assert plan.noise_multiplier == pytest.approx(Z / math.sqrt(1 - share))
    assert math.hypot(*plan.clip.bounds) == pytest.approx(2.0)


# --- what the agent sees and does ---------------------------------------------------------------------------------


def test_bits_and_energies_are_estimated_without_bias(released: Callable[..., Release]) -> None:
    controller = Rl(clip_norm=1.5, bit_share=0.3)
    plan = controller.plan(controller.init(FLOOR, PublicSignals(0, 0.7)), FLOOR, 1)
    units = Units(rows(1))
    heard = add(empty_interval(3), released(plan, contribute(units, plan), SAMPLING))
    m, (bits,) = SAMPLING.expected_units, plan.queries
    assert isinstance(bits, AdapterBits)
    assert isinstance(plan.clip, PerAdapterClip)
    weight = (1 / 12) / (1 / 12 + (bits.noise_std / m) ** 2)
    start = 0
    for k, (size, bound) in enumerate(zip(SIZES, plan.clip.bounds, strict=True)):
        block = rows(1)[:, start : start + size].double()
        norms = block.norm(dim=1, keepdim=True)
        clipped = (block * (bound / norms).clamp(max=1)).sum(dim=0) / m
        noise = size * (Z / math.sqrt(0.7) / plan.clip.weights[k] / m) ** 2
        share = float((norms <= bound).double().mean())
        assert heard.shares[k] == pytest.approx(weight * (share - 0.5), abs=1e-6)
        assert heard.energy[k] == pytest.approx(noise / bound**2, rel=1e-6)
        assert heard.excess[k] == pytest.approx((float(clipped.square().sum()) - noise) / bound**2, rel=1e-4)
        start += size
    noisy = [
        add(empty_interval(3), released(plan, contribute(units, plan), SAMPLING, InsecureSeededNoise(s))).excess
        for s in range(60)
    ]
    spread = np.std(noisy, axis=0) / math.sqrt(len(noisy))
    exact = [excess + energy for excess, energy in zip(heard.excess, heard.energy, strict=True)]
    assert bool((np.abs(np.mean(noisy, axis=0) - exact) < 4 * spread).all())


def test_the_reward_is_the_gain_or_the_gain_per_budget_spent() -> None:
    state = SCRATCH.init(FLOOR, PublicSignals(0, 0.8))
    state = replace(
        state, spent=6.0, spent_before=3.0, loss_before=0.8, loss=0.72, heard=replace(empty_interval(3), rounds=2)
    )
    for per_spent, factor in ((False, 4.0), (True, 4.0 * 2 / 3)):  # three rounds' worth was spent on two
        assert reward(state, FLOOR, per_spent) == pytest.approx(factor * math.log(0.8 / 0.72))
        assert reward(replace(state, loss=0.88), FLOOR, per_spent) == pytest.approx(factor * math.log(0.8 / 0.88))
        for lost in (math.inf, math.nan, 800.0):
            assert reward(replace(state, loss=lost), FLOOR, per_spent) == -MOST_REWARD
    assert reward(replace(state, spent=3.0), FLOOR, True) == MOST_REWARD


def test_thresholds_move_by_the_step_and_stay_within_their_reach(filtered: Ledger) -> None:
    controller = replace(SCRATCH, interval=1, step=0.9, reach=10.0, warm_up=10**6)
    scales = [state.scales for state in follow(controller, FILTER, filtered)]
    changes = [abs(b - a) for one, two in pairwise(scales) for a, b in zip(one, two, strict=True)]
    assert 0.5 < max(changes) <= 0.9
    assert max(abs(scale) for row in scales for scale in row) == pytest.approx(math.log(10))
    assert scales[-1] == scales[-2], "nothing is decided after the last round"


def test_it_acts_every_k_rounds_and_hears_all_of_them(filtered: Ledger) -> None:
    states = follow(replace(SCRATCH, interval=5), FILTER, filtered)
    assert [state.actions for state in states] == [round // 5 for round in range(ROUNDS + 1)]
    assert [state.heard.rounds for state in states] == [*(round % 5 for round in range(ROUNDS)), 0]
    assert states[-1].agent.stored == 4, "three between four actions, and the last one's end"
    assert states[-1].agent.buffer["end"].tolist()[:4] == [0.0, 0.0, 0.0, 1.0]


def test_features_are_finite_whatever_happens() -> None:
    state = SCRATCH.init(FILTER, PublicSignals(0, 0.7))
    wild = replace(
        state,
        heard=replace(empty_interval(3), rounds=1, excess=(1e12, -1e12, 0.0), energy=(0.0, 1e-12, 1e12)),
        loss=math.inf,
    )
    local, whole = observation(wild, FILTER, SCRATCH.acting, 5)
    assert bool(local.isfinite().all())
    assert bool(whole.isfinite().all())


def test_the_shipped_policy_is_small_whole_and_better_than_chance_on_a_federation_it_never_saw() -> None:
    from simulations.benchmarks.papers.synthetic_federation import draw_problem, hold_run
    from strategies.controllers.fixed import Fixed

    assert (Path(strategies.controllers.rl.__file__).parent / FILE).stat().st_size < 200_000
    shapes = {name: weight.shape for name, weight in fresh_weights(0).items()}
    assert {name: weight.shape for name, weight in policy_weights("pretrained").items()} == shapes
    problem = draw_problem(30_007, rounds=40)
    by_policy, state = hold_run(problem, Rl(clip_norm=problem.clip_norm * 4), 1)
    still, _ = hold_run(problem, Fixed(problem.clip_norm * 4), 1)
    assert by_policy[-1] < still[-1], "it shrinks thresholds that are far too large"
    assert state.agent.stored == 0, "and does not learn unless asked"


def test_a_policy_of_ones_own_comes_from_a_file_and_what_it_saw_did_and_earned_is_told(tmp_path: Path) -> None:
    from simulations.benchmarks.papers.synthetic_federation import draw_problem, hold_run

    problem, mine, whole = draw_problem(30_007, rounds=40), tmp_path / "mine.json", policy_weights("pretrained")
    changed = {name: -weight if name.startswith("actor.adapter.2") else weight for name, weight in whole.items()}
    mine.write_text(document(changed, {"data": "none"}), encoding="utf-8")
    told = {}
    for policy in ("pretrained", str(mine)):
        controller = Rl(clip_norm=problem.clip_norm, policy=policy)
        told[policy] = controller.released_values(hold_run(problem, controller, 1)[1], problem.setting)
    theirs, own = told.values()
    moved = {name: (theirs[name], own[name]) for name in theirs if name.startswith("action-")}
    assert set(moved) == {"action-noise"} | {f"action-{number}" for number in range(1, len(problem.sizes) + 1)}
    assert any(a * b < 0 for a, b in moved.values()), "the last layer of the other policy has the other sign"
    assert own["actions"] > 0
    assert own["reward"] != 0
    assert own["sees-progress"] == pytest.approx(2 * 38 / 40 - 1), "it acted last after round 38"
    assert {f"sees-unclipped-{number}" for number in range(1, len(problem.sizes) + 1)} <= set(own)


def test_a_training_shorter_than_the_first_judgement_leaves_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulations.benchmarks.papers import rldp_pretraining

    monkeypatch.setattr(rldp_pretraining, "draw_problem", partial(rldp_pretraining.draw_problem, rounds=10))
    rldp_pretraining.train(1, 40, 1, 0, tmp_path / "mine.json")
    assert Rl(policy=str(tmp_path / "mine.json")).policy == str(tmp_path / "mine.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "which holds no policy"),
        ('{"safetensors": "AAAA"}', "which holds no policy"),
        (document({"actor": torch.zeros(2)}, {}), "whose weights have other names or shapes"),
        (document(fresh_weights(0) | {"actor.noise.1.bias": torch.full((2,), math.nan)}, {}), "are not finite"),
    ],
)
def test_a_file_that_is_no_policy_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        Rl(policy=str(file))


# --- pauses and bad input -----------------------------------------------------------------------------------------


def test_learning_is_the_same_in_two_runs_and_differs_between_seeds(tmp_path: Path) -> None:
    ledgers = [Ledger.create(tmp_path / f"{i}.jsonl", replace(COMMITMENT, not_private="a test")) for i in range(3)]
    one, two = (follow(SCRATCH, FILTER, ledger)[-1] for ledger in ledgers[:2])
    other = follow(replace(SCRATCH, seed=1), FILTER, ledgers[2])[-1]
    assert one.agent.steps > 0
    assert one.scales == two.scales
    assert one.scales != other.scales
    for name, weight in one.agent.weights.items():
        assert torch.equal(weight, two.agent.weights[name])


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, filtered: Ledger) -> None:
    """Through the server's own checkpoint, in the middle of learning: the same plans from the same releases."""
    state = restored = SCRATCH.init(FILTER, PublicSignals(0, loss_after(0)))
    vector = torch.zeros(DIM)
    for round in range(1, ROUNDS + 1):
        plan = SCRATCH.plan(state, FILTER, round)
        assert replace(SCRATCH).plan(restored, FILTER, round) == plan
        release = release_of(plan, round, filtered)
        public = PublicSignals(round, loss_after(round), filtered.rho_spent)
        state, restored = (
            SCRATCH.update(state, FILTER, release, public),
            SCRATCH.update(restored, FILTER, release, public),
        )
        if round in (4, 11, 18):  # between two actions, and right after one
            checkpoint = Checkpoint(ServerState(round, vector, vector, {}, restored), None, (), filtered.head)
            save_checkpoint(tmp_path, checkpoint)
            fresh = SCRATCH.init(FILTER, PublicSignals(0, loss_after(0)))
            restored = load_checkpoint(tmp_path, ServerState(0, vector, vector, {}, fresh)).state.controller
    assert restored.agent.steps == state.agent.steps > 0
    assert restored.scales == state.scales


def test_what_it_cannot_work_with_is_said(released: Callable[..., Release]) -> None:
    state = SCRATCH.init(FLOOR, PublicSignals(0, 0.7))
    plan = SCRATCH.plan(state, FLOOR, 1)
    with pytest.raises(ValueError, match=r"set evaluation\.every = 1"):
        SCRATCH.update(state, FLOOR, released(plan, Contribution.zero(plan), SAMPLING), PublicSignals(1, None))
    with pytest.raises(ValueError, match=r"adapters .*got 3 and 2"):
        SCRATCH.init(replace(FLOOR, layouts=(SIZES, (4, 2))), PublicSignals(0, 0.7))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be > 0"),
        ({"interval": -1}, "interval must be"),
        ({"noise_range": 1.0}, "noise_range must be"),
        ({"reach": 1.0}, "reach must be"),
        ({"bit_share": 1.0}, "bit_share must be"),
        (
            {"policy": "mine.json"},
            "policy must be 'pretrained', 'scratch' or the file .*'mine.json', which cannot be read",
        ),
        ({"reward": "mine"}, "reward must be"),
        ({"temperature": -1.0}, "temperature must be > 0"),
        ({"updates": 0}, "updates must be"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rl(**options)
