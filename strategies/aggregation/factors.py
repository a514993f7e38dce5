"""Aggregations that choose which LoRA factors are trained; the released object is the sum of the clipped updates.

    plain:  both factors, W0 + s B A with A and B averaged separately (FedAvg on the factors; FedIT)
    ffa:    A stays at its random start, shared by all; only B is trained: the average of B A is then exact

References: FedIT: Zhang et al. 2023 (arXiv 2305.05644); FFA-LoRA: Sun et al., ICLR 2024 (arXiv 2403.12313).
Guarantee: one clip threshold covers the whole released vector (all trained factors and heads), sensitivity C.
"""

from dataclasses import dataclass

from strategies.aggregation.aggregation import Factors


@dataclass(frozen=True)
class Plain:
    """Train A and B."""

    def train(self, round: int) -> Factors:
        """The factors trained in ``round``; heads are always trained."""
        return "both"


@dataclass(frozen=True)
class Ffa:
    """Train B only."""

    def train(self, round: int) -> Factors:
        """The factors trained in ``round``; heads are always trained."""
        return "b"
