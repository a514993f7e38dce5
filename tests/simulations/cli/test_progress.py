"""The terminal display: what it prints from recorded runs, on terminals and elsewhere."""

import inspect
import io
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from rich.spinner import Spinner
from typer.testing import CliRunner

from server.config.schema import RunConfig
from server.run_folder.round_record import Presence
from server.run_folder.telemetry import Status, Telemetry
from simulations.cli import progress
from simulations.cli.app import app
from simulations.cli.live_display import Snapshot, display
from simulations.cli.progress import PlainLines, follow, round_line
from tests.cases.recorded_runs import recorded_metrics


def plain(width: int = 80) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=False, width=width), stream


def terminal(width: int = 80, **options: object) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=width, **options), stream  # type: ignore[arg-type]


def shown(snapshot: Snapshot, width: int = 80) -> str:
    console, stream = plain(width)
    console.print(display(snapshot, width))
    return stream.getvalue()


def test_a_recorded_run_becomes_plain_lines(record_run: Callable[..., Path], run_config: RunConfig) -> None:
    console, stream = plain()
    follow(record_run(ledger=False), run_config, lambda: False, console=console)
    assert stream.getvalue().splitlines() == [
        "before round 1  accuracy  50.0%  loss 1.500",
        "round 1/5  accuracy  51.0%  loss 1.000  clip 0.5000  epsilon 0.21/2  20.0 clients/s",
        "round 2/5  accuracy  52.0%  loss 0.5000  clip 0.2500  epsilon 0.41/2  20.0 clients/s",
        "round 3/5  accuracy  53.0%  loss 0.3333  clip 0.1667  epsilon 0.61/2  20.0 clients/s",
        "round 4/5  accuracy  54.0%  loss 0.2500  clip 0.1250  epsilon 0.81/2  20.0 clients/s",
        "round 5/5  accuracy  55.0%  loss 0.2000  clip 0.1000  epsilon 1.01/2  20.0 clients/s",
        "all done",
    ]


def test_a_run_that_says_nothing_new_is_spoken_of_every_five_seconds_and_later_more_rarely(
    run_config: RunConfig,
) -> None:
    console, stream = plain()
    lines, preparing = PlainLines(console), Status("preparing", "first evaluation", 0.0)
    for second in range(23):
        lines.show(Snapshot(run_config, preparing if second > 6 else None, [], float(second)))
    assert stream.getvalue().splitlines() == [
        "waiting for the run to start (5 s)",
        "first evaluation",
        "first evaluation (12 s)",
        "first evaluation (17 s)",
        "first evaluation (22 s)",
    ]
    records = recorded_metrics(1, 5)
    times = []
    for second in range(23, 86_400):
        before = len(stream.getvalue())
        lines.show(Snapshot(run_config, preparing, records, float(second)))
        times += [second] * (len(stream.getvalue()) > before)
    assert all(later - time <= 5 for time, later in pairwise(times) if later < 3600)
    assert all(later - time <= time / 800 + 6 for time, later in pairwise(times))
    assert len(times) < 4000, "a day is no flood"


