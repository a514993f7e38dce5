"""A run in an experiment tracker: Weights & Biases, MLflow or Trackio.

A tracker is told what the run folder tells everybody: the records of ``metrics.jsonl``, which hold released and public
values only, the settings, and the guarantee. Of paths it is told the last part. What trackers collect by themselves
(load of the host, code, command) is switched off: how busy a host is tells, weakly, how many clients took part. What
was told stands in ``tracking.json`` in the run folder, so a run that is resumed, or sent again, continues in its place.

The tracker's own environment variables say where it keeps things (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``, ...).
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from privacy import durable
from server.config.load import flatten
from server.run_folder.round_record import FURTHER, PHASES
from server.run_folder.telemetry import read_metrics, scalars
from server.run_folder.verify import read_object
from simulations.history.folders import true_state
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import Run, read_run

NOTE_FILE = "tracking.json"
AT_WORK = ("preparing", "running")
_PATH = re.compile(r"(?:^|(?<=:))/(?:[^/:]*/)*")


class Tracker(Protocol):
    """The operations of any tracker on one run."""

    def begin(self, name: str, settings: Mapping[str, str | float | bool], identity: str | None) -> str:
        """Open a run, or go on with the one of that identity; returns its identity."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a round."""
        ...

    def end(self, summary: Mapping[str, str | float | bool], completed: bool) -> None:
        """Close the run, with what is said of all of it."""
        ...


class Wandb:
    """A tracker for Weights & Biases.

    Rounds are an axis of their own: a round that a resumed run does again is no error there.
    """

    def __init__(self, project: str) -> None:
        self._wandb, self._project = _imported("wandb"), project

    def begin(self, name: str, settings: Mapping[str, str | float | bool], identity: str | None) -> str:
        self._run = self._wandb.init(
            project=self._project,
            name=name,
            config=dict(settings),
            id=identity,
            resume="allow",
            reinit="create_new",
            settings={"x_disable_stats": True, "x_disable_meta": True, "disable_git": True, "disable_code": True},
        )
        self._run.define_metric("*", step_metric="round")
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "round": step})

    def end(self, summary: Mapping[str, str | float | bool], completed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if completed else 1)


class Mlflow:
    """A tracker for MLflow; an experiment has the project's name."""

    _BATCH = 100  # most parameters of one call

    def __init__(self, project: str) -> None:
        self._entities, self._project = _imported("mlflow", ".entities"), project
        self._client = _imported("mlflow").MlflowClient()

    def begin(self, name: str, settings: Mapping[str, str | float | bool], identity: str | None) -> str:
        if identity is None:
            found = self._client.get_experiment_by_name(self._project)
            experiment = found.experiment_id if found else self._client.create_experiment(self._project)
            identity = str(self._client.create_run(experiment, run_name=name).info.run_id)
            params = [self._entities.Param(key, str(value)) for key, value in settings.items()]
            for start in range(0, len(params), self._BATCH):
                self._client.log_batch(identity, params=params[start : start + self._BATCH])
        else:
            self._client.update_run(identity, status="RUNNING")
        self._id = identity
        return identity

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, [self._entities.Metric(key, value, now, step) for key, value in values.items()]
        )

    def end(self, summary: Mapping[str, str | float | bool], completed: bool) -> None:
        for key, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, key, value)
            else:
                self._client.log_metric(self._id, key, float(value))
        self._client.set_terminated(self._id, "FINISHED" if completed else "FAILED")


class Trackio:
    """A tracker for Trackio; runs are told apart by their name."""

    def __init__(self, project: str) -> None:
        self._trackio, self._project = _imported("trackio"), project

    def begin(self, name: str, settings: Mapping[str, str | float | bool], identity: str | None) -> str:
        self._run = self._trackio.init(
            project=self._project,
            name=identity or name,
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return identity or name

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self, summary: Mapping[str, str | float | bool], completed: bool) -> None:
        self._run.log({**summary, "completed": completed})
        self._run.finish()


TRACKERS: Mapping[str, Callable[[str], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def open_tracker(name: str) -> Tracker:
    """Open the tracker ``KIND`` or ``KIND:PROJECT``; the project is called lacquer if nothing is said.

    Raises:
        ValueError: there is none of that kind, or its package is not installed.
    """
    kind, _, project = name.partition(":")
    if kind not in TRACKERS:
        raise ValueError(f"tracker must be one of {', '.join(TRACKERS)}, or one of them with :PROJECT, got {name!r}")
    return TRACKERS[kind](project or "lacquer")


def track(folder: Path, name: str, is_alive: Callable[[], bool] | None = None, pause: float = 1.0) -> int:
    """Tell a tracker what it does not know yet of a run, until the run has ended.

    Args:
        name: of the tracker, see :func:`open_tracker`.
        is_alive: whether the run is at work; without it the run folder says so.
        pause: seconds between two looks.

    Returns:
        How many records were told.

    Raises:
        ValueError: as :func:`open_tracker`.
        NoRunFolder: there is no run in the folder.
        CorruptRun: naming a file of it that is damaged or gone.
    """
    tracker, run, note = open_tracker(name), read_run(folder), _note(folder)
    known = note.get(name, {})
    identity = tracker.begin(folder.name, plain_settings(run), known.get("identity"))
    told, last = 0, tuple(known.get("last", (-1, -1)))
    while True:
        alive = is_alive() if is_alive else true_state(read_run(folder)) in AT_WORK
        for record in read_metrics(folder):
            place = (record.round, PHASES.index(record.phase))
            if place > last:
                tracker.log({k: v for k, v in scalars(record).items() if math.isfinite(v)}, record.round)
                told, last = told + 1, place
        note[name] = {"identity": identity, "last": list(last)}
        durable.write(folder / NOTE_FILE, json.dumps(note))
        if not alive:
            break
        time.sleep(pause)
    run = read_run(folder)
    tracker.end(summary(run), true_state(run) in ("completed", "stopped-budget"))
    return told


def plain_settings(run: Run) -> dict[str, str | float | bool]:
    """The settings of a run by dotted key; of absolute paths the last part, since folders name people."""
    values = flatten(run.config.to_table()) if run.config else {}
    return {key: _PATH.sub("", value) if isinstance(value, str) else value for key, value in values.items()}


def summary(run: Run) -> dict[str, str | float | bool]:
    """The summary of a run for a tracker: its state, its guarantee, and what it reached on the test records."""
    pair = guaranteed_pair(run)
    said: dict[str, str | float | bool] = {"state": true_state(run)}
    if pair is not None:
        said |= {"privacy.guaranteed_epsilon": pair[0], "privacy.guaranteed_delta": pair[1]}
    if run.not_private:
        said["NOT PRIVATE"] = run.not_private
    for name in (f"test_{name}" for name in ("accuracy", "loss", *FURTHER)):
        value = run.result(name)
        if value is not None:
            said[name] = value
    return said


def _note(folder: Path) -> dict[str, Any]:
    return read_object(folder / NOTE_FILE) or {}


def _imported(package: str, module: str = "") -> Any:
    try:
        return import_module(package + module)
    except ImportError as error:
        raise ValueError(f"tracker {package} is not installed: pip install {package}") from error
