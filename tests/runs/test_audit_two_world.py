"""The two-world audit passes the real release path and fails copies of it in which one line was broken."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy import mechanism
from privacy.audit import two_world as audit
from privacy.clipping.norms import FlatClip, PerAdapterClip
from privacy.clipping.subspace import SubspaceClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Plan
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise, InsecureZeroNoise
from server.config.load import load
from simulations.benchmarks.privacy import planted_bugs
from simulations.benchmarks.privacy.planted_bugs import BOUND, CANARY, DIM, ROWS, Parts, Z
from simulations.presets.load import preset_files
from strategies import CONTROLLERS
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.plugins import build

REAL = Parts()

# An audit makes two thousand releases. The shapes along the way are checked in the mechanism's own tests.
pytestmark = pytest.mark.usefixtures("unchecked_shapes", "known_keys")


@pytest.fixture
def known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real noise from keys that are counted, not asked of the system: audits that take seconds miss their estimate
    by chance once in 15,000 times, and these err always or never."""
    numbers = itertools.count()

    def key(size: int) -> bytes:
        return hashlib.sha256(b"audit %d" % next(numbers)).digest()[:size]

    monkeypatch.setattr("privacy.randomness.rng.os", SimpleNamespace(urandom=key))


class TestTheRealPathPasses:
    def test_flat_clipping(self) -> None:
        result = REAL.audit()
        assert result.passed
        assert (result.repetitions, result.alpha) == (1000, 1e-3)
        # The canary is visible up to its bound and no further: the claim is tight, so the audit has something to see.
        assert result.mu_estimate == pytest.approx(1 / Z, abs=0.25)
        assert result.mu_lower > 1.3

    def test_joint_event_of_update_and_every_query(self) -> None:
        """All components at once, each moved as far as one unit can: the ledger's joint multiplier is what leaks."""
        parts, direction = planted_bugs.every_query()
        result = parts.audit(direction=direction, repetitions=300)
        assert result.passed
        assert result.mu_estimate == pytest.approx(1 / parts.plan.effective_noise_multiplier, abs=0.4)

    def test_per_adapter_clipping_with_its_unequal_noise(self) -> None:
        clip = PerAdapterClip((0.5, 1.0, 4.0), (8, 24, 32))
        # In encoded space the noise is isotropic and the canary lies along its own encoding; decoding is linear.
        weights = torch.cat([torch.full((d,), w) for d, w in zip(clip.sizes, clip.weights, strict=True)])
        result = Parts(plan=Plan(clip, Z)).audit(direction=clip.encode(CANARY[None])[0] * weights, repetitions=400)
        assert result.passed
        assert result.mu_estimate == pytest.approx(1 / Z, abs=0.35)

    @pytest.mark.nightly
    def test_clipping_in_a_public_subspace(self) -> None:
        """16 of 64 directions: the canary lies inside them, the honest rows mostly outside."""
        basis = torch.linalg.qr(torch.randn(DIM, 16, generator=torch.Generator().manual_seed(2))).Q.T.contiguous()
        canary = 100 * basis.sum(dim=0)
        plan = Plan(SubspaceClip(basis, BOUND), Z)
        result = audit.two_world(Parts(plan=plan).new_run(), ROWS, canary, noise_multiplier=Z, repetitions=400)
        assert result.passed
        assert result.mu_estimate == pytest.approx(1 / Z, abs=0.35)

    def test_two_rounds_have_independent_noise(self) -> None:
        result = REAL.audit_successive(repetitions=200)
        assert result.passed
        assert result.mu_estimate == pytest.approx(1 / Z / 2**0.5, abs=0.6)

    def test_with_the_durable_ledger(self, tmp_path: Path) -> None:
        audit_with_durable_ledger(tmp_path, repetitions=100)

    @pytest.mark.nightly
    def test_with_the_durable_ledger_at_full_size(self, tmp_path: Path) -> None:
        audit_with_durable_ledger(tmp_path, repetitions=1000)

    @pytest.mark.nightly
    @pytest.mark.parametrize("z", [0.5, 1.0, 2.0])
    def test_exact_noise(self, z: float) -> None:
        result = Parts(noise=DiscreteGaussianNoise, plan=Plan(FlatClip(BOUND, DIM), z)).audit()
        assert result.passed
        assert result.mu_estimate == pytest.approx(1 / z, abs=0.25)


