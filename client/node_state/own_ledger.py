"""A ledger that a party of secure sums keeps for itself, in a folder that outlives rounds, runs and restarts.

    ledger.jsonl    what its federation committed to, and a charge for every vector it handed in, named by its session
    ledger.head     the ledger's head when the last vector was handed in

The server's ledger counts what the server says that it did; this one counts what it got. The head tells of a ledger
that is gone or was put back to an older copy: it would pay for the same budget again.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from privacy import durable
from privacy.errors import CorruptRun
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At
from privacy.secagg.federation import Federation
from privacy.secagg.party import Refused

LEDGER, HEAD = "ledger.jsonl", "ledger.head"
_UNBEGUN = "none yet"


@contextmanager
def own_ledger(folder: Path, federation: Federation, account: At | None = None) -> Iterator[Ledger]:
    """The ledger of a federation's commitment, held by this process; made at the first participation.

    What is charged within the block is remembered at its end, so nothing that was paid for may leave before. The
    account of the party's records, if its owner keeps one, pays for all that the list commits to.

    Raises:
        AccountRefused: the account does not pay.
        Refused: the ledger is of another federation, or of other terms.
        CorruptRun: the ledger is gone, not whole, or older than what was seen before.
        BlockingIOError: another process holds it.
    """
    path, name = folder / LEDGER, federation.digest.hex()
    if path.is_file():
        head = _head(folder)
        ledger = Ledger.open(path, None if head == _UNBEGUN else head)
        debited_ledger(ledger, lambda: ledger, account, ledger.commitment)
    else:
        if (folder / HEAD).exists() and _head(folder) != _UNBEGUN:
            raise CorruptRun(
                f"{path} is gone: how many vectors this party handed in is unknown. Restore it; if it is lost, the "
                "federation's budget counts as spent, and this party joins again by a new list only, whose epsilon adds"
            )
        durable.new_folder(folder)
        durable.write(folder / HEAD, _UNBEGUN + "\n")
        terms = federation.commitment
        ledger = debited_ledger(None, lambda: Ledger.create(path, terms, name), account, terms)
    with ledger:
        if ledger.run_id != name:
            raise Refused(
                "this party's ledger is of another list of a federation; name a folder of its own for every list "
                "(secagg-state): their budgets add up"
            )
        yield ledger
        durable.write(folder / HEAD, ledger.head + "\n")


def _head(folder: Path) -> str:
    path = folder / HEAD
    text = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    if text != _UNBEGUN and not re.fullmatch(r"[1-9]\d*:[0-9a-f]{64}", text):
        raise CorruptRun(f"{path} must hold LINES:HASH of a line of {LEDGER}, it does not; restore it")
    return text
