"""Checkpoints: the server's state after a release, written whole or not at all, and the position of the ledger.

    checkpoint/state.safetensors    adapter, served adapter, tensors of optimizer, controller and subspace, the release
    checkpoint/state.json           everything else: round, controller state, ledger head; digests of the tensors, the
                                    records of the rounds before, and itself

One is written as soon as a release is made, before anything else can fail: it holds the release itself and the
controller's state from before it. What follows a release (validation, the controller's update) depends on the release
and on public data only, so a resumed run does it again, with the validation loss of metrics.jsonl if it is there.

Nothing is pickled. The folder is made beside the old one and renamed over it, so that a reader finds the old or the new
one. The ledger's head is in it, so that a ledger restored from an older backup is noticed.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from privacy import durable
from privacy.durable import sync
from privacy.errors import CorruptRun
from privacy.mechanism import Release
from server.run_folder.names import CHECKPOINT_FOLDER, SAMPLING_SECRET
from strategies.server_update import ServerState
from strategies.state_files import classes_of, pack, unpack

FORMAT = 3
_TENSORS, _DOCUMENT = "state.safetensors", "state.json"
_TRIES = 3


@dataclass(frozen=True)
class Times:
    """Seconds that a run has taken up to a release.

    Attributes:
        run: wall time of the run.
        round: wall time of its last round.
        processor: processor time, where it is counted.
    """

    run: float = 0.0
    round: float = 0.0
    processor: float = 0.0


class Stopwatch:
    """Time that a run, or a phase of it, has taken: since this was made, and before it was interrupted.

    Attributes:
        before: what it had taken when it was interrupted.
    """

    def __init__(self) -> None:
        self.before = Times()
        self._started = time.monotonic(), time.process_time()

    def times(self) -> Times:
        """The time taken up to now."""
        wall, processor = self._started
        return Times(
            run=self.before.run + time.monotonic() - wall,
            processor=self.before.processor + time.process_time() - processor,
        )


@dataclass(frozen=True)
class Checkpoint:
    """The state that a run is resumed from.

    Attributes:
        state: after the last release, before the controller heard of it; after ``begin`` if there was none.
        update: float32 ``[d]`` of that release, None before the first.
        records: how many records of rounds there were, and their digest; None where nobody counted.
    """

    state: ServerState
    update: Tensor | None
    answers: tuple[Tensor, ...]
    ledger_head: str
    taken: Times = Times()
    records: tuple[int, str] | None = None

    @staticmethod
    def after(
        state: ServerState,
        release: Release | None,
        ledger_head: str,
        taken: Times,
        records: tuple[int, str] | None = None,
    ) -> "Checkpoint":
        """Make the checkpoint of a strategy's state and its last release; ``release`` is None before the first."""
        update, answers = (None, ()) if release is None else (release.update, release.answers)
        return Checkpoint(state, update, answers, ledger_head, taken, records)


@dataclass(frozen=True)
class Mark:
    """A note of the last checkpoint on the files beside it.

    Attributes:
        ledger_head: of the ledger.
        records: how many records of rounds there were, and their digest; None where nobody counted.
        secret: digest of the file with the secret that draws cohorts; None where there was none.
    """

    ledger_head: str
    records: tuple[int, str] | None
    secret: str | None

    def check_secret(self, path: Path) -> None:
        """Refuse a secret for drawing cohorts that is not the one the checkpoint saw.

        Raises:
            CorruptRun: ``path`` is missing, or is another file.
        """
        if self.secret is not None and (not path.is_file() or _digest(path) != self.secret):
            state = "is not the secret that has drawn so far" if path.is_file() else "is missing"
            raise CorruptRun(f"{path} {state}: other cohorts would be drawn than were; restore it")


