"""Private training, release by release: plan, draw a cohort, release its bounded sum, step, tell the controller.

    x_{t+1} = step( x_t, ( sum_{i in cohort} clip(u_i) + N(0, z^2 C^2 I) ) / (q n) )

The same for a server over clients (``dp_fedavg.py``) and for a client over its own records
(``client/record_level/dp_sgd.py``); they differ in where the bounded sum comes from.
``server_update.py`` has what follows a release.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from jaxtyping import Float
from torch import Tensor

from privacy.contribution import MAX_UNITS, Contribution, Plan, validate
from privacy.errors import BudgetExceeded
from privacy.events import Correlation, CyclicPoisson, NoiseShares, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release, charged_release, reopened_release
from privacy.randomness.correlated import CorrelatedNoise
from privacy.randomness.noise import Noise
from privacy.randomness.sampling import Cohort, CohortSampler, RemoteSampler
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters, Aggregation
from strategies.controllers.controller import Controller, PublicSignals, RunInfo
from strategies.optimizers.optimizer import Optimizer
from strategies.plugins import expect, finite_number
from strategies.server_update import ServerState, ServerUpdate


@dataclass(frozen=True)
class PlannedRelease:
    """One release before it is made.

    Attributes:
        round: 1..T; 0 is the initial release.
        plan: clips and sets the noise.
        sampling: how its cohort is drawn.
        part: what of the adapter its clients train.
        noise_shares: how its clients make the noise together; None if the server adds it.
        correlation: how its noise hangs together with that before it; None if it is independent.
        measures: whether held-out units are asked about the served adapter, and nobody trains.
        asks: whether units are asked about their records, and there is no adapter.
    """

    round: int
    plan: Plan
    sampling: Poisson
    part: TrainedSubset
    noise_shares: NoiseShares | None = None
    correlation: Correlation | None = None
    measures: bool = False
    asks: bool = False

    @property
    def label(self) -> str:
        """The release's name in the ledger."""
        if self.asks:
            return "ask"
        return "evaluation" if self.measures else "round" if self.round else "histogram"

    @property
    def event(self) -> ReleaseEvent:
        """The event that the ledger is asked to pay."""
        components = self.plan.components()
        return ReleaseEvent(self.label, self.round, self.sampling, components, self.noise_shares, self.correlation)

    def release(self, total: Contribution, cohort: Cohort, ledger: Ledger, noise: Noise | None) -> Release:
        """Charge the ledger and release the cohort's sum, see :func:`privacy.mechanism.charged_release`.

        Raises:
            ValueError: ``total`` cannot be a sum over no more units than were drawn; nothing was charged.
        """
        validate(total, self.plan, min(cohort.most, MAX_UNITS))
        return charged_release(total, self.plan, cohort, ledger=ledger, noise=noise)

    def reopen_release(self, update: Tensor, answers: tuple[Tensor, ...], ledger: Ledger) -> Release:
        """The release as it was made before, from a checkpoint. CorruptRun if the ledger knows of no such release."""
        return reopened_release(
            self.plan,
            update,
            answers,
            label=self.label,
            round=self.round,
            sampling=self.sampling,
            charges=ledger.charges,
            noise_shares=self.noise_shares,
            correlation=self.correlation,
        )

    def in_turn(self, ledger: Ledger, noise: Noise | None) -> "PlannedRelease":
        """Set whose turn it is in cyclic sampling by the charges so far, lost ones included; how its noise goes on."""
        if not isinstance(self.sampling, CyclicPoisson):
            return self
        sampling = replace(self.sampling, turn=len(ledger.charges))
        correlation = noise.correlation(sampling, ledger) if isinstance(noise, CorrelatedNoise) else None
        return replace(self, sampling=sampling, correlation=correlation)

    def as_charged(self, ledger: Ledger) -> "PlannedRelease":
        """Set the turn and the noise of cyclic sampling to those of the last charge for this release."""
        charged = [event for event in ledger.events if (event.label, event.round) == (self.label, self.round)]
        if not isinstance(self.sampling, CyclicPoisson) or not charged:
            return self
        return replace(self, sampling=charged[-1].sampling, correlation=charged[-1].correlation)


