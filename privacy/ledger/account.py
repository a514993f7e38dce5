"""The account of a data set: one lifetime budget that every run on its units debits, kept by whoever owns the data.

Whoever sets up a run has seen what earlier runs released, so their composition is adaptive, and the privacy loss
distributions of commitments that were chosen one after the other must not be added up: no such filter exists
(arXiv 2602.06756, 2602.15815). Two rules are sound, and an account keeps to the one it was made with:

- ``renyi``: at one order, fixed beforehand, the Rényi divergences of the commitments add up to at most what converts to
  (epsilon, delta); Feldman, Zrnic 2021 (arXiv 2008.11193), Theorem 4.3 with a fully adaptive choice of mechanisms.
- ``sum``: the epsilons and the deltas add up to at most epsilon and delta; Rogers, Roth, Ullman, Vadhan 2016
  (arXiv 1605.08294).

A run is debited once, by its whole commitment, before its first charge. What it did not use is given back only once its
own ledger proves it unused and takes no further charge (:meth:`Account.give_back`). Guarantee: all that is
debited is together (epsilon, delta)-private for the account's unit, whatever was seen before a run was set up, and
whether or not anybody stopped asking because of it.

    account.jsonl   a journal (``journal.py``): the terms, a line a debit, one where a run is closed, one where the
                    account is handed over
    PLACE/seat      a secret of this machine; the account is bound to its digest, so a copy elsewhere is refused
    PLACE/ID.head   the account's last line; kept apart from it, so that an older copy is refused

The place is the machine's, not the account's folder: who puts back both has only a head kept elsewhere against them.
"""

import hashlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Context, Decimal
from pathlib import Path
from typing import Any

from privacy import durable
from privacy.accountants import composition, renyi
from privacy.commitment import Commitment
from privacy.errors import AccountRefused, CorruptRun, UnsupportedEvent
from privacy.ledger.journal import Journal, canonical
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms, divergence, louder_floor, used_divergence
from privacy.ledger.place import Place

PATIENCE = 600.0
"""Seconds for which a debit waits for another process that debits the same account."""
OWN, TOLD = "ledger", "told"
"""What a debit rests on: a ledger of the owner's own, or what a server says that it committed to."""


@dataclass(frozen=True)
class Debit:
    """One commitment that the account has paid for.

    Attributes:
        run: identity of the run, of its own ledger or of a private sweep.
        what: in the owner's words, a folder's name.
        commitment: digest.
        epsilon, delta: what the commitment states.
        rho: its divergence at the account's order; None with rule ``sum``.
        basis: :data:`OWN` or :data:`TOLD`.
        day: ISO 8601, UTC.
        closed: the run is over for good, and what it did not use is given back: the debit is what it used.
    """

    run: str
    what: str
    commitment: str
    epsilon: float
    delta: float
    rho: float | None
    basis: str
    day: str
    closed: bool = False


