"""Every whole release has the noise that was charged: every kind of noise, clip map and query, thresholds that change.

Nothing of the mechanism's lines is pinned here: what is measured is what comes out, held against the charge. Residuals
over their charged standard deviation are pooled; each pool is off by more than is allowed once in 10^7 runs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from privacy.clipping import CLIP_MAPS
from privacy.clipping.clip_map import ClipMap
from privacy.clipping.norms import AutomaticClip, FlatClip, NoUpdate, PerAdapterClip, PsacClip
from privacy.clipping.subspace import CoefficientClip, EmbeddingResidualClip, SubspaceClip
from privacy.clipping.whitening import AdaClip, GeoClip
from privacy.contribution import Contribution, Plan
from privacy.events import NoiseShares, Poisson, ReleaseEvent
from privacy.mechanism import Release, charged_release, charged_request, noisy_share, released_sum
from privacy.queries import (
    QUERIES,
    AdapterBits,
    BoundedMean,
    LossHistogram,
    NormBit,
    NormHistogram,
    OneHotVote,
    Query,
)
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise
from privacy.randomness.rng import torch_generator
from tests.cases.drawn import cohort
from tests.cases.ledgers import MemoryLedger

D, ROUNDS = 240, 12
SAMPLING = Poisson(0.1, 300)  # 30 expected units
EVERYBODY = Poisson(1.0, 10)
MADE: dict[type[ClipMap], Callable[[float, Tensor], ClipMap]] = {
    FlatClip: lambda bound, matrix: FlatClip(bound, D),
    PerAdapterClip: lambda bound, matrix: PerAdapterClip((bound, 9 * bound), (40, D - 40)),
    AutomaticClip: lambda bound, matrix: AutomaticClip(bound, D),
    PsacClip: lambda bound, matrix: PsacClip(bound, D),
    NoUpdate: lambda bound, matrix: NoUpdate(),
    AdaClip: lambda bound, matrix: AdaClip(matrix[0], matrix[1].exp() * bound),
    GeoClip: lambda bound, matrix: GeoClip(
        matrix[0], basis(matrix).flatten(), torch.full((20,), 1 / bound), torch.tensor([0.3 / bound]), (D,), (20,)
    ),
    SubspaceClip: lambda bound, matrix: SubspaceClip(basis(matrix), bound),
    CoefficientClip: lambda bound, matrix: CoefficientClip(matrix * bound),
    EmbeddingResidualClip: lambda bound, matrix: EmbeddingResidualClip(basis(matrix), bound, 3 * bound),
}
QUESTIONS: dict[type[Query], Callable[[float], Query]] = {
    NormBit: lambda bound: NormBit(bound, 7.0),
    AdapterBits: lambda bound: AdapterBits((bound,) * 24, (10,) * 24, 11.0),
    NormHistogram: lambda bound: NormHistogram(tuple(bound * (1 + i) for i in range(30)), 9.0),
    LossHistogram: lambda bound: LossHistogram(tuple(0.1 * (1 + i) for i in range(30)), 13.0),
    OneHotVote: lambda bound: OneHotVote(
        tuple(bound * 2.0**i for i in range(30)), 8.0, simulated_noise_std_per_bound=0.0
    ),
    BoundedMean: lambda bound: BoundedMean(3 * bound, 10.0 * bound, centred=True),
}


def basis(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix.T).Q.T.contiguous()


def plans() -> Iterator[tuple[str, Plan]]:
    """Of every map, rounds whose threshold and noise change; all queries beside the update."""
    matrix = torch.randn(20, D, generator=torch_generator(0, "gradients"))
    for kind, make in MADE.items():
        for round in range(ROUNDS):
            bound = 0.05 * 1.8**round
            queries = tuple(ask(bound) for ask in QUESTIONS.values())
            yield kind.__name__, Plan(make(bound, matrix), 0.8 + 0.3 * round, queries)


def centralised(noise: type) -> Callable[[Plan, int, MemoryLedger], Release]:
    def release(plan: Plan, round: int, ledger: MemoryLedger) -> Release:
        total = Contribution.zero(plan)
        return charged_release(total, plan, cohort(SAMPLING, round, ledger), ledger=ledger, noise=noise())

    return release


def shared(plan: Plan, round: int, ledger: MemoryLedger) -> Release:
    """Ten clients, of which eight hand in a vector and one of these tells the server its noise: seven are left."""
    shares = NoiseShares(10, 8, 1)
    requested = charged_request(plan, cohort(EVERYBODY, round, ledger), noise_shares=shares, ledger=ledger)
    vectors = [noisy_share(Contribution.zero(plan), plan, shares) for _ in range(7)]
    return released_sum(torch.stack(vectors).sum(dim=0), requested, ledger)


def residuals(released: Release, event: ReleaseEvent) -> Iterator[tuple[str, Tensor]]:
    """Of a release of nothing, all it holds, over the standard deviation that was charged."""
    charged = {part.name: part for part in event.components}
    plan = released.plan
    assert set(charged) == {"update", *(query.name for query in plan.queries)} - ({"update"} - set(charged))
    if plan.clip.dim:
        assert released.encoded is not None
        assert charged["update"].dim == len(released.encoded)
        yield "update", released.encoded / charged["update"].noise_std
        nothing = plan.clip.decode(torch.zeros(plan.clip.dim, dtype=torch.float64), released.expected_units)
        decoded = released.update.double() - nothing
        # Of the decoded update too, in units of what the plan says of its length: it is what is published.
        spread = plan.clip.spread() * charged["update"].noise_std / released.expected_units
        length = math.sqrt(float((spread.expand(plan.clip.params) ** 2).sum()))
        yield f"decoded {type(plan.clip).__name__}", decoded.norm()[None] / length
    for query, answer in zip(plan.queries, released.answers, strict=True):
        assert charged[query.name].sensitivity == query.sensitivity
        yield query.name, answer / charged[query.name].noise_std


@pytest.mark.parametrize(
    "release",
    [centralised(GaussianNoise), centralised(DiscreteGaussianNoise), shared],
    ids=["gaussian", "discrete", "shares of clients"],
)
def test_what_comes_out_has_the_noise_that_was_charged(release: Callable[..., Release], ledger: MemoryLedger) -> None:
    pools: dict[str, list[Tensor]] = defaultdict(list)
    for round, (kind, plan) in enumerate(plans()):
        if release is shared and round % 6:  # seven exact draws a release take their time
            continue
        released = release(plan, round, ledger)
        event = ledger.events[-1]
        assert event.effective_noise_multiplier == plan.effective_noise_multiplier
        for name, values in residuals(released, event):
            pools[name if name != "update" else f"update {kind}"].append(values)
    assert len([name for name in pools if name.startswith("update ")]) == len(CLIP_MAPS) - 1  # NoUpdate has none
    for name, found in pools.items():
        values = torch.cat(found)
        rms = math.sqrt(float((values**2).mean()))
        if name.startswith("decoded"):  # lengths; the map may have turned few directions into many
            assert release is shared or rms == pytest.approx(1.0, abs=0.3), name
        else:
            assert abs(rms - 1) < 5.5 / math.sqrt(2 * len(values)), name


def test_nothing_is_left_out() -> None:
    assert set(MADE) == set(CLIP_MAPS)
    assert set(QUESTIONS) == set(QUERIES)
