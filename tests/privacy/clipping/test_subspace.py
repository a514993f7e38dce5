"""Clipping in a public subspace: the promises of every clip map, and what is its own."""

import pytest
import torch

from privacy.audit.contracts import adversarial_rows, check_clip_map
from privacy.clipping.subspace import SubspaceClip
from privacy.clipping.units import Units
from privacy.contribution import Plan, contribute
from privacy.randomness.rng import torch_generator

D, K = 40, 7


def basis(k: int = K, d: int = D) -> torch.Tensor:
    draws = torch.randn(d, k, generator=torch_generator(3, "basis"), dtype=torch.float64)
    return torch.linalg.qr(draws).Q.T.float().contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("bound", [1e-3, 0.7, 1e4])
def test_keeps_the_promises_of_every_clip_map(dtype: torch.dtype, bound: float) -> None:
    check_clip_map(SubspaceClip(basis(), bound), adversarial_rows(D, dtype))


def test_a_basis_that_is_not_orthonormal_costs_utility_never_sensitivity() -> None:
    skewed = 1e3 * torch.randn(K, D, generator=torch_generator(4, "skewed"))
    check_clip_map(SubspaceClip(skewed, 0.5), adversarial_rows(D))


def test_what_lies_in_the_subspace_comes_back_and_the_rest_does_not() -> None:
    clip = SubspaceClip(basis(), 2.0)
    inside = basis().double().T @ torch.linspace(-0.5, 0.5, K, dtype=torch.float64)
    outside = torch.randn(D, generator=torch_generator(5, "row"), dtype=torch.float64)
    outside -= basis().double().T @ (basis().double() @ outside)
    decoded = clip.decode(clip.encode((inside + outside).unsqueeze(0))[0], 1.0)
    assert torch.allclose(decoded, inside, atol=1e-6)


def test_only_the_part_inside_the_subspace_is_clipped() -> None:
    clip = SubspaceClip(basis(), 1.0)
    inside = 0.9 * basis().double()[0]
    outside = torch.randn(D, generator=torch_generator(6, "row"), dtype=torch.float64)
    outside -= basis().double().T @ (basis().double() @ outside)
    row = inside + 100 * outside
    assert float(row.norm()) > 100
    assert float(clip.encode(row.unsqueeze(0)).norm()) == pytest.approx(0.9, abs=1e-4)


def test_a_unit_contributes_the_same_in_any_company() -> None:
    rows = torch.randn(33, D, generator=torch_generator(7, "rows"))
    plan = Plan(SubspaceClip(basis(), 1.0), 1.0)
    together = contribute(Units(rows), plan).encoded
    alone = sum(contribute(Units(rows[i : i + 1]), plan).encoded for i in range(len(rows)))
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("matrix", "bound", "reason"),
    [
        (torch.zeros(D + 1, D), 1.0, "smaller subspace"),
        (torch.full((K, D), torch.nan), 1.0, "finite"),
        (torch.zeros(K, D), 0.0, "bound"),
    ],
)
def test_impossible_subspaces_are_refused(matrix: torch.Tensor, bound: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SubspaceClip(matrix, bound)
