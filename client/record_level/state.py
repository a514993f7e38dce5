"""What a site keeps between federated rounds, in a folder of its own: ledger, sampling secret, controller state.

    ledger.jsonl    what was committed to at the first participation, and every charge since; nothing can make it forget
    sampling.key    the secret that draws batches
    silo.json       the settings it was committed to, the calibrated noise, and the controller's state (+ .safetensors)
    reading.json    of a deployed site: how its records are read, and what of them is one unit

The ledger alone says how many steps are spent: a process that died between a charge and the writing of the state has
spent them, and continues behind them. The optimizer starts fresh in every round, as local training does everywhere.
"""

import json
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
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from strategies.state_files import classes_of, pack, unpack, upgraded

LEDGER, SECRET, STATE, TENSORS = "ledger.jsonl", "sampling.key", "silo.json", "silo.safetensors"
READING = "reading.json"
"""In the folder of a site, which outlives runs; a run's folder has its own (:mod:`server.run_folder.names`)."""


class OtherSilo(ValueError):
    """The folder's ledger was committed to other settings or other data; the message can be told to the server."""


@dataclass(frozen=True)
class SiloState:
    """An open folder."""

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
        document, tensors = json.loads((self.folder / STATE).read_text()), self.folder / TENSORS
        if self.steps:
            training.state = replace(training.state, round=self.steps)
        if (packed := document["controller"]) is None:  # nothing was written down yet
            return
        fresh, found = training.state.controller, load_file(tensors) if tensors.is_file() else {}
        controller = unpack(upgraded(packed, fresh), found, classes_of(fresh))
        training.state = replace(training.state, controller=controller)

    def take_from(self, training: PrivateSgd) -> None:
        """Write down where a round left the training."""
        controller, tensors = training.state.controller, dict[str, Tensor]()
        packed = pack(controller, "controller", tensors)
        if tensors:
            with durable.replacing(self.folder / TENSORS) as draft:
                save_file(tensors, draft)
        document = json.loads((self.folder / STATE).read_text())
        _write(self.folder / STATE, document | {"controller": packed})


@contextmanager
def silo_state(folder: Path, silo: RecordLevelSettings, index: UnitIndex) -> Iterator[SiloState]:
    """The folder of a site, held by this process; made, and its ledger committed, at the first participation.

    Raises:
        OtherSilo: it is committed to other settings, or the number of its units has changed since.
        ValueError: no noise keeps the target.
        CorruptRun: the ledger or its secret is not whole.
        BlockingIOError: another process holds the ledger.
    """
    mine = {"silo": json.loads(silo.to_json()), "population": len(index)}
    if not (folder / LEDGER).is_file():
        commitment, multipliers = commit(silo, len(index))
        folder.mkdir(parents=True, exist_ok=True)
        CohortSampler.fresh().save(folder / SECRET)
        _write(folder / STATE, {**mine, "multipliers": list(multipliers), "controller": None})
        ledger = Ledger.create(folder / LEDGER, commitment)
    else:
        ledger = Ledger.open(folder / LEDGER)
    with ledger:
        try:
            document: dict[str, Any] = json.loads((folder / STATE).read_text())
            kept = {"silo": document["silo"], "population": document["population"]}
            multipliers = tuple(map(float, document["multipliers"]))
            secret = CohortSampler.load(folder / SECRET)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptRun(
                f"{folder} has a ledger but not what belongs to it: {error}; restore the folder"
            ) from error
        if kept != mine:
            changed = [name for name in kept["silo"] if kept["silo"][name] != mine["silo"].get(name)]
            changed += ["number of units"] if kept["population"] != mine["population"] else []
            raise OtherSilo(f"this site's ledger is committed to other settings ({', '.join(changed)})")
        sampler = CohortSampler.insecure_from_seed(silo.seed) if silo.seeded else secret
        yield SiloState(folder, ledger, sampler, multipliers)


def commit_reading(folder: Path, reading: ReadSettings | None, unit: str) -> None:
    """Hold on to the first way of reading that was asked for, before the records are opened.

    How many units there are is public, but under one reading: a server that could change columns, labels,
    ``least-words`` or the unit would learn from what a site refuses how many units have this or that.

    Raises:
        OtherSilo: another reading than the first.
    """
    path = folder / READING
    read = {} if reading is None else reading.model_dump(mode="json", exclude={"client_column"})  # a node names none
    mine = {"unit": unit, **read}
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, mine)
        return
    first = json.loads(path.read_text())
    if first != mine:
        changed = sorted(name for name in first.keys() | mine.keys() if first.get(name) != mine.get(name))
        raise OtherSilo(
            f"this site's records are read as in its first request; {', '.join(changed)} changed. Only its "
            f"operator can allow another reading, by removing {READING} from its folder"
        )


def _write(path: Path, document: dict[str, Any]) -> None:
    durable.write(path, json.dumps(document) + "\n")
