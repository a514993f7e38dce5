r"""DP-SGD at one site: a Poisson batch of units, a gradient each, one charged release, one optimizer step.

    B_t: every unit of n joins with probability q          g_i = gradient of unit i's loss at the adapter x_t
    u_t = decode( sum_{i in B_t} encode(-g_i) + z N(0, I) ) / (q n)         x_{t+1} = optimizer(x_t, u_t)

Reference: Abadi et al. 2016 (arXiv 1607.00133v2), Algorithm 1, with the fixed divisor q n and batches that may be empty
of :mod:`privacy.mechanism`. Every method at record level is this loop with another clip map, controller, optimizer or
weighting of tokens inside a record.
Guarantee: each step is one Poisson-sampled Gaussian event, charged to the site's ledger before noise is drawn; unit:
one record or one group of records (a patient), add or remove one. The number of units n, the clip thresholds, steps
and learning rates are taken as public. Raw norms, losses and counts never leave `contribute`; an empty batch is
released and charged as any other.

`client.record_level.training` puts the parts together by name. Micro-batches of any size give the same sums, because
contributions are integers.
"""

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from client.record_level.units import UnitGradients
from client.worker import together_or_alone
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from privacy.queries import OneHotVote
from privacy.randomness.sampling import CohortSampler
from strategies.controllers.controller import PublicSignals
from strategies.private_training import PlannedRelease, Planner, PrivateTraining, ServerUpdate


class PrivateSgd(PrivateTraining):
    """The private training of one site's records, step by step.

    Args:
        planner, server, ledger, sampler, schedule: as of :class:`strategies.private_training.PrivateTraining`.
    """

    drawn = "batches"
    counted = "steps"

    def __init__(
        self,
        *,
        gradients: UnitGradients,
        planner: Planner,
        server: ServerUpdate,
        ledger: Ledger,
        sampler: CohortSampler,
        schedule: Callable[[int], float],
    ) -> None:
        super().__init__(planner=planner, server=server, ledger=ledger, sampler=sampler, schedule=schedule)
        self.gradients = gradients

    def begin(self, adapter: Float[Tensor, " size"], public: PublicSignals) -> None:
        """As :meth:`PrivateTraining.begin`; ValueError too where the controller asks for votes."""
        super().begin(adapter, public)
        refuse_votes(self.next_release().plan)

    def released(self, planned: PlannedRelease) -> Release:
        """Release the bounded sum over one batch."""
        return planned.release(self.total(planned), self.ledger, self.noise)

    def total(self, planned: PlannedRelease) -> Contribution:
        """The bounded sum over one batch. Still private: it carries no noise yet.

        A unit whose work raises contributes zero, and the others what they would without it.

        Raises:
            Exception: of the first unit, if every unit's work raises.
        """
        _, batch = self.cohort(planned)

        def summed(units: Int64[np.ndarray, " units"]) -> Contribution:
            chunks = self.rows(units, planned)
            return sum((contribute(rows, planned.plan) for rows in chunks), Contribution.zero(planned.plan))

        return together_or_alone(lambda: summed(batch), lambda i: summed(batch[i : i + 1]), len(batch), "unit")

    def rows(self, batch: Int64[np.ndarray, " batch"], planned: PlannedRelease) -> Iterable[Units]:
        """What the units of a batch bring, chunk by chunk; private."""
        return self.gradients.of(self.state.adapter, batch, planned.part, planned.round)


def refuse_votes(plan: Plan) -> None:
    """ValueError for a query that only clients can answer: trials of a client's whole local training."""
    for query in plan.queries:
        if isinstance(query, OneHotVote):
            raise ValueError(
                f"{query.name!r} asks for trials of local training, which a record has not; "
                "start from a threshold instead (strategy.controller-options.clip-norm)"
            )
