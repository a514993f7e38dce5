"""AdaCliP and GeoClip learn from noisy releases what their papers say, and then carry less noise than flat clipping."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping.units import Units
from privacy.clipping.whitening import AdaClip, GeoClip
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.mechanism import Release, charged_release
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from strategies.conformance.controllers import check_controller
from strategies.controllers.adaclip import Adaclip
from strategies.controllers.controller import Controller, PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed
from strategies.controllers.geoclip import Geoclip
from strategies.state_files import same_bits

D, SAMPLING, Z = 20, Poisson(0.2, 1000), 1.5
STD = torch.cat([torch.full((4,), 1.0), torch.full((16,), 0.05)]).double()  # sums to 4.8, norm 2.01
ROTATION = torch.linalg.qr(torch.randn(D, D, generator=torch_generator(2, "rotation"), dtype=torch.float64)).Q


@dataclass
class Rows:
    """Stationary rows N(mean, R^T diag(STD^2) R), a Poisson cohort of them every round, and the real mechanism."""

    ledger: Any
    rotation: Tensor | None = None
    mean: float = 0.0
    noise: float = Z

    def release(self, plan: Plan, round: int) -> Release:
        cohort = CohortSampler.insecure_from_seed(1).draw(SAMPLING, round)
        draws = torch.randn(len(cohort), D, generator=torch_generator(1, "rows", round), dtype=torch.float64) * STD
        rows = self.mean + (draws if self.rotation is None else draws @ self.rotation)
        total = contribute(Units(rows), plan) if len(cohort) else Contribution.zero(plan)
        return charged_release(total, plan, cohort, ledger=self.ledger, noise=InsecureSeededNoise(round))

    def follow(self, controller: Controller[Any], rounds: int) -> tuple[Plan, list[Tensor]]:
        """The plan after so many rounds, and the released updates."""
        setting = RunInfo(rounds + 1, ((4, 16),), SAMPLING, (self.noise,) * (rounds + 1))
        state, updates = controller.init(setting, PublicSignals(0, None)), []
        for round in range(1, rounds + 1):
            released = self.release(controller.plan(state, setting, round), round)
            updates.append(released.update.double())
            state = controller.update(state, setting, released, PublicSignals(round, None))
        return controller.plan(state, setting, rounds + 1), updates


@pytest.fixture
def rows(quick_ledger_for: Callable[..., Any]) -> Callable[..., Rows]:
    return lambda **given: Rows(quick_ledger_for(SAMPLING, 400), **given)


@pytest.mark.parametrize(
    "controller",
    [
        Adaclip(0.5, pool="blocks"), Adaclip(1e-6), Geoclip(rank=2, blocks=True), Geoclip(rank=3, rest=False),
        Geoclip(1e6, rank=50, history=0.0),
    ],
    ids=repr,
)  # fmt: skip
def test_variants_keep_the_promises_of_a_controller(controller: Controller[Any]) -> None:
    check_controller(controller)


@pytest.mark.parametrize("controller", [Adaclip(2.0), Geoclip(2.0, rank=4)])
def test_round_one_clips_as_flat_clipping_does(controller: Controller[Any], rows: Callable[..., Rows]) -> None:
    first, flat = rows().follow(controller, 0)[0], rows().follow(Fixed(2.0), 0)[0]
    row = torch.linspace(-1, 1, D, dtype=torch.float64).unsqueeze(0)
    torch.testing.assert_close(first.clip.encode(row), flat.clip.encode(row), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("pool", ["coordinates", "blocks"])
def test_adaclip_learns_the_deviations_and_the_mean(pool: str, rows: Callable[..., Rows]) -> None:
    controller = Adaclip(2.0, pool=pool, variance_history=0.95, mean_history=0.8)
    clip = rows(mean=0.2).follow(controller, 110)[0].clip
    assert isinstance(clip, AdaClip)
    best = (STD * STD.sum()).sqrt()
    assert torch.allclose(clip.scale[:4].double(), best[:4], rtol=0.4 if pool == "coordinates" else 0.2)
    assert float(clip.scale[4:].mean() / clip.scale[:4].mean()) < 0.4  # 0.22 with the true deviations
    assert float((clip.centre - 0.2).abs().max()) < 0.15


def test_noise_falls_and_released_means_come_closer_to_the_truth(rows: Callable[..., Rows]) -> None:
    """The papers' comparison at equal epsilon: one noise multiplier, the same cohorts, anisotropic rows of mean 0.

    Noise counts for what clipping leaves of a row: a lower threshold has less of both. AdaCliP is given the axes;
    GeoClip directions that are no axes, which AdaCliP cannot use.
    """
    bound = float(STD.norm())
    controllers = {
        "flat": Fixed(bound),
        "adaclip": Adaclip(bound, pool="blocks", variance_history=0.95),
        "geoclip": Geoclip(bound, rank=4, history=0.97),
        "adaclip, turned": Adaclip(bound, variance_history=0.95),
    }
    noise, energy, errors = {}, {}, {}
    sample = torch.randn(400, D, generator=torch_generator(3, "rows"), dtype=torch.float64) * STD
    for name, controller in controllers.items():
        rotation = ROTATION if name in ("geoclip", "adaclip, turned") else None
        plan, updates = rows(rotation=rotation, noise=4.0).follow(controller, 100)
        own = sample if rotation is None else sample @ rotation
        left = torch.stack([plan.clip.decode(row, 1.0) for row in plan.clip.encode(own)])
        kept = float((left * own).sum() / own.square().sum())
        noise[name] = plan.noise_std(SAMPLING.expected_units).expand(D) / kept
        energy[name] = float(noise[name].square().sum())
        errors[name] = float((torch.stack(updates[60:])).square().sum(dim=1).mean())
        if name == "geoclip":
            assert isinstance(plan.clip, GeoClip)
            found = plan.clip.directions.view(4, D).double()
            assert float((found @ ROTATION[:4].T).square().sum()) > 3.0  # of 4: the span of the four leading ones
    assert float(noise["adaclip"][4:].max()) < 0.5 * float(noise["flat"][0])  # the small coordinates
    assert energy["adaclip"] < 0.5 * energy["flat"]  # (sum s)^2 / (d sum s^2) = 0.28 at best
    assert energy["geoclip"] < 0.5 * energy["flat"]
    assert energy["adaclip, turned"] > 1.3 * energy["geoclip"]
    assert errors["adaclip"] < 0.7 * errors["flat"]
    assert errors["geoclip"] < 0.7 * errors["flat"]


def test_noise_alone_does_not_fill_the_leading_directions(rows: Callable[..., Rows]) -> None:
    """Nobody has a signal: what is released is noise, and no direction may stand out for it."""
    quiet = rows(noise=20.0)
    quiet.release = lambda plan, round: charged_release(  # type: ignore[method-assign]
        Contribution.zero(plan), plan, CohortSampler.insecure_from_seed(1).draw(SAMPLING, round),
        ledger=quiet.ledger, noise=InsecureSeededNoise(round),
    )  # fmt: skip
    clip = quiet.follow(Geoclip(1.0, rank=4, history=0.95), 100)[0].clip
    assert isinstance(clip, GeoClip)
    assert float(clip.weights.max() / clip.weights.min()) < 3


@pytest.mark.parametrize("bound", [0.1, 20.0])
def test_what_clipping_hides_does_not_lower_geoclips_threshold(bound: float, rows: Callable[..., Rows]) -> None:
    """Rows of norm 2 under C: their released covariance is at most what the clipping before it allowed."""
    clip = rows(rotation=ROTATION).follow(Geoclip(bound, rank=4), 100)[0].clip
    assert isinstance(clip, GeoClip)
    flat = bound * D**0.5
    assert 0.4 * flat < float(clip.spread().norm()) < 1.001 * flat


def test_the_published_low_rank_form_keeps_its_first_subspace(rows: Callable[..., Rows]) -> None:
    controller = Geoclip(2.0, rank=4, rest=False)
    before, after = (rows().follow(controller, rounds)[0].clip for rounds in (0, 12))
    assert isinstance(before, GeoClip)
    assert isinstance(after, GeoClip)
    old, new = before.directions.view(4, D).double(), after.directions.view(4, D).double()
    assert float((old @ new.T).square().sum()) == pytest.approx(4.0, abs=1e-4)
    assert not torch.allclose(old, new, atol=1e-2)  # it turns inside that span only


def test_statistics_of_rounds_with_other_layouts_are_kept_apart(rows: Callable[..., Rows]) -> None:
    for controller in (Adaclip(), Geoclip(rank=2)):
        setting = RunInfo(4, ((4, 16), (2, 3)) * 2, SAMPLING, (Z,) * 4)
        state = controller.init(setting, PublicSignals(0, None))
        released = rows().release(controller.plan(state, setting, 1), 1)
        after = controller.update(state, setting, released, PublicSignals(1, None))
        assert same_bits(controller.plan(after, setting, 2).to_json(), controller.plan(state, setting, 2).to_json())
        assert controller.plan(after, setting, 2).clip == controller.plan(state, setting, 2).clip
        assert controller.plan(after, setting, 3).clip != controller.plan(state, setting, 3).clip
