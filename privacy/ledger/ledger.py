"""The ledger of one run: what it committed to, what it spent, what it released, in the order in which it happened.

Charge first, noise second: :meth:`Ledger.charge` returns only when the charge is on the disk, and only then may noise
be drawn. A run that dies between the two has spent the budget and released nothing; a release without its charge
cannot exist. Budget and rules are those of the first line, the :class:`~privacy.commitment.Commitment`; reopening
replays every line under the same rules, so a ledger that was never allowed to get where it is raises CorruptRun.

One ledger protects one unit. A run with record-level privacy inside clients keeps one ledger per client.
"""

import math
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from privacy import durable
from privacy.commitment import Commitment
from privacy.errors import BudgetExceeded, CorruptRun
from privacy.events import ReleaseEvent
from privacy.ledger.budget import FilterBudget, FloorBudget, Price, budget_of, check_affordable
from privacy.ledger.journal import Entry, Journal


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
        debited_at: day of the charge, ISO 8601, UTC. How long a round takes tells who took part in it, so no finer time
            stands in a ledger; ledgers of earlier versions have milliseconds.
        released_at: day of the release; None if the run died in between.
    """

    event: ReleaseEvent
    noise_multiplier: float
    step: int | None
    rho: float | None
    debited_at: str
    released_at: str | None = None


class Ledger:
    """Append-only account of one run over a :class:`~privacy.ledger.journal.Journal`.

    Make one with :meth:`create` or :meth:`open`.
    """

    def __init__(self, journal: Journal) -> None:
        """Replay a verified journal; CorruptRun if its lines break its own rules."""
        self._journal = journal
        self._charges: list[Charge] = []
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.RLock()
        first = journal.entries[0] if journal.entries else None
        if first is None or first.kind != "commitment":
            raise CorruptRun(
                f"{journal.path} line 1 is no commitment: what was charged is unknown without it; restore the file"
            )
        try:
            self.commitment = Commitment.from_json(first.body["commitment"])
            self.run_id = str(first.body["run_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptRun(f"{journal.path} line 1 holds no valid commitment ({error})") from error
        self._not_private = [self.commitment.not_private] if self.commitment.not_private else []
        self._budget = budget_of(self.commitment)
        self.is_closed = False
        for entry in journal.entries[1:]:
            self._replay(entry)

    @classmethod
    def create(cls, path: Path | str, commitment: Commitment, run_id: str | None = None) -> "Ledger":
        """Start a ledger in a new file; the commitment is on the disk when this returns.

        Raises:
            ValueError: the committed floor costs more than the committed epsilon.
            UnsupportedEvent: no accountant bounds the committed floor.
            FileExistsError: there is a ledger already; it is never overwritten.
        """
        if commitment.not_private is None:
            check_affordable(commitment)
        body = {"commitment": commitment.to_json(), "run_id": run_id or uuid.uuid4().hex}
        journal = Journal.start(Path(path), "commitment", body)
        try:
            return cls(journal)
        except BaseException:
            journal.close()
            raise

    @classmethod
    def open(cls, path: Path | str, expected_head: str | None = None, *, read_only: bool = False) -> "Ledger":
        """Reopen a ledger, verify its chain and replay its rules.

        Args:
            expected_head: a :attr:`head` stored elsewhere (in a checkpoint), to notice that the file was rolled back.
            read_only: take no lock, for reports.

        Raises:
            CorruptRun: a line was damaged, removed, repeated, moved, or was never allowed; the message names the line.
            BlockingIOError: another process holds the ledger.
        """
        journal = Journal.open(Path(path), expected_head, read_only)
        try:
            return cls(journal)
        except BaseException:
            journal.close()
            raise

    @property
    def path(self) -> Path:
        """The ledger's file on disk."""
        return self._journal.path

    @property
    def head(self) -> str:
        """``"LINES:HASH"``: store it in the checkpoint and pass it to :meth:`open`."""
        return self._journal.head

    @property
    def events(self) -> tuple[ReleaseEvent, ...]:
        """Every event that was charged, in order."""
        return tuple(charge.event for charge in self._charges)

    @property
    def charges(self) -> tuple[Charge, ...]:
        """Every charge, in order."""
        return tuple(self._charges)

    @property
    def not_private(self) -> str | None:
        """The reason for which this run gives no guarantee at all, or None."""
        return "; ".join(self._not_private) or None

    def attempts(self, label: str, round: int) -> int:
        """Count the charges for the release of this name."""
        return self._attempts[label, round]

    def would_exceed(self, event: ReleaseEvent) -> str | None:
        """Explain why the commitment does not pay for ``event``, or None. Ask before sampling: a refusal costs nothing.

        Raises:
            UnsupportedEvent: the event cannot be accounted at all (filter mode).
        """
        if self.is_closed:
            return f"{self.path} is closed"
        try:
            self._budget.price(event)
        except BudgetExceeded as refusal:
            return str(refusal)
        return None

    def charge(self, event: ReleaseEvent) -> Receipt:
        """Pay for ``event`` before its noise is drawn; durable when this returns.

        Raises:
            BudgetExceeded: the commitment does not pay for it; nothing was written.
            OSError: the disk has no room (:func:`privacy.durable.check_room`): nothing was written. Or it failed: the
                budget counts as spent and this ledger takes no further charge.
        """
        with self._lock:
            if self.is_closed:
                raise BudgetExceeded(f"{self.path} is closed: what it had left was given back; start another run")
            price = self._budget.price(event)
            durable.check_room(self.path.parent)
            body = {
                "charge": len(self._charges),
                "event": event.to_json(),
                "noise_multiplier": event.effective_noise_multiplier,
                "step": price.step,
                "rho": price.rho,
                "debited_at": _today(),
            }
            self._replay(self._journal.append("charge", body))
            return Receipt(len(self._charges) - 1, event)

    def note_release(self, receipt: Receipt) -> None:
        """Note that the release paid for by ``receipt`` was made; ValueError if it is foreign to us, or repeated."""
        with self._lock:
            number = receipt.charge
            if not 0 <= number < len(self._charges) or self._charges[number].event != receipt.event:
                raise ValueError(f"receipt {number} is not of {self.path}; pass what charge() returned")
            if self._charges[number].released_at is not None:
                raise ValueError(f"charge {number} was released already; every release needs its own charge")
            self._replay(self._journal.append("released", {"charge": number, "released_at": _today()}))

    def stamp_not_private(self, reason: str) -> None:
        """Mark the run for good as giving no guarantee (test noise, known sampling secret); once per reason."""
        if not reason:
            raise ValueError("reason must not be empty, got ''; say why the run gives no guarantee")
        with self._lock:
            if reason not in self._not_private:
                self._replay(self._journal.append("not-private", {"reason": reason}))

    def close_for_good(self) -> None:
        """Take no further charge, ever; durable when this returns. Closing twice is closing once."""
        with self._lock:
            if not self.is_closed:
                self._replay(self._journal.append("closed", {"charges": len(self._charges)}))

    def epsilon_spent(self) -> float:
        """Upper bound on the epsilon spent so far, at the committed delta; infinite if the run is not private.

        In floor mode the PLD of the consumed floor steps, in filter mode the conversion of the Rényi divergence spent.
        It bounds a run that was going to stop here anyway; if the moment of stopping is chosen from released values,
        the guarantee is the committed epsilon.
        """
        return math.inf if self._not_private else self._budget.epsilon_spent()

    def epsilon_guaranteed(self) -> float:
        """Epsilon of the whole commitment at its delta: what holds whenever and why ever the run stops.

        Infinite if the run is not private. In floor mode the PLD of the committed floor.
        """
        return math.inf if self._not_private else self._budget.worst_case()

    @property
    def rho_spent(self) -> float:
        """Rényi divergence spent at the committed order (filter mode; 0 in floor mode)."""
        return self._budget.rho_spent if isinstance(self._budget, FilterBudget) else 0.0

    def steps_left(self, label: str) -> int:
        """The number of releases of ``label`` that the floor still pays for (floor mode; 0 in filter mode)."""
        return self._budget.steps_left(label) if isinstance(self._budget, FloorBudget) else 0

    def close(self) -> None:
        """Release the ledger's lock."""
        self._journal.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _replay(self, entry: Entry) -> None:
        try:
            self._apply(entry.kind, entry.body)
        except (KeyError, TypeError, ValueError, IndexError, BudgetExceeded) as error:
            raise CorruptRun(f"{self.path} line {entry.line} is not allowed here: {error}") from error

    def _apply(self, kind: str, body: Mapping[str, Any]) -> None:
        match kind:
            case "charge" | "closed" if self.is_closed:
                raise ValueError("the ledger was closed before")
            case "closed":
                if body["charges"] != len(self._charges):
                    raise ValueError(f"it was closed with {body['charges']} charges, not {len(self._charges)}")
                self.is_closed = True
            case "charge":
                event = ReleaseEvent.from_json(body["event"])
                price = self._budget.price(event)
                stated = Price(body["step"], body["rho"])
                if body["charge"] != len(self._charges) or not _same(stated, price):
                    raise ValueError(
                        f"charge {body['charge']} states {stated}, it should be {len(self._charges)}, {price}"
                    )
                self._budget.take(price)
                multiplier = event.effective_noise_multiplier
                self._charges.append(Charge(event, multiplier, price.step, price.rho, str(body["debited_at"])))
                self._attempts[event.label, event.round] += 1
            case "released":
                charge = self._charges[body["charge"]]
                if charge.released_at is not None:
                    raise ValueError(f"charge {body['charge']} is released twice")
                self._charges[body["charge"]] = replace(charge, released_at=str(body["released_at"]))
            case "not-private":
                self._not_private.append(str(body["reason"]))
            case "torn":
                pass
            case _:
                raise ValueError(f"unknown kind of line {kind!r}")


def _same(stated: Price, due: Price) -> bool:
    if stated.rho is None or due.rho is None:
        return stated == due
    return stated.step == due.step and abs(stated.rho - due.rho) <= 1e-9 * due.rho


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
