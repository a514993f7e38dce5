"""The ledger of a private sweep: tuning and training as one event, charged whole before the first candidate begins.

Its first line is commitment and charge in one, since no part of the event can be spent alone: the guarantee, the law of
the number of candidates, the committed steps of every setting, and a seal on what was drawn. The draw stays secret, but
no other can be put in its place: whoever draws again until the outcome pleases has left the theorem. The last line
says which candidate is released, or that none is. There are no times in it, from which one could tell how many ran.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privacy.commitment import Commitment
from privacy.errors import CorruptRun
from privacy.ledger.budget import check_affordable
from privacy.ledger.journal import Journal, canonical


class TuningLedger:
    """The account of one private sweep. Make one with :meth:`charge` or :meth:`open`.

    Attributes:
        commitment: of one of the candidates; all others differ in their floor only.
        statement: the guarantee in words.
        tuning: what is charged, that of the commitment.
        released: the body of the last line, see :meth:`end`; None before the end.
    """

    def __init__(self, journal: Journal) -> None:
        """Replay a verified journal; CorruptRun if its lines break its own rules."""
        self._journal = journal
        kinds = [entry.kind for entry in journal.entries if entry.kind != "torn"]
        if kinds not in (["charge"], ["charge", "released"]):
            raise CorruptRun(f"{journal.path} must hold the charge of a sweep and at most one release, got {kinds}")
        try:
            self.commitment = Commitment.from_json(journal.entries[0].body["commitment"])
            self.statement = str(journal.entries[0].body["statement"])
            self._seal = str(journal.entries[0].body["draw"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptRun(f"{journal.path} line 1 holds no valid charge ({error})") from error
        if self.commitment.tuning is None:
            raise CorruptRun(f"{journal.path} line 1 charges no tuning")
        self.tuning = self.commitment.tuning
        self.released: Mapping[str, Any] | None = next(
            (entry.body for entry in journal.entries if entry.kind == "released"), None
        )

    @classmethod
    def charge(cls, path: Path, commitment: Commitment, statement: str, draw: object) -> "TuningLedger":
        """Charge the whole event; durable when this returns. Only then may a candidate begin.

        Args:
            commitment: of one of the candidates, with its ``tuning``.
            statement: the guarantee in words.
            draw: which candidates there are, plain JSON values with a secret of 128 bits at least among them.

        Raises:
            ValueError: no tuning is committed to, or it costs more than the committed epsilon.
            FileExistsError: there is a ledger already.
        """
        if commitment.tuning is None:
            raise ValueError("commitment must have a tuning, got None; a run by itself has a Ledger")
        check_affordable(commitment)
        body = {"commitment": commitment.to_json(), "statement": statement, "draw": _seal_of(draw)}
        return cls(Journal.start(path, "charge", body))

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> "TuningLedger":
        """Reopen and verify a tuning ledger; CorruptRun, or BlockingIOError if another process holds it."""
        journal = Journal.open(path, read_only=read_only)
        try:
            return cls(journal)
        except BaseException:
            journal.close()
            raise

    def check_draw(self, draw: object) -> None:
        """CorruptRun unless this is what was drawn when the event was charged."""
        if _seal_of(draw) != self._seal:
            raise CorruptRun(
                f"{self._journal.path} was charged for other candidates than are named beside it; restore the draw. "
                "The budget stays spent, and what was not drawn then may not run"
            )

    def end(self, cell: str | None, head: str | None) -> None:
        """Say which candidate is released, by its cell and the head of its own ledger; None for nothing at all.

        Raises:
            ValueError: it was said before.
        """
        if self.released is not None:
            raise ValueError(f"{self._journal.path} has ended; only one candidate of a sweep is ever released")
        self.released = self._journal.append("released", {"cell": cell, "ledger": head}).body

    def close(self) -> None:
        """Release the ledger's lock;"""
        self._journal.close()


def _seal_of(draw: object) -> str:
    return hashlib.sha256(canonical(draw).encode()).hexdigest()