class Subspace(Protocol):
    """Public directions that releases are made in: functions of public data and of earlier releases.

    Its state is a frozen dataclass of numbers and tensors, so that a checkpoint can hold it.
    """

    def start(self) -> Any:
        """State before the first release."""
        ...

    def refresh_state(self, own: Any, adapter: Float[Tensor, " size"], round: int, part: TrainedSubset) -> Any:
        """State fit for the release of ``round``, which trains ``part`` from ``adapter``; itself if it is already."""
        ...

    def clip_plan(self, own: Any, plan: Plan) -> Plan:
        """The controller's plan, made in the subspace; ValueError for a clip map that cannot be."""
        ...

    def project_optimizer(self, own: Any, optimizer: Optimizer, scales: Float[Tensor, " d"] | None) -> Optimizer:
        """The optimizer behind the release; ``scales`` are those of the sent vector."""
        ...

    def after(self, own: Any, release: Release, adapter: Float[Tensor, " size"], round: int) -> Any:
        """State after the release of ``round``, which led to ``adapter``."""
        ...


@dataclass(frozen=True)
class Planner:
    """The planner of the next release from the server's state.

    Attributes:
        controller: plans every release.
        info: of the run, for the controller.
        aggregation: names what each round trains.
        adapters: what the run told it.
        subspace: public directions to release in; None is the whole space.
        noise_shares: how the clients make the noise together; None if the server adds it.
    """

    controller: Controller[Any]
    info: RunInfo
    aggregation: Aggregation
    adapters: Adapters
    subspace: Subspace | None = None
    noise_shares: NoiseShares | None = None

    def initial(self) -> Poisson | None:
        """The sampling that draws the cohort of the initial release; None if the controller has none."""
        initial = self.controller.initial(self.info.sampling)
        return None if initial is None else initial.sampling

    def part(self, round: int) -> TrainedSubset:
        """The subset that a round trains; the initial release trains what round 1 does."""
        return self.aggregation.part(self.adapters, max(round, 1))

    def refresh_subspace(self, state: ServerState) -> ServerState:
        """The state with its subspace fit for the next round."""
        if self.subspace is None:
            return state
        round = state.round + 1
        own = self.subspace.refresh_state(state.subspace, state.adapter, round, self.part(round))
        return state if own is state.subspace else replace(state, subspace=own)

    def plan_release(self, state: ServerState) -> PlannedRelease:
        """The release after ``state``, whose subspace is fit. A controller may plan otherwise when asked again."""
        round = state.round + 1
        sampling = self.info.sampling if round else self.initial()
        assert sampling is not None, "a state before the initial release, and a controller that has none"
        plan = self.controller.plan(state.controller, self.info, round)
        expect("controller", self.controller, "plan", plan, Plan, "a Plan (privacy.contribution)")
        if self.subspace is not None and round > 0:
            plan = self.subspace.clip_plan(state.subspace, plan)
        return PlannedRelease(round, plan, sampling, self.part(round), self.noise_shares)