def save_checkpoint(run_folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint of a run; a crash at any moment leaves the previous one or this one.

    Raises:
        TypeError: the controller's state holds something that has no place in a checkpoint.
    """
    target, old = _places(run_folder)
    draft = run_folder / f".{CHECKPOINT_FOLDER}.new"
    tensors: dict[str, Tensor] = {}
    state = {
        name: pack(value, name, tensors)
        for name, value in vars(checkpoint.state).items()  # flat names: "adapter", "optimizer.momentum"
    }
    release = {
        "update": pack(checkpoint.update, "release.update", tensors),
        "answers": pack(checkpoint.answers, "release.answers", tensors),
    }
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file(_apart(tensors), draft / _TENSORS)
    document = {
        "format": FORMAT,
        "round": checkpoint.state.round,
        "state": state,
        "release": release,
        "ledger_head": checkpoint.ledger_head,
        "seconds": asdict(checkpoint.taken),
        "tensors_sha256": _digest(draft / _TENSORS),
        "records": checkpoint.records,
        "secret_sha256": _digest(secret) if (secret := run_folder / SAMPLING_SECRET).is_file() else None,
    }
    document["sha256"] = _own_digest(document)
    (draft / _DOCUMENT).write_text(json.dumps(document, indent=1))
    for path in (*draft.iterdir(), draft):
        sync(path)
    if target.exists():  # else the only checkpoint may be the old one: a crash fell between the two renames
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    draft.rename(target)
    sync(run_folder)
    shutil.rmtree(old, ignore_errors=True)


def check_room(run_folder: Path) -> None:
    """Refuse to go on where the disk has no room for the next checkpoint.

    A release adds its update to what the last checkpoint holds, and a controller or an optimizer its first state.

    Raises:
        OSError: there is too little room.
    """
    last = checkpoint_folder(run_folder)
    durable.check_room(run_folder, 3 * sum(file.stat().st_size for file in last.iterdir()) if last else 0)


def load_checkpoint(run_folder: Path, fresh: ServerState) -> Checkpoint:
    """Load the last checkpoint of a run.

    Args:
        fresh: a state as at the start of the same run; it gives types and shapes.

    Raises:
        CorruptRun: there is no checkpoint, it is damaged, or it is not of this run.
    """
    folder = checkpoint_folder(run_folder)
    if folder is None:
        raise CorruptRun(f"{run_folder / CHECKPOINT_FOLDER} is missing: the run has no checkpoint; restore the folder")
    document = _document(folder)
    try:
        tensors, classes = load_file(folder / _TENSORS), classes_of(fresh)
        state = ServerState(**{name: unpack(part, tensors, classes) for name, part in document["state"].items()})
        update, answers = (unpack(document["release"][name], tensors, {}) for name in ("update", "answers"))
        taken = Times(**{name: float(seconds) for name, seconds in document["seconds"].items()})
        checkpoint = Checkpoint(state, update, tuple(answers), str(document["ledger_head"]), taken)
        _check(checkpoint, fresh)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRun(f"{folder} is not a checkpoint of this run: {type(error).__name__}: {error}") from error
    return checkpoint


def _document(folder: Path) -> dict[str, Any]:
    """Read the content of state.json, whose digest of the tensors beside it must hold.

    Raises:
        CorruptRun: naming the file that is missing or was changed.
    """
    for _ in range(_TRIES):
        try:
            document = dict(json.loads((folder / _DOCUMENT).read_text()))
            if document["format"] != FORMAT:
                raise ValueError(f"it has format {document['format']!r}, this code reads {FORMAT}")
            if document.pop("sha256", None) not in (None, _own_digest(document)):
                raise ValueError("its digest is not that of its content")
            whole = _digest(folder / _TENSORS) == document["tensors_sha256"]
            break
        except FileNotFoundError as error:  # a run at work may be putting the next one in its place
            problem: Exception = error
            time.sleep(0.05)
        except (OSError, ValueError, KeyError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise CorruptRun(f"{folder / _DOCUMENT} is not a checkpoint of this run: {said}; restore it") from error
    else:
        missing = _TENSORS if (folder / _DOCUMENT).is_file() else _DOCUMENT
        raise CorruptRun(
            f"{folder / missing} is missing, so this is not a checkpoint of this run; restore it"
        ) from problem
    if not whole:
        what = f"it is not the file that was written with {_DOCUMENT}"
        raise CorruptRun(f"{folder / _TENSORS} is not a checkpoint of this run: {what}; restore it")
    return document


def _own_digest(document: Mapping[str, Any]) -> str:
    """The digest of everything else in state.json, as it will be read back."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(document)), sort_keys=True).encode()).hexdigest()


def checkpoint_folder(run_folder: Path) -> Path | None:
    """The folder of a run's last checkpoint; None if there is none."""
    return next((place for place in _places(run_folder) if place.is_dir()), None)


def _places(run_folder: Path) -> tuple[Path, Path]:
    """The folder of the checkpoint, and of the one before for as long as it is being replaced."""
    return run_folder / CHECKPOINT_FOLDER, run_folder / f".{CHECKPOINT_FOLDER}.old"


def read_mark(run_folder: Path) -> Mark | None:
    """Read what the last checkpoint saw of the files beside it; None if there is no checkpoint.

    Raises:
        CorruptRun: it cannot be read, or its tensors are not those that were written with it.
    """
    folder = checkpoint_folder(run_folder)
    if folder is None:
        return None
    document = _document(folder)
    try:
        head, records = str(document["ledger_head"]), document.get("records")
        records = None if records is None else (int(records[0]), str(records[1]))
        return Mark(head, records, document.get("secret_sha256"))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRun(f"{folder / _DOCUMENT} is not a checkpoint of this run: {error!r}; restore it") from error


def _check(checkpoint: Checkpoint, fresh: ServerState) -> None:
    state = checkpoint.state
    if type(state.round) is not int:
        raise TypeError(f"round must be an integer, got {state.round!r}")
    if type(state.controller) is not type(fresh.controller):
        raise TypeError("the controller's state is that of another controller")
    if (found := _shapes(state)) != (expected := _shapes(fresh)):
        raise ValueError(f"it is of another run: it holds {found}, this run has {expected}")


def _shapes(state: ServerState) -> dict[str, str]:
    tensors = {"adapter": state.adapter, "served": state.served}
    shapes = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
    return shapes | {"optimizer": str(sorted(state.optimizer))}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that are contiguous and share no memory, as safetensors wants them.

    The served adapter may be the adapter.
    """
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        mine = tensor.detach().cpu().contiguous()
        apart[name] = mine.clone() if mine.untyped_storage().data_ptr() in seen else mine
        seen.add(mine.untyped_storage().data_ptr())
    return apart


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
