"""The metrics and the status of a run while it runs: metrics.jsonl, TensorBoard, status.json.

They hold released or public values only.

Wall times, which are neither, have a file of their own, times.jsonl, that stays with the run's owner.

What may be in a record, and why nothing else can be: :mod:`server.run_folder.round_record`.
"""

import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

from privacy import durable
from privacy.errors import CorruptRun
from server.run_folder.names import METRICS_FILE, STATUS_FILE, TENSORBOARD_FOLDER, TIMES_FILE
from server.run_folder.round_record import FURTHER, PHASES, RoundRecord

State = Literal["preparing", "running", "completed", "stopped-budget", "failed"]


@dataclass(frozen=True)
class Status:
    """The state of a run: a word for programs, a message for people, the time it was said (seconds since 1970)."""

    state: State
    message: str
    time: float


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, data: float, step: int) -> bool: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Telemetry:
    """A writer of a run's metrics and status into its folder.

    Opening it on the folder of an interrupted run continues the metrics; a last line that was cut off while it was
    written is removed first, since its round's record was never complete.

    Args:
        run_folder: exists already.
        tensorboard: also write TensorBoard scalars to `run_folder/tensorboard`.
    """

    def __init__(self, run_folder: Path, *, tensorboard: bool = True) -> None:
        self._folder = Path(run_folder)
        if not self._folder.is_dir():
            raise ValueError(f"run_folder {self._folder} does not exist; create it before telemetry")
        for path in (self._folder / METRICS_FILE, self._folder / TIMES_FILE):
            if path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._scalars: _ScalarWriter | None = None
        if tensorboard:
            self._open_scalars()

    def round(self, record: RoundRecord) -> None:
        """Append one record to metrics.jsonl and to TensorBoard; a model before round 1 takes the place of another."""
        if not isinstance(record, RoundRecord):
            raise TypeError(f"record must be a RoundRecord, got {type(record).__name__}")
        line = json.dumps(record.to_json(), allow_nan=False)
        if record.phase == "start":  # a run that was killed before its first checkpoint begins once more
            durable.write(self._folder / METRICS_FILE, "")
            (self._folder / TIMES_FILE).unlink(missing_ok=True)
        with (self._folder / TIMES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": record.phase, "round": record.round, "seconds": record.seconds}) + "\n")
        with (self._folder / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._add_scalars(record)

    def rewind(self, round: int) -> list[RoundRecord]:
        """Forget what was recorded after ``round``, for a run that continues from there; returns what is left.

        The model that the run starts from stays.

        TensorBoard files cannot be shortened, so they are written anew from the records that stay.
        """
        kept = [record for record in read_metrics(self._folder) if record.round <= round or record.phase == "start"]
        lines = "".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in kept)
        durable.write(self._folder / METRICS_FILE, lines)
        if self._scalars is not None:
            self.close()
            shutil.rmtree(self._folder / TENSORBOARD_FOLDER, ignore_errors=True)
            self._open_scalars()
            for record in kept:
                self._add_scalars(record)
        return kept

    def records(self) -> tuple[int, str]:
        """The number of records there are, and their digest, see :func:`read_metrics`."""
        text = _text(self._folder / METRICS_FILE)
        return text.count("\n"), _digest(text)

    def _open_scalars(self) -> None:
        from tensorboard.summary import Writer  # half a second of imports that a run without it need not pay

        self._scalars = Writer(str(self._folder / TENSORBOARD_FOLDER))

    def _add_scalars(self, record: RoundRecord) -> None:
        if self._scalars is not None:
            for tag, value in scalars(record).items():
                self._scalars.add_scalar(tag, value, record.round)
            self._scalars.flush()

    def status(self, state: State, message: str) -> None:
        """Replace status.json atomically, so that a reader never sees half of it."""
        if state not in get_args(State):
            raise ValueError(f"state must be one of {', '.join(get_args(State))}, got {state!r}")
        path, text = self._folder / STATUS_FILE, json.dumps(asdict(Status(state, message, time.time())))
        try:
            durable.write(path, text)
        except OSError as error:
            if not durable.full_disk(error, path) or not path.exists():
                raise
            with path.open("r+", encoding="utf-8") as file:  # the place that the last one takes is still there
                file.write(text)
                file.truncate()

    def close(self) -> None:
        """Close the TensorBoard file; calling it twice is fine."""
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def scalars(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record by the names under which TensorBoard and other trackers show them."""
    validation = {
        f"validation/{name}": getattr(record, f"validation_{name}") for name in ("loss", "accuracy", *FURTHER)
    }
    released = {
        "privacy/epsilon_spent": record.epsilon_spent,
        "privacy/noise_multiplier": record.noise_multiplier,
        "update/clip_bound": record.clip_bound,
        "update/released_norm": record.update_norm,
        "update/noise_norm": record.noise_norm,
        "update/signal_estimate": record.signal_estimate,
        "speed/expected_clients_per_second": record.clients_per_second,
        **{f"controller/{name}": value for name, value in record.extra.items()},
    }
    values = validation if record.phase == "start" else {**released, **validation}
    return {tag: value for tag, value in values.items() if value is not None}


def read_metrics(run_folder: Path, seen: tuple[int, str] | None = None) -> list[RoundRecord]:
    """Read the records of a run, in the order of rounds; none if there are none yet.

    A last line that is still being written (or was cut off by a crash) is left out. A round that a resumed run did
    again appears once, as it was last released.

    Args:
        seen: of a checkpoint: how many records there were, and their digest.

    Raises:
        CorruptRun: a complete line is not a record, or records that were there are gone or changed; file and line.
    """
    path = Path(run_folder) / METRICS_FILE
    lines = _text(path).split("\n")[:-1]  # what follows the last newline is not a complete line
    if seen is not None and _digest("".join(f"{line}\n" for line in lines[: seen[0]])) != seen[1]:
        raise CorruptRun(f"{path}: its first {seen[0]} lines are not those that the checkpoint saw; restore it")
    records: dict[tuple[int, str], RoundRecord] = {}
    times = _read_times(Path(run_folder) / TIMES_FILE)
    for number, line in enumerate(lines, start=1):
        try:
            record = RoundRecord.from_json(json.loads(line))
            if (record.round, record.phase) in times:
                record = replace(record, seconds=times[record.round, record.phase])
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptRun(f"{path} line {number} is not a round record: {error}; restore it") from error
        records[record.round, record.phase] = record
    return [records[key] for key in sorted(records, key=lambda key: (key[0], PHASES.index(records[key].phase)))]


def _read_times(path: Path) -> dict[tuple[int, str], float]:
    """Read wall seconds by round and phase; of a round that was held again, the last."""
    times: dict[tuple[int, str], float] = {}
    for number, line in enumerate(_text(path).split("\n")[:-1], start=1):
        try:
            values = json.loads(line)
            times[int(values["round"]), str(values["phase"])] = float(values["seconds"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptRun(f"{path} line {number} holds no time of a round: {error}; delete the file") from error
    return times


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_status(run_folder: Path) -> Status | None:
    """Read what the run last said about itself; None before it said anything.

    Raises:
        CorruptRun: if status.json is not a status.
    """
    path = Path(run_folder) / STATUS_FILE
    if not path.is_file():
        return None
    try:
        status = Status(**json.loads(path.read_text(encoding="utf-8")))
        if status.state not in get_args(State):
            raise ValueError(f"its state must be one of {', '.join(get_args(State))}, got {status.state!r}")
        return status
    except (ValueError, TypeError) as error:
        raise CorruptRun(f"{path} is not a status: {error}; restore it") from error