def audit_with_durable_ledger(folder: Path, repetitions: int) -> None:
    commitment = Commitment("client", "add_remove", 1000, 1e9, 1e-5, mode="filter", order=2, rho=1e8)
    with Ledger.create(folder / "ledger.jsonl", commitment) as ledger:
        assert Parts(ledger=lambda: ledger).audit(repetitions=repetitions).passed
        charges = ledger.charges
        assert ledger.not_private is None
    assert len(charges) == 2 * repetitions
    assert all(charge.released_at for charge in charges)
    assert {charge.noise_multiplier for charge in charges} == {Z}


class TestPlantedBugsFail:
    """R = 1000 runs per world, alpha 1e-3; each bug is one line changed in a copy of the real module."""

    def test_noise_divided_by_the_population_instead_of_the_cohort(self) -> None:
        assert not planted_bugs.noise_over_population().audit().passed

    def test_weighting_by_the_number_of_examples(self) -> None:
        assert not planted_bugs.weighted_by_examples().audit().passed

    @pytest.mark.nightly
    def test_noise_before_averaging_with_the_wrong_sensitivity(self) -> None:
        assert not planted_bugs.noise_before_averaging().audit().passed

    @pytest.mark.nightly
    def test_clipping_per_tensor_under_noise_for_the_whole(self) -> None:
        assert not planted_bugs.clipped_per_tensor().audit().passed

    def test_a_clip_map_that_clips_per_tensor_does_no_harm_by_itself(self) -> None:
        """``contribute`` measures the norm of every encoded row again, whoever encoded it."""
        assert Parts(plan=planted_bugs.per_tensor_clip()).audit(repetitions=400).passed

    @pytest.mark.nightly
    def test_noise_used_again_in_the_next_round(self) -> None:
        result = planted_bugs.reused_noise().audit_successive()
        assert not result.passed
        assert result.mu_estimate > 100

    @pytest.mark.parametrize(
        "planted", [planted_bugs.noise_before_averaging, planted_bugs.clipped_per_tensor, planted_bugs.reused_noise]
    )
    def test_the_bugs_that_only_the_nightly_tests_audit_find_their_lines(self, planted: Callable[[], Parts]) -> None:
        assert planted().new_run()(ROWS).shape == (DIM,)

    def test_a_planted_bug_that_finds_its_line_gone_says_so(self) -> None:
        with pytest.raises(ValueError, match="once, it has 0"):
            planted_bugs.broken(mechanism, ("a line that is not there", ""))


class TestScaleIsIndependentOfTheCohort:
    """A realised divisor leaks too little for the audit at one release, so it is caught by arithmetic instead."""

    padded = torch.cat([ROWS, torch.zeros(5, DIM)])

    @staticmethod
    def noiseless(parts: Parts = REAL) -> audit.ReleasePath:
        return dataclasses.replace(parts, noise=InsecureZeroNoise).new_run()

    @pytest.mark.parametrize("absent", [1, 5, 20])
    def test_a_unit_that_brings_nothing_changes_nothing(self, absent: int) -> None:
        padded = torch.cat([ROWS, torch.zeros(absent, DIM)])
        assert torch.equal(self.noiseless()(padded), self.noiseless()(ROWS))

    def test_one_unit_moves_the_release_by_bound_over_expected_cohort_whoever_else_is_there(self) -> None:
        expected = CANARY.double() / CANARY.double().norm() * BOUND / 20
        for others in (ROWS[:0], ROWS[:3], ROWS):
            moved = self.noiseless()(torch.cat([others, CANARY[None]])) - self.noiseless()(others)
            torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)

    def test_a_planted_realised_divisor_is_caught_here_and_not_by_the_audit(self) -> None:
        assert planted_bugs.realised_divisor().audit(repetitions=400).passed
        release = self.noiseless(planted_bugs.realised_divisor())
        assert not torch.allclose(release(self.padded), release(ROWS), rtol=0.05)