class PrivateTraining(ABC):
    """One private training of an adapter; a subclass says how a planned release comes about (:meth:`make_release`).

    Args:
        planner: plans every release with the run's controller.
        server: optimizer, aggregation and moving average.
        ledger: pays for every release.
        sampler: draws the cohorts, or stands for those who do.
        schedule: public factor on the server's step of every t = 1, 2, ...

    Attributes:
        release: the last one; None before.
    """

    drawn: ClassVar[str] = "cohorts"
    counted: ClassVar[str] = "rounds"

    def __init__(
        self,
        *,
        planner: Planner,
        server: ServerUpdate,
        ledger: Ledger,
        sampler: CohortSampler | RemoteSampler,
        schedule: Callable[[int], float] = lambda round: 1.0,
    ) -> None:
        self.planner = planner
        self.server = server
        self.ledger = ledger
        self.sampler = sampler
        self.schedule = schedule
        self.release: Release | None = None
        self._state: ServerState | None = None
        self._next: tuple[ServerState, PlannedRelease] | None = None

    @property
    def controller(self) -> Controller[Any]:
        """The controller that plans every release."""
        return self.planner.controller

    @property
    def noise(self) -> Noise | None:
        """The noise that the releases carry; None is the mechanism's default."""
        return self.server.noise

    @property
    def state(self) -> ServerState:
        """The state after the last release, whole as soon as :meth:`step` returns; ValueError before :meth:`begin`."""
        if self._state is None:
            raise ValueError("there is no state; call begin() or restore a checkpoint first")
        return self._state

    @state.setter
    def state(self, state: ServerState | None) -> None:
        self._state = state

    def begin(self, adapter: Float[Tensor, " size"], public: PublicSignals) -> None:
        """Start from a full adapter vector; ``public`` describes the model it makes."""
        first = 0 if self.planner.initial() is None else -1
        state = self.server.start(adapter, self.controller.init(self.planner.info, public), first)
        subspace = self.planner.subspace
        self.state = state if subspace is None else replace(state, subspace=subspace.start())

    def restore(self, state: ServerState, update: Tensor | None = None, answers: tuple[Tensor, ...] = ()) -> None:
        """Continue from a checkpoint.

        Args:
            state: as it was after the last release (or after :meth:`begin`), before the controller heard of that.
            update, answers: of that release; None if there was none yet. :meth:`observe` is the next call then.

        Raises:
            CorruptRun: the ledger knows of no such release.
        """
        self.state, self.release = state, None
        if update is not None:
            before = self.planner.plan_release(replace(state, round=state.round - 1))
            self.release = before.as_charged(self.ledger).reopen_release(update, answers, self.ledger)

    def next_release(self) -> PlannedRelease:
        """Plan the next release, once, so that one plan clips and sets the noise."""
        state = self.state
        if self._next is None or self._next[0] is not state:
            self.state = state = self.planner.refresh_subspace(state)
            self._next = state, self.planner.plan_release(state)
        return self._next[1].in_turn(self.ledger, self.noise)

    def refusal(self) -> str | None:
        """Explain, before anyone is sampled, why no release follows: all are made, or the ledger does not pay."""
        if self.state.round >= (planned := self.planner.info.rounds):
            return f"all {planned} planned {self.counted} are done"
        return self.ledger.would_exceed(self.next_release().event)

    def step(self) -> Release:
        """One release and the server's step on it. What fails before the charge leaves the same cohort to be drawn.

        Raises:
            BudgetExceeded: the ledger does not pay, or the planned releases are made; nobody was sampled.
        """
        planned = self._paid()
        self._take(planned, release := self.make_release(planned))
        return release

    @abstractmethod
    def make_release(self, planned: PlannedRelease) -> Release:
        """Draw the cohort, charge the ledger, release the bounded sum over it."""

    def observe(self, public: PublicSignals) -> None:
        """Tell the controller of the last release and of what everyone may know after it."""
        if self.release is None:
            raise ValueError("observe needs a release; call it after a step")
        own = self.state.controller
        controller = self.controller.update(own, self.planner.info, self.release, public)
        expect("controller", self.controller, "update", controller, type(own), f"the state, a {type(own).__name__}")
        self.state = replace(self.state, controller=controller)

    def released_values(self) -> dict[str, float]:
        """Numbers worth showing that the controller computes from releases; its threshold is called "clip-bound".

        An initial release is all answers: after it these are shown too, as NAME-1 and further ones.
        """
        values = self.controller.released_values(self.state.controller, self.planner.info)
        if self.state.round == 0 and self.release is not None:
            for query, answer in zip(self.release.plan.queries, self.release.answers, strict=True):
                values = values | {f"{query.name}-{place}": value for place, value in enumerate(answer.tolist(), 1)}
        return values

    def cohort(self, planned: PlannedRelease) -> Cohort:
        """The release's cohort: another one each time that it was charged. A seeded draw is stamped."""
        if self.sampler.insecure and self.ledger.not_private is None:
            self.ledger.stamp_not_private(f"{self.drawn} are drawn from a seed")
        round, label = planned.round, planned.label
        return self.sampler.draw(planned.sampling, round, self.ledger.attempts(label, round), label=label)

    def _paid(self) -> PlannedRelease:
        """The next release; BudgetExceeded where there is none."""
        if (refusal := self.refusal()) is not None:
            raise BudgetExceeded(refusal)
        return self.next_release()

    def _take(self, planned: PlannedRelease, release: Release) -> None:
        """The server's step after a release."""
        state = self.state
        if planned.round > 0:
            scale = finite_number("controller", self.controller, "step_scale", state.controller)
            scale *= self.schedule(planned.round)
            state = self._server(planned).after(state, release, planned.part, planned.round, scale)
            if (subspace := self.planner.subspace) is not None:
                own = subspace.after(state.subspace, release, state.adapter, planned.round)
                state = replace(state, subspace=own)
        self.state, self.release = replace(state, round=planned.round), release

    def _server(self, planned: PlannedRelease) -> ServerUpdate:
        """What steps after a release; the optimizer of one in a subspace may be given a projection of it."""
        if (subspace := self.planner.subspace) is None:
            return self.server
        scales = planned.part.scales(self.server.layout)
        optimizer = subspace.project_optimizer(self.state.subspace, self.server.optimizer, scales)
        return replace(self.server, optimizer=optimizer)
