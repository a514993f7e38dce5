"""What each aggregation trains in which round, its public draws, and the algebra of those that need single factors."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from privacy.randomness.rng import torch_generator
from server.config.load import ConfigError, parse
from server.config.methods import methods
from strategies import AGGREGATIONS
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters
from strategies.aggregations.factors import Ffa, LocalHeads, Plain, RoLora
from strategies.aggregations.fedsvd import FedSvd
from strategies.aggregations.individual import average_factors, shared_subspace, stack_factors
from strategies.aggregations.ranks import DyLora, ZeroPad

ADAPTERS = Adapters(rank=8, clients=3000, seed=5)


def parts(aggregation, rounds: int = 4, adapters: Adapters = ADAPTERS) -> list[TrainedSubset]:
    return [aggregation.part(adapters, round) for round in range(1, rounds + 1)]


def test_factors_by_round() -> None:
    assert parts(Plain()) == [TrainedSubset("both")] * 4
    assert parts(Plain(0.5, 2.0)) == [TrainedSubset("both", None, 0.5, 2.0)] * 4
    assert parts(Ffa()) == parts(FedSvd()) == [TrainedSubset("b")] * 4
    assert [part.factors for part in parts(RoLora())] == ["b", "a", "b", "a"]
    assert parts(Ffa(2.0))[0] == parts(FedSvd(2.0))[0] == TrainedSubset("b", scale_b=2.0)
    assert parts(ZeroPad("2", scale_a=0.5))[0] == TrainedSubset("both", None, 0.5, 1.0)
    assert parts(LocalHeads(0.5, 2.0, "b"))[0] == TrainedSubset("b", None, 0.5, 2.0, heads=False)
    assert parts(RoLora(3.0, 2.0))[1] == TrainedSubset("a", None, 3.0, 2.0)
    for aggregation in (Plain(), Ffa(), FedSvd(), RoLora(), DyLora()):
        assert aggregation.client_ranks(ADAPTERS, np.arange(3)) is None


def test_dylora_draws_every_rank_alike_and_publicly() -> None:
    drawn = [part.ranks for part in parts(DyLora(), 4000)]
    counts = np.bincount(np.array(drawn), minlength=9)
    assert counts[0] == 0
    assert (abs(counts[1:] - 500) < 5 * np.sqrt(500)).all()
    assert drawn == [part.ranks for part in parts(DyLora(), 4000)]
    assert drawn != [part.ranks for part in parts(DyLora(), 4000, Adapters(8, 3000, 6))]
    assert {part.ranks for part in parts(DyLora(3, 5, "b"), 100)} == {3, 4, 5}
    assert {part.factors for part in parts(DyLora(3, 5, "b"))} == {"b"}


def test_zero_pad_gives_each_client_a_rank_for_good() -> None:
    aggregation = ZeroPad("2,4,4,8")
    everybody = np.arange(3000)
    ranks = aggregation.client_ranks(ADAPTERS, everybody)
    assert ranks is not None
    shares = np.bincount(ranks, minlength=9)[[2, 4, 8]] / 3000
    assert (abs(shares - [0.25, 0.5, 0.25]) < 0.04).all()
    some = np.array([7, 1999, 2999])
    assert aggregation.client_ranks(ADAPTERS, some).tolist() == ranks[some].tolist()
    assert parts(aggregation) == [TrainedSubset("both")] * 4
    other = aggregation.client_ranks(Adapters(8, 3000, 6), everybody)
    assert (other != ranks).any()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Plain(scale_a=0.0), "scale_a"),
        (lambda: RoLora(scale_b=-1.0), "scale_b"),
        (lambda: LocalHeads(factors="a"), "factors"),
        (lambda: DyLora(least_rank=0), "least_rank"),
        (lambda: DyLora(factors="a"), "factors"),
        (lambda: DyLora(most_rank=9).part(ADAPTERS, 1), "most_rank"),
        (lambda: DyLora(least_rank=4, most_rank=3).part(ADAPTERS, 1), "least_rank"),
        (lambda: ZeroPad("2,x"), "ranks must be integers separated by commas"),
        (lambda: ZeroPad("2,0"), "ranks"),
        (lambda: ZeroPad("2,9").part(ADAPTERS, 1), r"model\.rank"),
    ],
)
def test_values_that_cannot_work_are_refused(wrong, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_who_needs_single_factors_is_refused_and_told_why(name: str) -> None:
    strategy = {"strategy": {"aggregation": name}, "public": {"warm-start-epochs": 1}}
    if name not in ("flora", "fedex", "fedgsa"):
        assert not methods(parse(strategy)).aggregation.individual
        return
    with pytest.raises(ConfigError) as error:
        methods(parse(strategy))
    text = str(error.value)
    assert text.startswith(f"strategy.aggregation = {name!r}: needs every client's own factors")
    assert "record-level noise" in text
    assert text.endswith("take one of plain, ffa, rolora, local-heads, fedsvd, dp-dylora, zero-pad")


# --- aggregations of single factors, which are private already ---------------------------------------------------

OUT, IN = 9, 7


def factors(*ranks: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch_generator(1, "factors")
    return [
        (torch.randn(OUT, r, generator=generator).double(), torch.randn(r, IN, generator=generator).double())
        for r in ranks
    ]


def mean_product(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([b @ a for b, a in pairs]).mean(0)


@pytest.mark.parametrize("ranks", [(3,), (3, 3, 3), (1, 4, 2)])
def test_flora_stacks_to_the_exact_mean_whatever_the_ranks(ranks: tuple[int, ...]) -> None:
    b, a = stack_factors(factors(*ranks))
    assert b.shape == (OUT, sum(ranks))
    torch.testing.assert_close(b @ a, mean_product(factors(*ranks)))


def test_fedex_meets_the_mean_of_the_products_with_its_residual() -> None:
    pairs, scale = factors(3, 3, 3, 3), 2.0
    b, a, residual = average_factors(pairs, scale)
    torch.testing.assert_close(scale * (b @ a) + residual, scale * mean_product(pairs))
    assert float(residual.norm()) > 1.0, "averaging the factors alone is not the mean of the products"
    alone = average_factors(pairs[:1], scale)
    torch.testing.assert_close(alone[2], torch.zeros(OUT, IN).double())


def test_fedgsa_is_exact_where_clients_share_their_output_directions() -> None:
    (_, a), *_ = pairs = factors(3, 3)
    common = pairs[1][0]
    bs = [common @ torch.randn(3, 3, generator=torch_generator(2, str(k))).double() for k in range(4)]
    b, new_a = shared_subspace(bs, a)
    torch.testing.assert_close(b @ new_a, torch.stack(bs).mean(0) @ a)
    torch.testing.assert_close(new_a @ new_a.T, torch.eye(3).double())


def test_fedgsa_projects_the_mean_on_the_leading_eigenvectors_of_the_mean_projector() -> None:
    pairs = factors(3, 3, 3, 3)
    a, bs = pairs[0][1], [b for b, _ in pairs]
    b, new_a = shared_subspace(bs, a)
    projector = torch.zeros(OUT, OUT).double()
    for one in bs:
        u = torch.linalg.svd(one @ a, full_matrices=False).U[:, :3]
        projector += u @ u.T / len(bs)
    common = torch.linalg.eigh(projector).eigenvectors[:, -3:]
    torch.testing.assert_close(b @ new_a, common @ common.T @ torch.stack(bs).mean(0) @ a)
    lengths = b.norm(dim=0)
    assert all(one >= other for one, other in pairwise(lengths.tolist()))


def test_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one client"):
        stack_factors([])
