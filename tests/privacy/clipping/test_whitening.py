"""AdaCliP and GeoClip spend the noise their papers promise, decode without bias and say how much noise they carry."""

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.clipping.clip_map import check_vector
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.clipping.whitening import AdaClip, GeoClip, whitening_weights
from privacy.contribution import Contribution, Plan, contribute
from privacy.randomness.rng import torch_generator

D = 12
STD = torch.logspace(-2, 0, D, dtype=torch.float64)


def seeded(*shape: int, name: str = "whitening") -> Tensor:
    return torch.randn(*shape, generator=torch_generator(5, name), dtype=torch.float64)


ROTATION = torch.linalg.qr(seeded(D, D)).Q


def ada(centre: Tensor | None = None) -> AdaClip:
    scale = (STD * STD.sum()).sqrt()
    return AdaClip(torch.zeros(D) if centre is None else centre.float(), scale.float())


def geo(rank: int, rest: bool = True) -> GeoClip:
    """The map for rows of covariance ROTATION^T diag(STD^2) ROTATION, its `rank` largest eigenvalues apart."""
    variances = STD.square()
    shared = variances[: D - rank].mean() if rank < D else variances.new_zeros(())
    values = torch.cat([variances[D - rank :], shared.view(1)])[: rank + 1 if rest and rank < D else rank]
    many = torch.tensor([1.0] * rank + [D - rank])[: len(values)]
    weights = whitening_weights(values, many.double())
    last = weights[-1:] if len(values) > rank else torch.ones(1) if rest else torch.zeros(1)
    directions = ROTATION[D - rank :].float().contiguous()
    return GeoClip(torch.zeros(D), directions.flatten(), weights[:rank].float(), last.float(), (D,), (rank,))


def noise_energy(clip: AdaClip | GeoClip) -> float:
    """Mean of ||M^+ n||^2 for n ~ N(0, I), exactly: the squared columns of decode, summed."""
    centre = clip.decode(torch.zeros(clip.dim, dtype=torch.float64), 1.0)
    columns = [clip.decode(unit, 1.0) - centre for unit in torch.eye(clip.dim, dtype=torch.float64)]
    return float(torch.stack(columns).square().sum())


@pytest.mark.parametrize("clip", [ada(0.1 * seeded(D)), geo(3), geo(D), geo(0)], ids=repr)
def test_what_lies_inside_the_ball_comes_back(clip: AdaClip | GeoClip) -> None:
    rows = 1e-3 * STD * seeded(5, D) + clip.centre.double()
    total = contribute(Units(rows), Plan(clip, 1.0)).encoded.double() / 2.0**40
    torch.testing.assert_close(clip.decode(total, 5.0), rows.mean(dim=0), rtol=1e-5, atol=1e-7)


def test_the_mean_is_unbiased_whoever_comes_and_nothing_divides_by_their_number() -> None:
    clip, rows = ada(torch.full((D,), 0.5)), 1e-3 * seeded(6, D) + 0.5
    plan = Plan(clip, 1.0)
    both = []
    for half in (rows[:2], rows[2:]):  # a release is affine in who comes
        both.append(contribute(Units(half), plan).encoded.double() / 2.0**40)
    nobody = Contribution.zero(plan).encoded.double()
    torch.testing.assert_close(clip.decode(nobody, 3.0), clip.centre.double())
    joint = clip.decode(both[0] + both[1], 6.0) - clip.centre
    apart = [clip.decode(part, 6.0) - clip.centre for part in both]
    torch.testing.assert_close(joint, apart[0] + apart[1])
    torch.testing.assert_close(joint, (rows - 0.5).sum(dim=0) / 6.0, rtol=1e-5, atol=1e-8)


def test_adaclip_spends_the_square_of_the_sum_of_deviations_and_flat_clipping_more() -> None:
    assert noise_energy(ada()) == pytest.approx(float(STD.sum()) ** 2, rel=1e-5)
    flat = FlatClip(float(STD.square().sum().sqrt()), D)  # clips at the root mean square, as M does at 1
    assert D * flat.bound**2 > 2 * noise_energy(ada())
    assert float(ada().spread()[0]) < 0.25 * flat.bound  # the smallest coordinate gets less noise
    encoded = ada().encode(STD * seeded(20000, D, name="rows"))
    free = (STD * seeded(20000, D, name="rows") / ada().scale).square().sum(dim=1)
    assert float(free.mean()) == pytest.approx(1.0, rel=0.03)
    assert float(encoded.norm(dim=1).max()) <= 1 + 1e-12


def test_geoclip_is_the_best_whitening_of_a_known_covariance() -> None:
    clip = geo(D)
    assert noise_energy(clip) == pytest.approx(float(STD.sum()) ** 2, rel=1e-4)  # sqrt(lambda) = STD
    # No other linear map with E||M x||^2 = 1 has less noise: any M is M0 times something, searched near and far.
    root = ROTATION.T @ torch.diag(STD.square()) @ ROTATION
    best = float(STD.sum()) ** 2
    for seed in range(200):
        change = torch.eye(D, dtype=torch.float64) + 10 ** (-1 - seed % 3) * seeded(D, D, name=f"change {seed}")
        other = torch.diag(whitening_weights(STD.square())) @ ROTATION @ change
        mean_square = torch.trace(other @ root @ other.T)
        assert float(torch.linalg.inv(other).square().sum() * mean_square) >= best * (1 - 1e-9)
    # AdaCliP, which sees the axes only, spends more on this covariance.
    deviations = root.diagonal().sqrt()
    assert float(deviations.sum()) ** 2 > 1.5 * best


def test_directions_of_their_own_come_closer_to_it_one_by_one() -> None:
    energies = [noise_energy(geo(rank)) for rank in range(D + 1)]
    assert np.all(np.diff(energies) < 1e-6)
    assert energies[0] == pytest.approx(D * float(STD.square().sum()), rel=1e-5)  # flat clipping
    assert noise_energy(geo(4, rest=False)) < energies[4]  # the paper's low rank: less noise, and the rest is lost
    row = ROTATION[0].unsqueeze(0)
    assert not geo(4, rest=False).encode(row).abs().max() > 1e-6
    assert float(geo(4).encode(row).norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: AdaClip(torch.zeros(3), torch.zeros(3)), "scale must lie in"),
        (lambda: AdaClip(torch.zeros(3), torch.tensor([1.0, torch.nan, 1.0])), "finite"),
        (
            lambda: GeoClip(torch.zeros(3), torch.zeros(3), torch.ones(2), torch.ones(1), (3,), (1,)),
            "weights must have 1",
        ),
        (lambda: GeoClip(torch.zeros(3), torch.zeros(12), torch.ones(4), torch.ones(1), (3,), (4,)), "rank must be in"),
        (
            lambda: GeoClip(torch.zeros(3), torch.zeros(3), torch.ones(1), torch.ones(1), (3, 1), (1,)),
            "sizes and ranks must be of the same length",
        ),
        (lambda: GeoClip(torch.zeros(3), torch.zeros(0), torch.ones(0), torch.zeros(1), (3,), (0,)), "rank must be"),
    ],
)
def test_impossible_maps_are_refused(make, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize("values", [torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1), torch.tensor([torch.inf])])
def test_statistics_are_finite_float32_vectors(values: torch.Tensor) -> None:
    check_vector("centre", torch.zeros(3))
    with pytest.raises(ValueError, match="centre must be"):
        check_vector("centre", values)
