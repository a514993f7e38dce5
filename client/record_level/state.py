"""The state that a site keeps between federated rounds, in a folder of its own: ledger, sampling secret, controller
state.

    ledger.jsonl    what was committed to at the first participation, and every charge since; nothing can make it forget
    sampling.key    the secret that draws batches
    site.json       the settings it was committed to, the calibrated noise, the ledger's head as it was when a round was
                    last answered, and the controller's state (+ .safetensors)
    reading.json    of a deployed site: how its records are read, and what of them is one unit

The ledger alone says how many steps are spent: a process that died between a charge and the writing of the state has
spent them, and continues behind them. A ledger that is gone, or an older copy of it, would pay for those steps again
and draw their batches again; the head tells, and the site takes no part until the folder is restored. The optimizer
starts fresh in every round, as local training does everywhere.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from client.data.local import ReadSettings
from client.record_level.calibration import commit
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.settings import RecordLevelSettings
from client.record_level.units import UnitIndex
from privacy import durable
from privacy.errors import CorruptRun
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At
from privacy.randomness.sampling import CohortSampler
from strategies.state_files import classes_of, pack, unpack

LEDGER, SECRET, STATE, TENSORS = "ledger.jsonl", "sampling.key", "silo.json", "silo.safetensors"
HEAD = "head"
READING = "reading.json"
"""In the folder of a site, which outlives runs; a run's folder has its own (:mod:`server.run_folder.names`)."""


class OtherSite(ValueError):
    """The folder's ledger was committed to other settings or other data; the message can be told to the server."""


@dataclass(frozen=True)
class SiteState:
    """The open folder of a site's state."""

    folder: Path
    ledger: Ledger
    sampler: CohortSampler
    multipliers: tuple[float, ...]

    @property
    def steps(self) -> int:
        """Steps that were charged so far."""
        return sum(event.round > 0 for event in self.ledger.events)

    def put_into(self, training: PrivateSgd) -> None:
        """Make a training that has begun continue where the last round left it."""
        document, tensors = _state(self.folder), self.folder / TENSORS
        if self.steps:
            training.state = replace(training.state, round=self.steps)
        if (packed := document["controller"]) is None:  # nothing was written down yet
            return
        fresh, found = training.state.controller, load_file(tensors) if tensors.is_file() else {}
        controller = unpack(packed, found, classes_of(fresh))
        training.state = replace(training.state, controller=controller)

    def take_from(self, training: PrivateSgd) -> None:
        """Write down where a round left the training."""
        controller, tensors = training.state.controller, dict[str, Tensor]()
        packed = pack(controller, "controller", tensors)
        if tensors:
            with durable.open_replacement(self.folder / TENSORS) as draft:
                save_file(tensors, draft)
        # The head is kept once a round and not at each charge: nothing of a round leaves the site before this is
        # written. Charges behind the head kept last, should a ledger lose them, paid for releases nobody has seen.
        document = _state(self.folder)
        _write(self.folder / STATE, document | {"controller": packed, HEAD: self.ledger.head})


@contextmanager
def site_state(
    folder: Path, site: RecordLevelSettings, index: UnitIndex, account: At | None = None
) -> Iterator[SiteState]:
    """The folder of a site, held by this process; made, and its ledger committed, at the first participation.

    Args:
        account: of the site's records, which pays for the commitment; None where its owner keeps none.

    Raises:
        AccountRefused: the account does not pay.
        OtherSite: it is committed to other settings, or the number of its units has changed since.
        ValueError: no noise keeps the target.
        CorruptRun: ledger, secret or state is missing, not whole, or older than what was seen before.
        BlockingIOError: another process holds the ledger.
    """
    mine = {"silo": json.loads(site.to_json()), "population": len(index)}
    multipliers: tuple[float, ...]
    if _begun(folder):
        document = _state(folder)
        ledger = Ledger.open(folder / LEDGER, document[HEAD] or None)
        debited_ledger(ledger, lambda: ledger, account, ledger.commitment)
    else:
        commitment, multipliers = commit(site, len(index))
        durable.new_folder(folder)
        _write(folder / STATE, {**mine, "multipliers": list(multipliers), "controller": None, HEAD: None})
        CohortSampler.create().save(folder / SECRET)
        ledger = debited_ledger(None, lambda: Ledger.create(folder / LEDGER, commitment), account, commitment)
        document = _state(folder) | {HEAD: ledger.head}
        _write(folder / STATE, document)
    with ledger:
        try:
            multipliers = tuple(map(float, document["multipliers"]))
            secret = CohortSampler.load(folder / SECRET)
        except (OSError, ValueError, TypeError) as error:
            raise CorruptRun(
                f"{folder} has a ledger but not what belongs to it: {error}; restore the folder"
            ) from error
        kept = {name: document[name] for name in mine}
        if kept != mine:
            changed = [name for name in kept["silo"] if kept["silo"][name] != mine["silo"].get(name)]
            changed += ["number of units"] if kept["population"] != mine["population"] else []
            raise OtherSite(f"this site's ledger is committed to other settings ({', '.join(changed)})")
        sampler = CohortSampler.insecure_from_seed(site.seed) if site.seeded else secret
        yield SiteState(folder, ledger, sampler, multipliers)