def test_following_a_run_that_grows_prints_every_line_once(tmp_path: Path, run_config: RunConfig) -> None:
    telemetry = Telemetry(tmp_path, tensorboard=False)
    pending = recorded_metrics(5, 5)

    def is_alive() -> bool:
        if len(pending) == 6:
            telemetry.status("preparing", "starting Ray")
        elif len(pending) == 4:
            telemetry.status("running", "round 3: training")
        telemetry.round(pending.pop(0))
        return bool(pending)

    console, stream = plain()
    follow(tmp_path, run_config, is_alive, console=console, interval=0.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting Ray"
    assert [line.split("  ")[0] for line in lines[1:]] == [f"round {number}/5" for number in range(1, 6)]


def test_a_long_run_prints_few_plain_lines_the_first_and_the_last_among_them(
    tmp_path: Path, run_config: RunConfig
) -> None:
    telemetry = Telemetry(tmp_path, tensorboard=False)
    for item in recorded_metrics(45, 1000):
        telemetry.round(item)
    console, stream = plain()
    follow(tmp_path, run_config, lambda: False, console=console)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/1000", "17/1000", "34/1000"]


def test_a_run_without_a_guarantee_says_so_first_and_shows_no_epsilon(
    record_run: Callable[..., Path], run_config: RunConfig
) -> None:
    console, stream = plain()
    follow(record_run(not_private="noise is off", ledger=False), run_config, lambda: False, console=console)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "NOT PRIVATE: noise is off"
    assert "epsilon" not in stream.getvalue()


def test_a_round_that_was_not_evaluated_leaves_its_columns_out() -> None:
    record = recorded_metrics(1, 5)[1]
    changed = type(record)(**{**vars(record), "validation_loss": None, "validation_accuracy": None})
    assert round_line(changed) == "round 1/5  clip 0.5000  epsilon 0.21/2  20.0 clients/s"
    zero = type(record)(**{**vars(record), "validation_accuracy": 0.0})
    assert "accuracy   0.0%" in round_line(zero)


def test_who_is_missing_stands_in_the_line_and_in_the_display(run_config: RunConfig) -> None:
    said = "2 of 3 contributed; site 1 (clinic): it did not answer in time"
    presence = Presence(3, 3, 2, "site 1 (clinic): it did not answer in time")
    short = replace(recorded_metrics(5, 5)[-1], presence=presence)
    assert round_line(short).endswith(f"clients/s  {said}")
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(display(Snapshot(run_config, None, [short], 5.0), 120))
    assert said[:30] in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_display_shows_round_epsilon_accuracy_clip_speed_and_time_left(run_config: RunConfig) -> None:
    text = shown(Snapshot(run_config, Status("running", "round 4: training", 0.0), recorded_metrics(3, 5), 11.0))
    for expected in ("3 of 5", "0.61 of 2, delta 1e-5", "53.0\u00a0%", "0.1667", "20.0 clients/s", "11 s, 5 s left"):
        assert expected in text
    assert "round 4: training" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("done", [0, 1, 5])
def test_the_display_never_leaves_the_terminal(run_config: RunConfig, width: int, done: int) -> None:
    message = "a very long message " * 12
    metrics = recorded_metrics(done, 5) if done else []
    snapshot = Snapshot(run_config, Status("running", message, 0.0), metrics, 4000.0)
    console, stream = plain(width)
    console.print(display(snapshot, width, Spinner("dots")))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= min(width, 88)
    assert len(lines) <= 16


def test_a_terminal_gets_the_live_display_without_colour_if_asked(
    record_run: Callable[..., Path], run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console, stream = terminal()
    looks = iter([True, True, False])
    follow(record_run(ledger=False), run_config, lambda: next(looks), console=console, interval=0.0)
    text = stream.getvalue()
    assert "5 of 5" in text
    assert "━" in text
    colors = re.findall(r"\x1b\[(?:[0-9]+;)*(?:3[0-9]|4[0-9])(?:;[0-9]+)*m", text)
    assert colors == []


def test_a_dumb_terminal_gets_plain_lines(
    record_run: Callable[..., Path], run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console, stream = terminal()
    follow(record_run(ledger=False), run_config, lambda: False, console=console)
    assert stream.getvalue().startswith("before round 1  accuracy")


SPEAKS_OTHERWISE = {
    "resume": "follows the run as `run` does",
    "follow": "shows the run",
    "logs": "shows the log as it comes",
    "stop": "one request, with its own limit of time",
    "presets": "reads small files of the package",
    "config": "reads one small file",
    "certificates": "makes a few keys",
    "identity": "makes one key",
    "federation": "writes a few files",
    "admit": "one request",
    "expel": "one request",
    "clients": "one request",
}
"""Commands that need no line for their waiting, and why."""


def test_every_command_that_may_last_says_what_it_does() -> None:
    silent = set()
    for command in app.registered_commands:
        assert command.callback is not None
        source = inspect.getsource(command.callback)
        helpers = inspect.getsource(inspect.getmodule(command.callback))  # type: ignore[arg-type]
        if "say_working(" not in source + helpers and "say_waiting(" not in source + helpers:
            silent.add(command.name)
    assert silent == {name for name in SPEAKS_OTHERWISE if name != "resume"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--json"], "looking at this host"),
        (["init", "own.csv"], "reading the records"),
        (["runs", "--json"], "reading the runs"),
        (["budget", "--json"], "composing"),
    ],
)
def test_a_command_that_lasts_speaks_on_standard_error_alone(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    rows = [f'"word {number} of text",{"yes" if number % 2 else "no"},p{number // 3}' for number in range(300)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label,person", *rows]) + "\n")
    quick = CliRunner().invoke(app, words)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    (tmp_path / "own.toml").unlink(missing_ok=True)
    slow = CliRunner().invoke(app, words)
    assert quick.exit_code == slow.exit_code, slow.output
    assert said in slow.stderr
    assert re.sub(r"[\d.]+", "N", slow.stdout) == re.sub(r"[\d.]+", "N", quick.stdout)
