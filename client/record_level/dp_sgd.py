r"""DP-SGD in one silo: a Poisson batch of units, a gradient each, one charged release, one optimizer step.

    B_t: every unit of n joins with probability q          g_i = gradient of unit i's loss at the adapter x_t
    u_t = decode( sum_{i in B_t} encode(-g_i) + z N(0, I) ) / (q n)         x_{t+1} = optimizer(x_t, u_t)

Reference: Abadi et al. 2016 (arXiv 1607.00133v2), Algorithm 1; the fixed divisor q n and the batch that may be empty as
in privacy.md, section 1. Every method of this project at record level is this loop with another clip map, controller,
optimizer or weighting of tokens inside a record.
Guarantee: each step is one Poisson-sampled Gaussian event, charged to the silo's ledger before noise is drawn; unit:
one record or one group of records (a patient), add or remove one. The number of units n, the clip thresholds, steps
and learning rates are taken as public. Raw norms, losses and counts never leave `contribute`; an empty batch is
released and charged as any other.

This module knows neither methods nor files: planner and server step are those of ``strategies``, by structure only.
`client.record_level.settings` puts them together by name. Micro-batches of any size give the same sums, because
contributions are integers.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from client.record_level.units import UnitGradients
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.errors import BudgetExceeded
from privacy.events import ReleaseEvent, Sampling
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release
from privacy.queries import OneHotVote
from privacy.randomness.noise import Noise
from privacy.randomness.sampling import CohortSampler
from strategies.adapter.trainable import TrainedSubset

log = logging.getLogger(__name__)


class Planned(Protocol):
    """One release before it is made; ``strategies.private_training.PlannedRelease``."""

    @property
    def round(self) -> int: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def part(self) -> TrainedSubset: ...
    @property
    def label(self) -> str: ...
    @property
    def event(self) -> ReleaseEvent: ...
    def release(self, total: Contribution, ledger: Ledger, noise: Noise | None) -> Release: ...
    def reopened(self, update: Tensor, answers: tuple[Tensor, ...], ledger: Ledger) -> Release: ...


class Planner(Protocol):
    """From a state to the next release; ``strategies.private_training.Planner``."""

    @property
    def controller(self) -> Any: ...
    @property
    def setting(self) -> Any: ...
    def initial(self) -> Sampling | None: ...
    def based(self, state: Any) -> Any: ...
    def planned(self, state: Any) -> Planned: ...


class Server(Protocol):
    """From a release to the next adapter; ``strategies.private_training.ServerUpdate``."""

    @property
    def optimizer(self) -> Any: ...
    def start(self, adapter: Tensor, controller: object, round: int) -> Any: ...
    def after(
        self,
        state: Any,
        release: Release,
        part: TrainedSubset,
        round: int,
        scale: float,
        public_loss: Callable[[Tensor], float] | None,
    ) -> Any: ...


class PrivateSgd:
    """The private training of one silo, step by step.

    Args:
        gradients: of the silo's units.
        planner: plans every release with the run's controller.
        server: optimizer, moving average and what of the adapter is trained.
        ledger: of this silo; pays for every release.
        sampler: draws the batches.
        noise: of the mechanism; None is the default.
        schedule: public factor on the step of every t = 1, 2, ...
        public_loss: mean loss of a full adapter on public data, for an optimizer that reads it.

    Attributes:
        state: a ``strategies.private_training.ServerState``; ``state.round`` counts the steps done.
        release: the last one.
    """

    def __init__(
        self,
        *,
        gradients: UnitGradients,
        planner: Planner,
        server: Server,
        ledger: Ledger,
        sampler: CohortSampler,
        noise: Noise | None = None,
        schedule: Callable[[int], float] = lambda step: 1.0,
        public_loss: Callable[[Tensor], float] | None = None,
    ) -> None:
        self.gradients = gradients
        self.planner = planner
        self.server = server
        self.ledger = ledger
        self.sampler = sampler
        self.noise = noise
        self.schedule = schedule
        self.public_loss = public_loss
        self.state: Any = None
        self.release: Release | None = None
        self._next: tuple[Any, Planned] | None = None
        self._raw: list[Units] | None = None  # kept for a rule that voids the guarantee and for nothing else

    def begin(self, adapter: Float[Tensor, " size"], public: Any) -> None:
        """Start from a full adapter vector; ``public`` (``PublicSignals``) describes the model it makes.

        Raises:
            ValueError: the optimizer reads a public loss and there is none, or the controller asks for votes.
        """
        if self.server.optimizer.reads_public_loss and self.public_loss is None:
            raise ValueError(f"{type(self.server.optimizer).__name__} reads the public loss; give public_loss")
        first = 0 if self.planner.initial() is None else -1
        self.state = self.server.start(adapter, self.planner.controller.init(self.planner.setting, public), first)
        refuse_votes(self.next_release().plan)

    def restore(self, state: Any, update: Tensor | None = None, answers: tuple[Tensor, ...] = ()) -> None:
        """Go on from a checkpoint, see ``strategies.dp_fedavg.DpFedAvg.restore``; :meth:`observe` is the next call."""
        self.state, self.release = state, None
        if update is not None:
            before = self.planner.planned(replace(state, round=state.round - 1))
            self.release = before.reopened(update, answers, self.ledger)

    def next_release(self) -> Planned:
        """The next release; planned once, so that one plan clips and sets the noise."""
        if self._next is None or self._next[0] is not self.state:
            self.state = self.planner.based(self.state)
            self._next = self.state, self.planner.planned(self.state)
        return self._next[1]

    def refusal(self) -> str | None:
        """Why there is no next step, or None: the planned ones are done, or the ledger does not pay.

        Asked before anyone is sampled.
        """
        if self.state.round >= (steps := self.planner.setting.rounds):
            return f"all {steps} planned steps are done"
        return self.ledger.would_exceed(self.next_release().event)

    def step(self) -> Release:
        """Sample, compute, release, step. What fails before the charge leaves the same batch to be drawn again.

        Raises:
            BudgetExceeded: the ledger does not pay, or the planned steps are done; nothing was sampled.
        """
        if (refusal := self.refusal()) is not None:
            raise BudgetExceeded(refusal)
        planned = self.next_release()
        release = planned.release(self.total(planned), self.ledger, self.noise)
        state = self.state
        if planned.round > 0:
            scale = self.planner.controller.step_scale(state.controller) * self.schedule(planned.round)
            loss = self.public_loss if self.server.optimizer.reads_public_loss else None
            state = self.server.after(state, release, planned.part, planned.round, scale, loss)
        self.state, self.release = replace(state, round=planned.round), release
        return release

    def total(self, planned: Planned) -> Contribution:
        """The bounded sum over one batch. Still private: it carries no noise yet.

        A unit whose work raises contributes zero, and the others what they would without it.

        Raises:
            Exception: of the first unit, if every unit's work raises.
        """
        if self.sampler.insecure and self.ledger.not_private is None:
            self.ledger.stamp_not_private("batches are drawn from a seed")
        round, label = planned.round, planned.label
        attempt = sum(event.round == round and event.label == label for event in self.ledger.events)
        batch = self.sampler.draw(planned.sampling, round, attempt, label=label)
        try:
            return self._sum(batch, planned)
        except Exception as error:  # whatever one unit's records make the model raise; its text may quote them
            if len(batch) < 2:
                raise
            log.warning("units computed together failed (%s); each is tried by itself", type(error).__name__)
        total, failed = Contribution.zero(planned.plan), []
        for position in range(len(batch)):
            try:
                total = total + self._sum(batch[position : position + 1], planned)
            except Exception as error:
                failed.append(error)
        if len(failed) == len(batch):
            raise failed[0]
        for reason in failed:
            log.warning("a unit contributes zero: its work raised %s", type(reason).__name__)
        return total

    def _sum(self, batch: Int64[np.ndarray, " batch"], planned: Planned) -> Contribution:
        total = Contribution.zero(planned.plan)
        for units in self._chunks(batch, planned):
            total = total + contribute(units, planned.plan)
        return total

    def _chunks(self, batch: Int64[np.ndarray, " batch"], planned: Planned) -> Iterable[Units]:
        """The rows of a batch; regrouped and kept only for a rule that has voided the guarantee."""
        chunks = self.gradients.of(self.state.adapter, batch, planned.part, planned.round)
        controller = self.planner.controller
        if not hasattr(controller, "see_raw"):
            return chunks
        if self.ledger.commitment.not_private is None:
            raise ValueError(f"{controller.raw}; set privacy.non-private = true")
        self.ledger.stamp_not_private(controller.raw)
        self._raw = controller.regrouped(list(chunks))
        return self._raw

    def observe(self, public: Any) -> None:
        """Tell the controller of the last release and of what everyone may know after it (``PublicSignals``)."""
        if self.release is None:
            raise ValueError("observe needs a release; call it after step")
        controller = self.planner.controller.update(self.state.controller, self.release, public)
        if self._raw is not None:
            controller, self._raw = self.planner.controller.see_raw(controller, self._raw), None
        self.state = replace(self.state, controller=controller)


def refuse_votes(plan: Plan) -> None:
    """ValueError for a query that only clients can answer: trials of a client's whole local training."""
    for query in plan.queries:
        if isinstance(query, OneHotVote):
            raise ValueError(
                f"{query.name!r} asks for trials of local training, which a record has not; "
                "start from a threshold instead (strategy.controller-options.clip-norm)"
            )
