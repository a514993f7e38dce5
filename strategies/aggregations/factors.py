"""Aggregations that choose which values are trained and sent; the released object is the sum of the clipped updates.

    plain:    both factors, W0 + s B A with A and B averaged separately (FedAvg on the factors; FedIT)
    ffa:      A stays at its start, shared by all; only B is trained: the average of B A is then exact. The start is
              random, or what public records made of it (``public.warm-start-factors = "both"``)
    rolora:   B in odd rounds, A in even ones: every average is exact, and both factors learn
    local-heads:  the factors alone are sent; every client trains the head too, and keeps it

References: FedIT: Zhang et al. 2023 (arXiv 2305.05644); FFA-LoRA: Sun et al., ICLR 2024 (arXiv 2403.12313);
RoLoRA: Chen et al. 2025 (arXiv 2502.01755), which does not study differential privacy. local-heads: FedPer, Arivazhagan
et al. 2019 (arXiv 1912.00818), but a head starts from the public one in every round, as clients that keep nothing
between rounds need (Singhal et al. 2021, arXiv 2102.03448); ``lacquer personalise`` makes each its own afterwards.
Guarantee: one clip threshold C covers the whole sent vector of a round (all trained factors and heads), so the sum has
sensitivity C; rounds of one factor send half the values and carry noise on those only. A head that is kept is no part
of the release: what it does to the factors is inside one client's own clipped row. Given to nobody, it leaves every
other client's guarantee as it is (joint differential privacy); given away, it tells of its own client without limit.

Norms of A, B and heads differ by an order of magnitude and more, and a controller has one threshold: what is shorter is
clipped with the rest and drowns in noise of the same size. (MiniLM on the notes, rank 4, top 3 layers, local SGD: the
median client moves A by 0.80, B by 0.15, the head by 1.07 after a warm start; from B = 0, A by 0 and B by 0.02.) With
``scale-a`` and ``scale-b`` the sent vector holds scale_a * update of A and scale_b * update of B: clipping them by C
clips A by C / scale_a and B by C / scale_b, in the rounds of RoLoRA as in the joint vector of plain. The scales are
public constants, undone after the release, so sensitivity and noise multiplier stay as they are. A controller that
adapts C over RoLoRA's rounds wants scales at which rounds of A and of B have norms alike; with both at 1 its C settles
between the two. Controllers with one threshold per adapter get the round's own blocks and need no scales. They
are for balance, no gain is claimed: single trials of ffa on the notes with scale-b = 6 were no better than with 1.
"""

from dataclasses import dataclass

from privacy import checks
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters, Aggregation


@dataclass(frozen=True)
class Plain(Aggregation):
    """Train A and B.

    Attributes:
        scale_a, scale_b: public factors on the update of A and of B before clipping.
    """

    scale_a: float = 1.0
    scale_b: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale_a=self.scale_a, scale_b=self.scale_b)

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        return TrainedSubset("both", scale_a=self.scale_a, scale_b=self.scale_b)


@dataclass(frozen=True)
class Ffa(Aggregation):
    """Train B only, with A frozen as the run began.

    Attributes:
        scale_b: public factor on the update of B, relative to the heads, before clipping.
    """

    scale_b: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale_b=self.scale_b)

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        return TrainedSubset("b", scale_b=self.scale_b)


@dataclass(frozen=True)
class RoLora(Plain):
    """Train B in odd rounds, A in even ones."""

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        return TrainedSubset("b" if round % 2 else "a", scale_a=self.scale_a, scale_b=self.scale_b)


@dataclass(frozen=True)
class LocalHeads(Plain):
    """Train the factors and the head, and send the factors alone: a classifier's head stays with its client.

    Validation reads the released adapter under the head of the start, which public records have trained.

    Attributes:
        factors: ``both``, or ``b`` with A frozen as the run began.
    """

    factors: str = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(("both", "b"), factors=self.factors)

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        return TrainedSubset(self.factors, scale_a=self.scale_a, scale_b=self.scale_b, heads=False)
