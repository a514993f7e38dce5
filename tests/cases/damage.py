"""Small runs of every kind, ended and interrupted, what can happen to their files, and commands on them. Not a test."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from click.testing import CliRunner

from privacy.errors import CorruptRun
from server.run_folder import origin, provenance
from server.run_folder.telemetry import Telemetry
from server.runs.phase_config import parse_phases
from simulations import api
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from simulations.history import trackers
from tests.cases.finished_runs import records, settings
from tests.cases.phases import train

KINDS = ("client", "record", "sites", "phases")


class Broken(Exception):
    """What ends a run on its way."""


def make_run(place: Path, kind: str, *, ended: bool) -> Path:
    """A run of three rounds in a folder of its own; one that has not ended is broken off."""
    place.mkdir()
    folder = place / "run"
    folder.mkdir()
    tell, told = Telemetry.round, list[int]()

    def telling(telemetry: Telemetry, record: Any) -> None:
        # The start and one release are told, and of the next there is a checkpoint; phases tell of their end only.
        if not ended and len(told) == (1 if kind == "phases" else 2):
            raise Broken("on its way")
        told.append(record.round)
        tell(telemetry, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Telemetry, "round", telling)
        try:
            _train(place, folder, kind)
        except Broken:
            assert not ended
    return folder


def _train(place: Path, folder: Path, kind: str) -> None:
    task, base = ("causal-lm", "random:llama") if kind in ("client", "phases") else ("classification", "random:bert")
    small: dict[str, Any] = {
        "rounds": 3,
        "model.max-length": 24,
        "evaluation.rouge-records": 0,
        "evaluation.examples": 0,
    }
    small["model.targets"] = "query,value" if task == "classification" else "q_proj"
    if kind == "client":
        run_inprocess(settings(place, task, base, **small, **{"privacy.unit": "client", "clients": 6}), folder)
    elif kind == "record":
        run_inprocess(settings(place, task, base, **small), folder)
    elif kind == "sites":
        sites = {"clients": 2, "site.steps": 1, "site.batch-size": 4}
        run_inprocess(settings(place, task, base, **{**small, **sites}), folder)
    else:
        model = {"name": base, "task": task, "rank": 2, "targets": "q_proj", "max-length": 24}
        source = f"jsonl:{records(place / 'records.jsonl')}"
        data = {"source": source, "text-column": "prompt", "partition": "iid", "validation-records": 8}
        private = {"kind": "private", "name": "dp", "steps": 3, "batch-size": 8, "noise-multiplier": 4.0,
            "controller": "rise-reset"}  # fmt: skip
        table = {
            "privacy": {"epsilon": 9.0, "delta": 1e-3},
            "model": model,
            "data": {**data, "test-records": 6, "cache": str(place / "cache")},
            "phases": [{"kind": "ordinary", "name": "redacted", "text": "redacted", "batch-size": 8}, private],
        }
        train(parse_phases(table), folder)


def delete(path: Path) -> None:
    """The file is gone."""
    path.unlink()


def truncate(path: Path) -> None:
    """Half of the file is left."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    """Bytes in the middle of the file are others."""
    content = bytearray(path.read_bytes())
    start = len(content) // 3
    content[start : start + 24] = bytes(255 - byte for byte in content[start : start + 24])
    path.write_bytes(bytes(content))


def edit(path: Path) -> None:
    """A number in the middle of the file is another; of a file of tensors one byte is."""
    content = path.read_bytes()
    numbers = [match.start() for match in re.finditer(rb"(?<![\w.+-])\d", content)] or [3 * len(content) // 4]
    place = 3 * len(content) // 4 if path.suffix == ".safetensors" else numbers[len(numbers) // 2]
    byte = content[place : place + 1]
    other = str((int(byte) + 1) % 10).encode() if byte.isdigit() else bytes([byte[0] ^ 1])
    path.write_bytes(content[:place] + other + content[place + 1 :])


DAMAGES: tuple[Callable[[Path], None], ...] = (delete, truncate, garble, edit)


@dataclass(frozen=True)
class Outcome:
    """What a command came to: its exit code, what it said, and what it wrote elsewhere."""

    code: int
    output: str
    errors: str
    written: tuple[tuple[str, bytes], ...] = ()

    @property
    def epsilons(self) -> set[str]:
        """Every epsilon that it states."""
        said = self.output + "".join(text.decode(errors="replace") for name, text in self.written if name != "model")
        return set(re.findall(r"(?:epsilon at most |ε ≤ |\"epsilon\": |epsilon: )([\d.]+)", said))


class Told:
    """A tracker that prints what it is told."""

    def __init__(self, project: str) -> None:
        pass

    def begin(self, name: str, settings: Any, identity: str | None) -> str:
        return "1"

    def log(self, values: Any, step: int) -> None:
        print(step, json.dumps(dict(values)))

    def end(self, summary: Any, completed: bool) -> None:
        print(json.dumps(dict(summary)), completed)


COMMANDS = ("api", "export", "budget", "runs", "compare", "predict", "track", "report", "resume")
"""The last one writes what others read."""


def call(command: str, folder: Path, out: Path) -> Outcome:
    """One command on a run folder, in this process; a run that would be resumed only says so."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if command == "api":
        return _in_python(folder)
    further = {
        "export": [str(out / "model")],
        "compare": ["--output", str(out / "compare.html")],
        "predict": ["a text"],
        "track": ["--to", "told"],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(trackers.TRACKERS, "told", Told)  # type: ignore[misc]
        patch.setattr("simulations.cli.app._run", lambda *given, **options: typer.echo("resumed"))
        patch.setattr(origin, "code_version", _code_version)
        result = CliRunner().invoke(_lacquer(), [command, str(folder), *further.get(command, [])])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    written = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    if command == "report" and result.exit_code == 0:
        written["report.html"] = (folder / "report.html").read_bytes()
    return Outcome(result.exit_code, result.stdout, result.stderr, tuple(written.items()))


_CODE: list[dict[str, str]] = []


def _code_version(*given: Any) -> dict[str, str]:
    """The code does not change while a test runs, and reading all of it takes longer than a command."""
    if not _CODE:
        _CODE.append(provenance.code_version(*given))
    return _CODE[0]


@functools.cache
def _lacquer() -> click.Command:
    return typer.main.get_command(app)


def _in_python(folder: Path) -> Outcome:
    try:
        run = api.load_run(folder)
        said = f"epsilon: {run.epsilon} {run.delta} {run.not_private} {run.state} {run.results}\n{run.records}"
        return Outcome(0, said, "")
    except (CorruptRun, ValueError) as error:
        return Outcome(2, "", str(error))
