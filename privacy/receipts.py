"""What a ledger hands out and remembers for one paid release."""

from dataclasses import dataclass

from privacy.events import ReleaseEvent


@dataclass(frozen=True)
class Receipt:
    """Proof that a release is paid for. ``charge`` counts the charges of the ledger from 0."""

    charge: int
    event: ReleaseEvent


@dataclass(frozen=True)
class Charge:
    """One paid release, as the ledger remembers it.

    Attributes:
        event: what was paid for.
        noise_multiplier: its effective noise multiplier.
        step: index of the floor step it consumed (floor mode), else None.
        rho: Rényi divergence it spent (filter mode), else None.
        debited_at: time of the charge, ISO 8601, UTC.
        released_at: time of the release; None if the run died in between.
    """

    event: ReleaseEvent
    noise_multiplier: float
    step: int | None
    rho: float | None
    debited_at: str
    released_at: str | None = None
