"""What a controller is: it plans the next release from earlier releases and public data, and from nothing else.

That it sees no private value is a matter of types: ``update`` is given a :class:`~privacy.mechanism.Release`, which
only the mechanism can make, and :class:`PublicSignals`. So whatever a controller computes is post-processing, and a new
one needs no proof, only to plan releases at least as noisy as the committed floor (the ledger refuses others).
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from privacy.events import Component, Poisson
from privacy.mechanism import Plan, Release


@dataclass(frozen=True)
class Setting:
    """What a run tells its controller; public.

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
    """What everyone may know after a round.

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
    """Parameters are the object's frozen fields; state is a frozen dataclass of plain numbers that goes in and out."""

    @property
    def reads_validation(self) -> bool:
        """Whether ``update`` needs the public validation loss of every round, so that it must be evaluated then."""
        ...

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        """What is released before round 1, for calibration and the ledger; None if nothing is."""
        ...

    def profile(self, rounds: int) -> tuple[float, ...]:
        """Noise multipliers of the rounds relative to each other, before calibration; all 1 for constant noise."""
        ...

    def init(self, setting: Setting, public: PublicSignals) -> S:
        """State before anything was released; ``public`` describes the initial model."""
        ...

    def plan(self, state: S, round: int) -> Plan:
        """The release of ``round``; round 0 is the initial release. Effective noise at least the setting's."""
        ...

    def update(self, state: S, released: Release, public: PublicSignals) -> S:
        """State after a round (or after the initial release, ``public.round == 0``)."""
        ...

    def step_scale(self, state: S) -> float:
        """Factor on the server optimizer's step in the coming round; 1 where the controller leaves it alone."""
        ...

    def released_values(self, state: S) -> dict[str, float]:
        """Named numbers worth showing, all computed from releases and public data."""
        ...


def constant_profile(rounds: int) -> tuple[float, ...]:
    """The profile of a method that does not vary its noise."""
    return (1.0,) * rounds