class Account:
    """An account held open by one process. Make one with :meth:`create` or :meth:`open`; close it soon."""

    def __init__(self, journal: Journal, place: Place, per_month: float = math.inf) -> None:
        """Replay a verified journal; CorruptRun if its lines break its own rules."""
        self._journal, self._place, self._per_month = journal, place, per_month
        self.debits: dict[str, Debit] = {}
        try:
            first = journal.entries[0]
            if first.kind != "account":
                raise ValueError(f"it begins with {first.kind!r}")
            self.id, self.terms, self.seat = str(first.body["id"]), Terms(**first.body["terms"]), first.body["seat"]
            for entry in journal.entries[1:]:
                self._apply(entry.kind, entry.body)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise CorruptRun(f"{journal.path} is no account, or was never allowed: {error}; restore it") from error

    @classmethod
    def create(cls, path: Path, terms: Terms, place: Path) -> "Account":
        """Open an account, durably; AccountRefused if there is one."""
        if path.exists():
            raise AccountRefused(f"{path} is an account already, which is never overwritten; name another file")
        durable.new_folder(path.parent)
        keeper = Place(place)
        body = {"id": secrets.token_hex(16), "terms": asdict(terms), "seat": keeper.seat()}
        account = cls(Journal.start(path, "account", body, 0o600), keeper)
        account._keep()
        return account

    @classmethod
    def open(
        cls,
        path: Path,
        place: Path,
        per_month: float = math.inf,
        *,
        head: str | None = None,
        read_only: bool = False,
    ) -> "Account":
        """Verify and hold an account, once no other process does.

        Args:
            place: folder of this machine, see the module.
            per_month: the most epsilon, added up, that may be debited in a calendar month (UTC).
            head: kept elsewhere, see :attr:`head`.
            read_only: to look at it, from any machine and without waiting.

        Raises:
            AccountRefused: there is none, it is held by another machine, or another process does not let go of it.
            CorruptRun: it is damaged, or older than this machine or ``head`` has seen it.
        """
        until = time.monotonic() + PATIENCE
        while True:
            try:
                journal = Journal.open(path, head, read_only)
                break
            except FileNotFoundError:
                raise AccountRefused(
                    f"{path}: there is no account; make one (lacquer account create), or restore it if there was one"
                ) from None
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise AccountRefused(f"{path} is held by another process, for {PATIENCE:g} s; end it") from error
                time.sleep(0.05)
        try:
            account = cls(journal, Place(place), per_month)
            if (seen := account._place.head(account.id)) is not None:
                journal.must_contain(seen)
            if not read_only:
                account._refuse_elsewhere()
                account._keep()
        except BaseException:
            journal.close()
            raise
        return account

    @property
    def head(self) -> str:
        """``"LINES:HASH"`` of its last line: whoever keeps it elsewhere can refuse an older copy."""
        return self._journal.head

    @property
    def is_here(self) -> bool:
        """Whether this machine holds the account."""
        return bool(self.seat == self._place.seat())

    @property
    def limits(self) -> dict[str, Decimal]:
        """The sums that debits may come to, by name."""
        names = ("rho",) if self.terms.rule == "renyi" else ("epsilon", "delta")
        return {name: _exact(getattr(self.terms, name)) for name in names}

    @property
    def left(self) -> dict[str, Decimal]:
        """The part of the lifetime that no debit has taken, by the names of the limits."""
        return {
            name: limit - sum((_exact(getattr(debit, name)) for debit in self.debits.values()), Decimal(0))
            for name, limit in self.limits.items()
        }

    @property
    def spent(self) -> tuple[float, float]:
        """Epsilon and delta of all that was debited together."""
        if not self.debits:
            return 0.0, 0.0
        spent = {name: float(limit - self.left[name]) for name, limit in self.limits.items()}
        if self.terms.order is None:
            return spent["epsilon"], spent["delta"]
        return renyi.epsilon_of(spent["rho"], self.terms.order, self.terms.delta), self.terms.delta

    def check(self, *commitments: Commitment) -> None:
        """Refuse what the account does not pay for, all together; nothing is written.

        Raises:
            AccountRefused: in words, with what would fit.
        """
        costs = [self._cost(commitment) for commitment in commitments]
        month = sum(debit.epsilon for debit in self.debits.values() if debit.day[:7] == _today()[:7])
        if month + sum(commitment.epsilon for commitment in commitments) > self._per_month:
            raise AccountRefused(
                f"{self._named()}: its owner allows epsilon {self._per_month:g} a month, of which {month:.4g} is "
                "spent; ask for less, or next month"
            )
        asked, left = {name: sum(cost[name] for cost in costs) for name in self.limits}, self.left
        if all(asked[name] <= left[name] for name in asked):
            return
        runs = "the run asks" if len(costs) == 1 else f"the {len(costs)} runs ask"
        words = ", ".join(
            f"{_NAMES[name]} {float(left[name]):.4g} is left of {float(limit):.4g}, {runs} for {float(asked[name]):.4g}"
            for name, limit in self.limits.items()
        )
        if self.terms.order is not None:
            words += f" at order {self.terms.order}; epsilon {self.spent[0]:.4g} of {self.terms.epsilon:g} is spent"
        raise AccountRefused(f"{self._named()}: {words}; {self._fitting(commitments)}")

    def debit(self, run: str, commitment: Commitment, what: str, *, basis: str = OWN, spent: bool = False) -> bool:
        """Pay for a run's whole commitment, once; durable when this returns. Only then may the run charge anything.

        Args:
            run: the identity of its ledger. All candidates of a private sweep are one event, whatever is given.
            spent: the run has charged something, so it must have been debited.

        Returns:
            whether it was debited now.

        Raises:
            AccountRefused: the account does not pay for it; nothing was written.
            CorruptRun: the run was debited for another commitment, or has spent and was never debited.
        """
        run = commitment.tuning.id if commitment.tuning else run
        digest = _digest(commitment)
        if (known := self.debits.get(run)) is not None:
            if known.commitment != digest:
                raise CorruptRun(f"{self._journal.path} was debited for another commitment of {what}; restore the run")
            if known.closed:
                raise AccountRefused(f"{self._named()}: {what} is closed, and its rest given back; start another run")
            return False
        if spent:
            raise CorruptRun(
                f"{self._journal.path} has no debit of {what}, which has spent: an older copy was put back, or the run "
                "had no account when it began; restore the account"
            )
        self.check(commitment)
        durable.check_room(self._journal.path.parent)
        rho = float(self._cost(commitment)["rho"]) if self.terms.rule == "renyi" else None
        debit = Debit(run, what, digest, commitment.epsilon, commitment.delta, rho, basis, _today())
        entry = self._journal.append("debit", asdict(debit))
        self._apply(entry.kind, entry.body)
        self._keep()
        return True

    def give_back(self, ledger: Ledger, *, ended: bool = False) -> bool:
        """Close a run for good, then give back what its own ledger proves unused; durable when this returns.

        With rule ``renyi`` the debit becomes the divergence of what was charged: a filter adds up releases that were
        made, whatever ended the run. With ``sum`` an epsilon of a part of a run bounds nothing where the end followed
        from what was seen, so a run is given back that charged nothing.

        Args:
            ledger: held, and no older than the run has seen it.
            ended: the run's files are sealed, and nothing resumes it; no line is added to its ledger then.

        Returns:
            whether anything was given back; if not, nothing was written and the run may go on.

        Raises:
            AccountRefused: the account has no debit of it that rests on a ledger of the owner's own.
            CorruptRun: it is debited for another commitment.
        """
        debit = self.debits.get(ledger.run_id)
        if debit is None or debit.basis != OWN:
            raise AccountRefused(
                f"{self._named()}: no debit rests on {ledger.path}; only a ledger proves what is unused"
            )
        if debit.commitment != _digest(ledger.commitment):
            raise CorruptRun(f"{self._journal.path} was debited for another commitment of {ledger.path}; restore it")
        used = dict.fromkeys(("epsilon", "delta"), 0.0) if not ledger.charges else {}
        if debit.rho is not None:
            assert self.terms.order is not None
            used["rho"] = used_divergence(ledger.commitment, ledger.events, self.terms.order)
        if debit.closed or not used or not used.get("rho", 0.0) < (math.inf if debit.rho is None else debit.rho):
            return False
        if not ended:
            ledger.close_for_good()
        entry = self._journal.append("closed", {"run": debit.run, "used": used})
        self._apply(entry.kind, entry.body)
        self._keep()
        return True

    def move(self, seat: str) -> None:
        """Hand the account over to the machine with this seat, and close it here; then its file can be copied there.

        Raises:
            ValueError: that is no seat, or it is this machine's.
        """
        if len(seat) != 64 or set(seat) - set("0123456789abcdef") or seat == self.seat:
            raise ValueError(
                f"--to must be what `lacquer account seat` says on the other machine, got {seat!r}; run it there"
            )
        entry = self._journal.append("moved", {"seat": seat})
        self._apply(entry.kind, entry.body)
        self._keep()

    def close(self) -> None:
        """Let go of the account."""
        self._journal.close()

    def __enter__(self) -> "Account":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _apply(self, kind: str, body: Mapping[str, Any]) -> None:
        match kind:
            case "debit":
                debit = Debit(**body)
                if debit.run in self.debits:
                    raise ValueError(f"{debit.run} is debited twice")
                self.debits[debit.run] = debit
                if any(left < 0 for left in self.left.values()):
                    raise ValueError(f"the debit of {debit.run} exceeds the lifetime")
            case "closed":
                debit, used = self.debits[body["run"]], dict(body["used"])
                if debit.closed or any(not 0.0 <= used[name] <= getattr(debit, name) for name in used):
                    raise ValueError(f"{debit.run} is given back twice, or used more than its debit")
                self.debits[debit.run] = replace(debit, closed=True, **used)
            case "moved":
                self.seat = str(body["seat"])
            case "torn":
                pass
            case _:
                raise ValueError(f"unknown kind of line {kind!r}")

    def _keep(self) -> None:
        self._place.keep_head(self.id, self.head)

    def _refuse_elsewhere(self) -> None:
        if not self.is_here:
            raise AccountRefused(
                f"{self._journal.path} is held by another machine (seat {self.seat[:12]}; this one is "
                f"{self._place.seat()[:12]}): two copies would spend one budget twice. Hand it over there (lacquer "
                f"account move), or restore {self._place.folder}, where this machine keeps its seat"
            )

    def _named(self) -> str:
        return f"account {self._journal.path} ({self.terms.data})"

    def _cost(self, commitment: Commitment) -> dict[str, Decimal]:
        """What the commitment costs, by the names of the limits."""
        terms = self.terms
        if commitment.not_private:
            raise AccountRefused(f"{self._named()}: the run gives no guarantee ({commitment.not_private}); give it one")
        if (commitment.unit, commitment.adjacency) != (terms.unit, terms.adjacency):
            raise AccountRefused(
                f"{self._named()} is for one {terms.unit} ({terms.adjacency}), the run protects one {commitment.unit} "
                f"({commitment.adjacency}), and these do not add up; make an account for that unit"
            )
        if terms.order is None:
            return {"epsilon": _exact(commitment.epsilon), "delta": _exact(commitment.delta)}
        try:
            return {"rho": _exact(divergence(commitment, terms.order))}
        except UnsupportedEvent as error:
            raise AccountRefused(
                f"{self._named()} counts Rényi divergences, of which none is known for this run: {error}; or keep an "
                "account with --rule sum for such runs"
            ) from error

    def _fitting(self, commitments: Sequence[Commitment]) -> str:
        """What would fit, in words; found from commitments and account alone, so as public as they are."""
        first, left = commitments[0], {name: float(rest) / len(commitments) for name, rest in self.left.items()}
        each = "" if len(commitments) == 1 else " for each"
        if min(left.values()) <= 0.0:
            return "no run fits any more: the lifetime of the account is spent"
        if self.terms.order is None:
            fits, delta = min(left["epsilon"], first.epsilon), min(left["delta"], first.delta)
            return f"privacy.epsilon = {_down(fits)} with privacy.delta = {_down(delta)} fits{each}"
        if first.tuning is not None:
            return "a smaller privacy.epsilon, or fewer --tries, may fit"
        if first.order is not None:
            epsilon = renyi.epsilon_of(left["rho"], first.order, first.delta)
        else:
            epsilon = composition.epsilon(
                louder_floor(first, self.terms.order, left["rho"]), first.delta, adjacency=first.adjacency
            )
        if epsilon < 0.01:
            return "nothing useful fits any more"
        return f"privacy.epsilon = {_down(0.999 * epsilon)} fits{each}"


_NAMES = {"rho": "Rényi divergence", "epsilon": "epsilon", "delta": "delta"}


def _digest(commitment: Commitment) -> str:
    """Of what is paid for: of a candidate, the tuning and its target, which all candidates share."""
    body = commitment.to_json()
    if commitment.tuning is not None:
        del body["floor"]
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _exact(value: float) -> Decimal:
    """The number as it is written, so that ten times 0.1 is 1."""
    return Decimal(str(value))


def _down(value: float) -> str:
    """Three significant digits, rounded down."""
    return f"{float(Decimal(str(value)).normalize(Context(prec=3, rounding=ROUND_DOWN))):g}"
