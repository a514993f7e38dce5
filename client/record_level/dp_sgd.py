r"""DP-SGD at one site: a Poisson batch of units, a gradient each, one charged release, one optimizer step.

    B_t: every unit of n joins with probability q          g_i = gradient of unit i's loss at the adapter x_t
    u_t = decode( sum_{i in B_t} encode(-g_i) + z N(0, I) ) / (q n)         x_{t+1} = optimizer(x_t, u_t)

Reference: Abadi et al. 2016 (arXiv 1607.00133v2), Algorithm 1, with the fixed divisor q n and batches that may be empty
of :mod:`privacy.mechanism`. Every method at record level is this loop with another clip map, controller, optimizer or
weighting of tokens inside a record.
Guarantee: each step is one Poisson-sampled Gaussian event, charged to the site's ledger before noise is drawn; unit:
one record or one group of records (a patient), add or remove one. The number of units n, the clip thresholds, steps
and learning rates are taken as public. Raw norms, losses and counts never leave `contribute`; an empty batch, and one
of which every unit's work raises, is released and charged as any other. What would fail with any records is found out
on a made-up one, before the first charge.

`client.record_level.training` puts the parts together by name. Micro-batches of any size give the same sums, because
contributions are integers.
"""

import logging
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from client.record_level.units import UnitGradients
from client.worker import UnitsFailed, canary_contribution, together_or_alone
from privacy.audit.in_run import CanaryUnits
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from privacy.queries import OneHotVote
from privacy.randomness.sampling import Cohort, CohortSampler
from strategies.controllers.controller import PublicSignals
from strategies.private_training import PlannedRelease, Planner, PrivateTraining
from strategies.server_update import ServerUpdate

log = logging.getLogger(__name__)


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
        self.canaries: CanaryUnits | None = None
        """Units that bring made-up rows for an audit."""
        self._tried = False

    def begin(self, adapter: Float[Tensor, " size"], public: PublicSignals) -> None:
        """Begin as :meth:`PrivateTraining.begin` does; ValueError too where the controller asks for votes."""
        super().begin(adapter, public)
        refuse_votes(self.next_release().plan)

    def make_release(self, planned: PlannedRelease) -> Release:
        """Release the bounded sum over one batch.

        Raises:
            Exception: what a made-up record raises, before the first release of this object; nothing was charged.
        """
        if not self._tried:
            for rows in self.gradients.of_made_up(self.state.adapter, planned.part, planned.round):
                contribute(rows, planned.plan)
            self._tried = True
        cohort = self.cohort(planned)
        return planned.release(self.total(planned, cohort), cohort, self.ledger, self.noise)

    def total(self, planned: PlannedRelease, cohort: Cohort) -> Contribution:
        """The bounded sum over one batch. Still private: it carries no noise yet.

        A unit whose work raises contributes zero, and the others what they would without it; so does a batch of such
        units. A step that raised instead would tell, for nothing, what these records do.
        """
        batch = cohort.ids
        if self.canaries is not None:
            honest, canaries = self.canaries.split(batch)
            made_up = canary_contribution(self.canaries, canaries, planned.plan)
            return self._summed(batch[honest], planned) + made_up
        return self._summed(batch, planned)

    def _summed(self, batch: Int64[np.ndarray, " batch"], planned: PlannedRelease) -> Contribution:
        def summed(units: Int64[np.ndarray, " units"]) -> Contribution:
            chunks = self.rows(units, planned)
            return sum((contribute(rows, planned.plan) for rows in chunks), Contribution.zero(planned.plan))

        try:
            return together_or_alone(lambda: summed(batch), lambda i: summed(batch[i : i + 1]), len(batch), "unit")
        except UnitsFailed as error:
            log.error("%s: noise alone is released, and charged", error)
            return Contribution.zero(planned.plan)

    def rows(self, batch: Int64[np.ndarray, " batch"], planned: PlannedRelease) -> Iterable[Units]:
        """The rows that the units of a batch bring, chunk by chunk; private."""
        return self.gradients.of(self.state.adapter, batch, planned.part, planned.round)


def refuse_votes(plan: Plan) -> None:
    """Raise ValueError for a query that only clients can answer: trials of a client's whole local training."""
    for query in plan.queries:
        if isinstance(query, OneHotVote):
            raise ValueError(
                f"{query.name!r} asks for trials of local training, which a record has not; "
                "start from a threshold instead (strategy.controller-options.clip-norm)"
            )
