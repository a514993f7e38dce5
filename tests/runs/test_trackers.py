"""Runs in experiment trackers: what is told, once, in order, and never more than the run folder tells everybody."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from server.config.load import parse
from server.run_folder.telemetry import Telemetry
from simulations.cli.app import app
from simulations.cli.history.track import track_beside
from simulations.history import trackers
from simulations.history.trackers import open_tracker, plain_settings, track
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import read_run
from tests.cases.recorded_runs import CONFIG, recorded_metrics


@dataclass
class Remembering:
    """A tracker that keeps what it is told."""

    project: str
    begun: list[tuple[str, str | None]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    told: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    ended: list[tuple[Mapping[str, Any], bool]] = field(default_factory=list)

    def begin(self, name: str, settings: Mapping[str, Any], identity: str | None) -> str:
        self.begun.append((name, identity))
        self.settings = settings
        return identity or "run-7"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.told.append((step, values))

    def end(self, summary: Mapping[str, Any], completed: bool) -> None:
        self.ended.append((summary, completed))


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    made = Remembering("")
    monkeypatch.setattr(trackers, "TRACKERS", {"memory": lambda project: made})
    return made


def test_every_record_is_told_once_and_the_guarantee_at_the_end(
    record_run: Callable[..., Path], tracker: Remembering
) -> None:
    folder = record_run()
    assert track(folder, "memory") == 7
    assert [step for step, _ in tracker.told] == [0, 0, 1, 2, 3, 4, 5]
    assert tracker.told[0][1]["validation/accuracy"] == 0.5
    assert tracker.told[1][1]["privacy/epsilon_spent"] == 0.125
    assert tracker.told[4][1]["controller/ratio"] == 0.75
    summary, completed = tracker.ended[0]
    assert completed
    assert summary["privacy.guaranteed_epsilon"] == guaranteed_pair(read_run(folder))[0] == 0.6064
    assert summary["test_accuracy"] == 0.8125
    assert tracker.settings["privacy.epsilon"] == 2.0
    assert track(folder, "memory") == 0
    assert tracker.begun == [(folder.name, None), (folder.name, "run-7")]


def test_the_command_says_how_much_it_sent_also_to_programs(
    record_run: Callable[..., Path], tracker: Remembering
) -> None:
    folder = str(record_run())
    said = CliRunner().invoke(app, ["track", folder, "--to", "memory", "--json"]).stdout
    assert json.loads(said) == {"folder": folder, "tracker": "memory", "records_sent": 7}
    assert "0 new records sent to memory" in CliRunner().invoke(app, ["track", folder, "--to", "memory"]).stdout


def test_a_run_is_followed_until_it_ends_and_a_resumed_one_goes_on_in_its_place(
    record_run: Callable[..., Path], tracker: Remembering
) -> None:
    folder, records = record_run(done=2, state="running"), recorded_metrics(5, 5)[1:]
    left = iter(records[2:4])

    def alive() -> bool:
        record = next(left, None)
        if record is not None:
            with Telemetry(folder, tensorboard=False) as telemetry:
                telemetry.round(record)
        return record is not None

    assert track(folder, "memory", alive, pause=0.0) == 6
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.round(records[4])
    assert track(folder, "memory", lambda: False) == 1
    assert [step for step, _ in tracker.told] == [0, 0, 1, 2, 3, 4, 5]
    assert [identity for _, identity in tracker.begun] == [None, "run-7"]
    assert [completed for _, completed in tracker.ended] == [False, False]


def test_a_run_without_a_guarantee_says_so(record_run: Callable[..., Path], tracker: Remembering) -> None:
    track(record_run(not_private="noise is switched off"), "memory")
    assert tracker.ended[0][0]["NOT PRIVATE"] == "noise is switched off"
    assert "privacy.guaranteed_epsilon" not in tracker.ended[0][0]


def test_of_absolute_paths_the_last_part_is_told(record_run: Callable[..., Path]) -> None:
    folder = record_run()
    given = {"source": "parquet:/home/jane doe/notes/train.parquet", "cache": "/home/jane/.cache/lacquer"}
    (folder / "config.toml").write_text(parse({**CONFIG.to_table(), "data": given, "name": "a/b"}).to_toml())
    told = plain_settings(read_run(folder))
    assert told["data.source"] == "parquet:train.parquet"
    assert told["data.cache"] == "lacquer"
    assert told["name"] == "a/b"
    assert not [value for value in told.values() if "jane" in str(value)]


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_before_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name, message in (("comet", "must be one of wandb, mlflow, trackio"), ("wandb:mine", "pip install wandb")):
        done = CliRunner().invoke(app, ["run", "quickstart", "--track", name])
        assert done.exit_code == 2
        assert message in done.output
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_fails_leaves_the_run_alone(
    record_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(project: str) -> Remembering:
        raise ConnectionError("the host does not answer")

    monkeypatch.setattr(trackers, "TRACKERS", {"memory": broken})
    folder = record_run()
    with track_beside(folder, "memory", lambda: False):
        pass
    said = capsys.readouterr().err
    assert "ConnectionError: the host does not answer" in said
    assert f"lacquer track {folder} --to memory" in said


def test_what_each_tracker_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def named(name: str) -> Callable[..., Any]:
        return lambda *given, **keys: calls.append((name, *given, *sorted(keys.items())))

    run = SimpleNamespace(id="abc", log=named("log"), finish=named("finish"), define_metric=named("define"), summary={})
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: f"experiment {name}",
        create_run=lambda experiment, run_name: SimpleNamespace(
            info=SimpleNamespace(run_id=f"{run_name} in {experiment}")
        ),
        log_batch=named("batch"),
        set_tag=named("tag"),
        log_metric=named("metric"),
        set_terminated=named("end"),
    )
    entities = SimpleNamespace(Param=lambda *pair: pair, Metric=lambda key, value, now, step: (key, value, step))
    started = lambda **keys: calls.append(("init", keys["project"], keys["name"])) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=started))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=started))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)

    def sent(name: str) -> tuple[str, list[tuple[Any, ...]]]:
        calls.clear()
        tracker = open_tracker(name)
        identity = tracker.begin("small-1", {"rounds": 5}, None)
        tracker.log({"loss": 0.5}, 3)
        tracker.end({"state": "completed", "test_loss": 0.25}, True)
        return identity, list(calls)

    assert sent("wandb:mine") == (
        "abc",
        [
            ("init", "mine", "small-1"),
            ("define", "*", ("step_metric", "round")),
            ("log", {"loss": 0.5, "round": 3}),
            ("finish", ("exit_code", 0)),
        ],
    )
    assert run.summary == {"state": "completed", "test_loss": 0.25}
    assert sent("trackio") == (
        "small-1",
        [
            ("init", "lacquer", "small-1"),
            ("log", {"loss": 0.5}, ("step", 3)),
            ("log", {"state": "completed", "test_loss": 0.25, "completed": True}),
            ("finish",),
        ],
    )
    place = "small-1 in experiment mine"
    assert sent("mlflow:mine") == (
        place,
        [
            ("batch", place, ("params", [("rounds", "5")])),
            ("batch", place, [("loss", 0.5, 3)]),
            ("tag", place, "state", "completed"),
            ("metric", place, "test_loss", 0.25),
            ("end", place, "FINISHED"),
        ],
    )
