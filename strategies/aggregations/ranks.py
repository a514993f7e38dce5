"""Aggregations that choose how many LoRA ranks are trained: by round for everybody, or by client for good.

    dp-dylora:  in round t the server draws b ~ U{r_min..r_max} for ALL clients; only the first b ranks are trained,
                clipped and noised, so the dimension of the noise shrinks with b
    zero-pad:   client k has room for r_k ranks; it trains the first r_k and sends zeros for the others

A client of b ranks trains the adapter as if it had only those (A_{<=b} and B_{<=b}); ranks beyond are zero in its model
and in what it sends. The scale alpha / r stays that of the whole adapter, so that the global adapter is one PEFT file.

References: dp-dylora: Xu et al. 2024, "DP-DyLoRA" (arXiv 2405.06368), on DyLoRA (Valipour et al. 2023,
arXiv 2210.07558); a draw by each client, as in DyLoRA, would leave nothing to sum. zero-pad: Cho et al. 2024, HetLoRA
(arXiv 2401.06432), its truncation and zero-padding, without its pruning and its weights by client, which are private.
Guarantee: ranks follow from round or client id and the run's public seed, never from data, so the sent vector is one
vector of the round's dimension, clipped whole: sensitivity C, as for plain. A vector with zeros in it is such a vector.
Deviations: DyLoRA scales by alpha / b; here the scale does not change with b (see above).

zero-pad divides by the expected cohort for every rank, as one fixed divisor must, so ranks that few clients train move
less: their sum is smaller, and their noise is not.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from privacy import checks
from privacy.randomness.rng import simulation_generator
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters, Aggregation


@dataclass(frozen=True)
class DyLora(Aggregation):
    """A public draw of the rank in every round.

    Attributes:
        least_rank: r_min, >= 1.
        most_rank: r_max; 0 takes the adapters' rank.
        factors: ``"both"``, or ``"b"`` with A frozen.
        scale_a, scale_b: public factors on the update of A and of B before clipping, see ``factors.py``.
    """

    least_rank: int = 1
    most_rank: int = 0
    factors: str = "both"
    scale_a: float = 1.0
    scale_b: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale_a=self.scale_a, scale_b=self.scale_b)
        checks.integer_at_least(1, least_rank=self.least_rank)
        checks.integer_at_least(0, most_rank=self.most_rank, remedy="0 takes model.rank")
        checks.one_of(("both", "b"), factors=self.factors)

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        """Draw the rank of a round; ValueError if the ranks do not fit the adapters."""
        most = self.most_rank or adapters.rank
        checks.within(1, adapters.rank, most_rank=most, remedy="the upper limit is model.rank")
        checks.within(1, most, least_rank=self.least_rank, remedy="the upper limit is most-rank")
        drawn = simulation_generator(adapters.seed, "dylora rank", round).integers(self.least_rank, most + 1)
        return TrainedSubset(self.factors, int(drawn), self.scale_a, self.scale_b)


@dataclass(frozen=True)
class ZeroPad(Aggregation):
    """Clients of different rank.

    Attributes:
        ranks: comma-separated, e.g. ``"2,4,8"``; every client is given one of them, each with the same probability, by
            its id and the run's seed. A rank that is named twice is twice as frequent.
        factors: ``"both"``, or ``"b"`` with A frozen.
        scale_a, scale_b: public factors on the update of A and of B before clipping, see ``factors.py``.
    """

    ranks: str = "1,2,4"
    factors: str = "both"
    scale_a: float = 1.0
    scale_b: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(scale_a=self.scale_a, scale_b=self.scale_b)
        checks.one_of(("both", "b"), factors=self.factors)
        for rank in self._choices():
            checks.integer_at_least(1, ranks=rank)

    def part(self, adapters: Adapters, round: int) -> TrainedSubset:
        """Train the factors at every rank; ValueError if the ranks do not fit the adapters."""
        checks.within(1, adapters.rank, ranks=max(self._choices()), remedy="the upper limit is model.rank")
        return TrainedSubset(self.factors, None, self.scale_a, self.scale_b)

    def client_ranks(self, adapters: Adapters, clients: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"] | None:
        """Draw each client's rank for all rounds: one stream for the population, read at the client's id."""
        choices = np.array(self._choices(), dtype=np.int64)
        drawn = simulation_generator(adapters.seed, "client rank").integers(len(choices), size=adapters.clients)
        ranks: Int64[np.ndarray, " n"] = choices[drawn[clients]]
        return ranks

    def _choices(self) -> list[int]:
        try:
            return [int(rank) for rank in self.ranks.split(",")]
        except ValueError:
            raise ValueError(f"ranks must be integers separated by commas, like '2,4,8', got {self.ranks!r}") from None
