"""What the next release is: its plan, its cohort's sampling, and what of the adapter it trains."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from client.lora import Part
from privacy.distributed_noise import NoiseShares
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger import Ledger
from privacy.mechanism import Contribution, Noise, Plan, Release, charged_release, reopened_release
from strategies.aggregation.aggregation import Adapters, Aggregation
from strategies.controller import Controller, Setting
from strategies.public_subspace import Subspace, within
from strategies.server_state import ServerState


@dataclass(frozen=True)
class Planned:
    """One release before it is made.

    Attributes:
        round: 1..T; 0 is the initial release.
        plan: clips and sets the noise.
        sampling: how its cohort is drawn.
        part: what of the adapter its clients train.
        noise_shares: how its clients make the noise together; None if the server adds it.
    """

    round: int
    plan: Plan
    sampling: Poisson
    part: Part
    noise_shares: NoiseShares | None = None

    @property
    def label(self) -> str:
        """Its name in the ledger."""
        return "round" if self.round else "histogram"

    @property
    def event(self) -> ReleaseEvent:
        """What the ledger is asked to pay."""
        return ReleaseEvent(self.label, self.round, self.sampling, self.plan.components(), self.noise_shares)

    def release(self, total: Contribution, ledger: Ledger, noise: Noise | None) -> Release:
        """Charge the ledger and release the cohort's sum, see :func:`privacy.mechanism.charged_release`."""
        return charged_release(
            total,
            self.plan,
            label=self.label,
            round=self.round,
            sampling=self.sampling,
            ledger=ledger,
            noise=noise,
        )

    def reopened(self, update: Tensor, answers: tuple[Tensor, ...], ledger: Ledger) -> Release:
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
        )


@dataclass(frozen=True)
class Planner:
    """From the server's state to the next release.

    Attributes:
        controller: plans every release.
        setting: what the run told it.
        aggregation: names what each round trains.
        adapters: what the run told it.
        subspace: gives the public subspace to clip in; None clips in the whole space.
        noise_shares: how the clients make the noise together; None if the server adds it.
    """

    controller: Controller[Any]
    setting: Setting
    aggregation: Aggregation
    adapters: Adapters
    subspace: Subspace | None
    noise_shares: NoiseShares | None = None

    def initial(self) -> Poisson | None:
        """How the cohort of the initial release is drawn; None if the controller has none."""
        initial = self.controller.initial(self.setting.sampling)
        return None if initial is None else initial.sampling

    def part(self, round: int) -> Part:
        """What a round trains; the initial release trains what round 1 does."""
        return self.aggregation.part(self.adapters, max(round, 1))

    def based(self, state: ServerState) -> ServerState:
        """The state with a subspace fit for the next round; it is made from public data and the adapter."""
        round, made = state.round + 1, state.basis_round
        if self.subspace is None:
            return state
        if state.basis is None or round >= made + self.subspace.refresh or self.part(round) != self.part(made):
            return replace(state, basis=self.subspace.basis(state.adapter, self.part(round)), basis_round=round)
        return state

    def planned(self, state: ServerState) -> Planned:
        """The release after ``state``, whose subspace is fit. A controller may plan otherwise when asked again."""
        round = state.round + 1
        sampling = self.setting.sampling if round else self.initial()
        assert sampling is not None, "a state before the initial release, and a controller that has none"
        plan = self.controller.plan(state.controller, round)
        plan = plan if state.basis is None else within(state.basis, plan)
        return Planned(round, plan, sampling, self.part(round), self.noise_shares)
