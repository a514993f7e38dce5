"""The interface of a controller: it plans the next release from earlier releases and public data, and from nothing
else.

That it sees no private value is a matter of types: ``update`` is given a :class:`~privacy.mechanism.Release`, which
only the mechanism can make, and :class:`PublicSignals`. So whatever a controller computes is post-processing, and a new
one needs no proof, only to plan releases at least as noisy as the committed floor (the ledger refuses others).

Queries share the noise of a round with the update that they are asked beside: everything released on one cohort is ONE
Gaussian of multiplier z_eff = (z_D^-2 + sum_j (S_j/s_j)^2)^(-1/2). A run is calibrated for z_eff; a controller that
asks queries therefore plans its update with what they leave,

    z_D = (z_eff^-2 - sum_j (S_j/s_j)^2)^(-1/2),

so the round costs exactly what the run committed to. Andrew et al. 2021 (arXiv 1905.03871v5), section 3.3, has it for
one bit; for any number of queries see ``Plan.effective_noise_multiplier`` in :mod:`privacy.contribution`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from privacy.contribution import Plan
from privacy.events import Component, Poisson
from privacy.mechanism import Release
from privacy.queries import Query


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that its controller is told; public.

    Attributes:
        rounds: planned rounds T.
        layouts: for rounds 1..T, the sizes of the parts of an update that belong together: every (A, B) pair, then
            every head. One layout stands for all rounds; an aggregation that trains other factors or ranks in other
            rounds gives T of them.
        sampling: how the cohort of a round is drawn.
        noise_multipliers: for rounds 1..T, the effective noise multiplier of everything released in that round.
        order: the Rényi order of the ledger's filter, which lets a controller spend unevenly what these multipliers
            cost together; None in floor mode, where they are the least of each round.
    """

    rounds: int
    layouts: tuple[tuple[int, ...], ...]
    sampling: Poisson
    noise_multipliers: tuple[float, ...]
    order: int | None = None

    def blocks(self, round: int) -> tuple[int, ...]:
        """Sizes of the parts of an update in ``round`` (1..T); those of round 1 before it."""
        return self.layouts[(max(round, 1) - 1) % len(self.layouts)]

    def dimension(self, round: int) -> int:
        """Number of values of an update in ``round``, d."""
        return sum(self.blocks(round))

    def noise_multiplier(self, round: int) -> float:
        """Effective noise multiplier of ``round`` (1..T); that of round 1 before it."""
        return self.noise_multipliers[max(round, 1) - 1]


@dataclass(frozen=True)
class PublicSignals:
    """The values that everyone may know after a round.

    Attributes:
        round: the round just done; 0 before the first one.
        validation_loss: mean loss of the current model on the public validation set; None where not evaluated.
        rho_spent: Rényi divergence the ledger has charged so far, rounds that failed included; 0 in floor mode.
    """

    round: int
    validation_loss: float | None
    rho_spent: float = 0.0


@dataclass(frozen=True)
class InitialRelease:
    """A release before round 1 (label ``"histogram"``, round 0): who takes part and what is asked."""

    sampling: Poisson
    components: tuple[Component, ...]


S = TypeVar("S")


class Controller(Protocol[S]):
    """Parameters are the object's frozen fields; state is what changes, a frozen dataclass of numbers and tensors.

    A class that inherits from this one writes only what it decides: ``init``, ``plan``, ``released_values`` and, unless
    it learns nothing from releases, ``update``. What never changes in a run is given as ``info`` and not in the state.
    """

    reads_validation: ClassVar[bool] = False
    """Whether ``update`` needs the public validation loss of every round, so that it must be evaluated then."""

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        """The release before round 1, for calibration and the ledger; by default nothing is."""
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        """Noise multipliers of the rounds relative to each other, before calibration; by default all alike."""
        return (1.0,) * rounds

    def init(self, info: RunInfo, public: PublicSignals) -> S:
        """State before anything was released; ``public`` describes the initial model."""
        ...

    def plan(self, state: S, info: RunInfo, round: int) -> Plan:
        """The release of ``round``; round 0 is the initial release. Effective noise at least that of ``info``."""
        ...

    def update(self, state: S, info: RunInfo, released: Release, public: PublicSignals) -> S:
        """State after a round (or after the initial release, ``public.round == 0``); by default the same."""
        return state

    def step_scale(self, state: S) -> float:
        """Factor on the server optimizer's step in the coming round; by default 1, which leaves it alone."""
        return 1.0

    def released_values(self, state: S, info: RunInfo) -> dict[str, float]:
        """Named numbers worth showing, all computed from releases and public data.

        One must be called ``"clip-bound"``: the threshold of the next round, 0 until an initial release has given it. A
        method with several, or with none of its own, gives the flat threshold they come to.
        """
        ...


class NoBudgetLeft(ValueError):
    """The queries beside the update take all that a round may spend.

    Attributes:
        names: of the queries.
        times: how many times the budget of a round they take.
    """

    def __init__(self, message: str, names: str, times: float) -> None:
        super().__init__(message)
        self.names, self.times = names, times


def update_multiplier(effective: float, queries: Sequence[Query]) -> float:
    """Noise multiplier of the update beside ``queries`` in a round of effective noise multiplier ``effective``.

    Raises:
        NoBudgetLeft: the queries alone need as much budget as the round has; the message names the least noise.
    """
    spent = math.hypot(*(query.sensitivity / query.noise_std for query in queries))
    if effective * spent >= 1.0:
        names = " and ".join(repr(query.name) for query in queries)
        raise NoBudgetLeft(
            f"noise multiplier of a round must be < {1.0 / spent:g}, which {names} alone has, got {effective:g}: no "
            f"budget is left for the update; raise the noise of {names} by more than {effective * spent:.3g} times, "
            "expect a larger cohort, or allow a larger epsilon",
            names,
            effective * spent,
        )
    return effective / math.sqrt(1.0 - (effective * spent) ** 2)


def check_queries(info: RunInfo, queries: Sequence[Query]) -> None:
    """NoBudgetLeft unless every round of a run leaves its update some budget beside ``queries``."""
    update_multiplier(max(info.noise_multipliers), queries)
