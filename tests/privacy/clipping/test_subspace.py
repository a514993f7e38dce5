"""The span maps are those of their papers: projection, ridge, two parts of one release, noise as stated.

What they share with every clip map is in ``test_norms.py``.
"""

import pytest
import torch
from torch import Tensor

from privacy.clipping.subspace import CoefficientClip, EmbeddingResidualClip, SubspaceClip
from privacy.clipping.units import Units
from privacy.contribution import Plan, contribute
from privacy.randomness.rng import torch_generator

D, K = 40, 7


def basis(k: int = K, d: int = D) -> torch.Tensor:
    draws = torch.randn(d, k, generator=torch_generator(3, "basis"), dtype=torch.float64)
    return torch.linalg.qr(draws).Q.T.float().contiguous()


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
        (torch.zeros(0, D), 1.0, "matrix"),
        (torch.full((K, D), torch.nan), 1.0, "finite"),
        (torch.zeros(K, D), 0.0, "bound"),
    ],
)
def test_impossible_subspaces_are_refused(matrix: torch.Tensor, bound: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SubspaceClip(matrix, bound)


N = 6


def seeded(*shape: int, name: str = "span") -> Tensor:
    return torch.randn(*shape, generator=torch_generator(6, name))


G = 1e-3 * seeded(N, D)  # gradients of adapters are small


def test_coefficients_are_the_normalised_least_squares_solution() -> None:
    rows = seeded(4, D, name="rows").double()
    found = CoefficientClip(G, ridge=1e-10).encode(rows)
    expected = torch.linalg.lstsq(G.double().T, rows.T).solution.T
    torch.testing.assert_close(found, expected / expected.norm(dim=1, keepdim=True), rtol=1e-6, atol=1e-7)


def test_a_row_of_the_span_keeps_its_direction_at_any_scale() -> None:
    wanted = torch.tensor([0.3, -0.1, 0.0, 0.8, 0.2, -0.4], dtype=torch.float64)
    row = wanted @ G.double()
    for scale in (1e-2, 1.0, 1e6):
        found = CoefficientClip(G).encode((scale * row).unsqueeze(0))[0]
        torch.testing.assert_close(found, wanted / wanted.norm(), rtol=1e-4, atol=1e-4)
    decoded = CoefficientClip(G).decode(found, 2.0)
    assert float(torch.cosine_similarity(decoded, row, dim=0)) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(decoded, found @ G.double() / 2.0)


def test_the_ridge_is_relative_so_the_unit_of_gradients_does_not_matter() -> None:
    rows = seeded(3, D, name="rows").double()
    torch.testing.assert_close(CoefficientClip(G).encode(rows), CoefficientClip(1000 * G).encode(1000 * rows))


def test_the_same_gradient_twice_shares_a_coefficient() -> None:
    row = G[:1].double()
    found = CoefficientClip(torch.cat([G, G])).encode(row)[0]
    assert found.norm() == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(found[0], found[N], rtol=1e-3, atol=1e-3)


def test_a_row_that_is_not_finite_adds_nothing_and_spoils_nothing() -> None:
    rows = torch.stack([G[0], torch.full((D,), torch.nan), torch.full((D,), torch.inf)])
    plan = Plan(CoefficientClip(G), 1.0)
    together, alone = contribute(Units(rows), plan), contribute(Units(rows[:1]), plan)
    assert torch.equal(together.encoded, alone.encoded)


def gep(share: float = 0.5) -> EmbeddingResidualClip:
    return EmbeddingResidualClip(torch.linalg.qr(G.T).Q.T.contiguous(), 2.0, 0.5, share)


def test_embedding_and_residual_are_clipped_apart() -> None:
    clip = gep()
    basis = clip.basis.double()
    outside = seeded(D, name="outside").double()
    outside -= basis.T @ (basis @ outside)
    row = 3.0 * basis[1] + 0.1 * outside / outside.norm()  # long inside, short outside
    back = clip.decode(clip.encode(row.unsqueeze(0))[0], 1.0)
    torch.testing.assert_close(back, 2.0 * basis[1] + 0.1 * outside / outside.norm(), rtol=1e-5, atol=1e-6)
    assert float(clip.encode((1e6 * row).unsqueeze(0)).norm()) == pytest.approx(1.0)


def test_both_parts_together_cost_one_gaussian() -> None:
    """Noise std on each part's sum is sqrt(2) z S: with two equal releases z_eff = s / sqrt(2) = z."""
    clip, z = gep(), 1.5
    noise = torch.cat([torch.full((N,), z), torch.zeros(D)]).double()
    embedding = clip.decode(noise, 1.0) @ clip.basis.double().T
    assert torch.allclose(embedding, torch.tensor(2**0.5 * z * 2.0, dtype=torch.float64), rtol=1e-6)
    residual = clip.decode(torch.cat([torch.zeros(N), torch.full((D,), z)]).double(), 1.0)
    assert torch.allclose(residual, torch.tensor(2**0.5 * z * 0.5, dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: CoefficientClip(torch.zeros(0, 3)), "matrix"),
        (lambda: CoefficientClip(torch.full((2, 3), torch.inf)), "overflowed"),
        (lambda: CoefficientClip(G, ridge=0.0), "ridge must be > 0"),
        (lambda: gep(share=1.0), "share must be in"),
        (lambda: EmbeddingResidualClip(G, 0.0, 1.0), "bound"),
    ],
)
def test_impossible_spans_are_refused(make, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize("clip", [EmbeddingResidualClip(basis(), 1.0, 1.0), CoefficientClip(basis(), 1e-3)])
def test_a_row_whose_projection_overflows_adds_nothing(clip: EmbeddingResidualClip | CoefficientClip) -> None:
    rows = torch.ones(2, D, dtype=torch.float64)
    rows[0] = basis()[0].double().sign() * 1.7e308
    assert not bool((basis().double() @ rows[0]).isfinite().all())
    lengths = clip.encode(rows).norm(dim=1)
    assert lengths[0] == 0
    assert lengths[1] > 0.5


@pytest.mark.parametrize("make", [lambda: SubspaceClip(basis(), 1.0), gep, lambda: CoefficientClip(basis())])
def test_the_matrix_is_converted_once_for_all_rows(make, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, to, converted = make(), Tensor.to, []

    def counted(self: Tensor, *given, **named) -> Tensor:
        converted.append(tuple(self.shape))
        return to(self, *given, **named)

    monkeypatch.setattr(Tensor, "to", counted)
    for row in torch.randn(3, D, generator=torch_generator(5, "rows")):
        clip.encode(row[None])
    clip.decode(torch.ones(clip.dim, dtype=torch.float64), 1.0)
    assert converted.count(tuple(clip.arrays().popitem()[1].reshape(-1, D).shape)) == 1