def site_ledger(folder: Path) -> Ledger:
    """The ledger of a site that has taken part: verified, not older than its state, and open no more.

    Raises:
        CorruptRun: it, its state or its secret is missing or not whole.
    """
    with hold_site_ledger(folder, read_only=True) as ledger:
        return ledger


def hold_site_ledger(folder: Path, *, read_only: bool = False) -> Ledger:
    """Open the ledger of a site that has taken part, as :func:`site_ledger` verifies it.

    Raises:
        BlockingIOError: another process holds it.
    """
    if not _begun(folder):
        raise CorruptRun(f"{folder / LEDGER} is missing, of a site that has taken part; restore it")
    return Ledger.open(folder / LEDGER, _state(folder)[HEAD] or None, read_only=read_only)


def _begun(folder: Path) -> bool:
    """Whether the site has a ledger; False where it never had one.

    Raises:
        CorruptRun: it had one, which is gone.
    """
    if (folder / LEDGER).is_file():
        return True
    left = [name for name in (STATE, SECRET, TENSORS) if (folder / name).is_file()]
    if not left or (STATE in left and _state(folder)[HEAD] is None):  # the first participation died before its ledger
        return False
    raise CorruptRun(
        f"{folder / LEDGER} is missing, though {left[0]} beside it shows that this site has taken part: what it has "
        "spent is unknown. Restore the file; if it is lost, count its whole budget as spent"
    )


def _state(folder: Path) -> dict[str, Any]:
    """The state of a folder; CorruptRun for a file that holds none."""
    path, remedy = folder / STATE, "restore it from a copy that is no older than the ledger"
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; {remedy}") from error
    if not isinstance(document, dict) or not isinstance(document.get("silo"), dict):
        raise CorruptRun(f"{path} must hold a JSON object with the site's settings, it does not; {remedy}")
    if missing := {"population", "multipliers", "controller", HEAD} - document.keys():
        raise CorruptRun(f"{path} lacks {', '.join(sorted(missing))}; {remedy}")
    head = document[HEAD]
    if head is not None and not (isinstance(head, str) and re.fullmatch(r"[1-9]\d*:[0-9a-f]{64}", head)):
        raise CorruptRun(f"{HEAD!r} of {path} must be LINES:HASH of a line of {LEDGER}, got {head!r}; {remedy}")
    return document


def commit_reading(folder: Path, reading: ReadSettings | None, unit: str) -> None:
    """Hold on to the first way of reading that was asked for, before the records are opened.

    How many units there are is public, but under one reading: a server that could change columns, labels,
    ``least-words`` or the unit would learn from what a site refuses how many units have this or that.

    Raises:
        OtherSite: another reading than the first.
        CorruptRun: the file holds none.
    """
    path = folder / READING
    read = {} if reading is None else reading.model_dump(mode="json", exclude={"client_column"})  # a node names none
    mine = {"unit": unit, **read}
    if not path.is_file():
        durable.new_folder(folder)
        _write(path, mine)
        return
    try:
        first = json.loads(path.read_text())
    except ValueError:
        first = None
    if not isinstance(first, dict):
        raise CorruptRun(f"{path} must hold a JSON object, how this site's records are read; restore it")
    if first != mine:
        changed = sorted(name for name in first.keys() | mine.keys() if first.get(name) != mine.get(name))
        raise OtherSite(
            f"this site's records are read as in its first request; {', '.join(changed)} changed. Only its "
            f"operator can allow another reading, by removing {READING} from its folder"
        )


def _write(path: Path, document: dict[str, Any]) -> None:
    durable.write(path, json.dumps(document) + "\n")