class TestTheTestItself:
    def test_power_is_what_the_module_says(self) -> None:
        for z, share in ((0.5, 0.83), (1.0, 0.75), (4.0, 0.45)):
            assert 1 / z / audit.detectable_mu(1 / z) == pytest.approx(share, abs=0.01)

    def test_too_few_runs_to_ever_fail_are_refused(self) -> None:
        with pytest.raises(ValueError, match="could not fail"):
            REAL.audit(repetitions=10)

    def test_matched_filter_is_the_most_powerful_weighting(self) -> None:
        weights = audit.matched_filter([torch.tensor([1.0]), torch.tensor([3.0])], [0.5, 2.0])
        assert torch.equal(weights, torch.tensor([4.0, 0.75], dtype=torch.float64))

    @pytest.mark.parametrize(
        ("rows", "canary", "message"),
        [
            (ROWS, CANARY[:3], "honest must be"),
            (ROWS[0], CANARY, "honest must be"),
            (ROWS, torch.zeros(DIM), "direction must be finite and not zero"),
        ],
    )
    def test_bad_input_is_named(self, rows: Tensor, canary: Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            audit.two_world(REAL.new_run(), rows, canary, noise_multiplier=Z)

    def test_a_path_that_returns_nan_or_another_length_is_refused(self) -> None:
        with pytest.raises(ValueError, match="non-finite"):
            audit.two_world(lambda rows: rows.sum(dim=0) * float("nan"), ROWS, CANARY, noise_multiplier=Z)
        with pytest.raises(ValueError, match="release must return 64 numbers"):
            audit.two_world(lambda rows: rows[:, :3].sum(dim=0), ROWS, CANARY, noise_multiplier=Z)


def planned_by_presets() -> list[Any]:
    """Of every preset the plan of its first release under its controller, for an update of two halves, at Z."""
    found = {}
    for name, file in preset_files().items():
        if file.parent.name == "phases":  # their phases are planned by controllers that other presets have too
            continue
        config = load(file)
        controller: Any = build("", CONTROLLERS, config.strategy.controller, config.strategy.controller_options)
        info = RunInfo(config.rounds, ((DIM // 2, DIM // 2),), planted_bugs.SAMPLING, (Z,) * config.rounds)
        public = PublicSignals(0, 0.7)
        plan = controller.plan(controller.init(info, public), info, 0 if controller.initial(info.sampling) else 1)
        unit = "client" if config.privacy.unit == "client" else "record"
        found.setdefault((unit, repr(plan)), pytest.param(plan, id=f"{name}, {unit}"))
    return list(found.values())


@pytest.mark.nightly
@pytest.mark.parametrize("plan", planned_by_presets())
def test_the_release_of_every_preset_keeps_its_claim_and_a_quarter_of_its_noise_would_not(plan: Plan) -> None:
    """Power: the audit refutes, half of the time, whatever moves by more than ``detectable_mu``."""

    def units(rows: Tensor) -> Units:
        votes = torch.zeros(len(rows), dtype=torch.int64)
        return Units(rows, losses=torch.zeros(len(rows), dtype=torch.float64), votes=votes)

    class Quarter(GaussianNoise):
        def draw(self, blocks: Any) -> Tensor:
            return super().draw([(multiplier / 4, length) for multiplier, length in blocks])

    path = dataclasses.replace(REAL, plan=plan, units=units)
    width = len(path.new_run()(ROWS))
    update = CANARY if plan.clip.dim else CANARY[:0]
    answers = torch.eye(width - len(update))[0] if plan.clip.dim == 0 else torch.zeros(width - len(update))
    direction = torch.cat([update, answers])  # the first bin of a vote, where nothing else is released
    right = path.audit(direction=direction)
    assert right.passed
    claim = 1 / plan.effective_noise_multiplier
    assert audit.detectable_mu(claim) < 4 * claim
    wrong = dataclasses.replace(path, noise=Quarter).audit(direction=direction)
    assert not wrong.passed
