"""What a published run tells: of two worlds that differ in one person, nothing but what noisy releases do.

The channel that the guarantee covers is the noisy sum. Here it is cut, by putting noise of a known key in the sum's
place: whatever still differs between the folders of two worlds has left on another way.
"""

import hashlib
import html
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main
from click.testing import CliRunner
from torch import Tensor

from client.record_level.dp_sgd import PrivateSgd
from client.worker import Worker
from privacy import mechanism
from privacy.errors import CorruptRun
from server.config.load import flatten, unflatten
from server.config.schema import RunConfig
from server.evaluation.finished import read_finished
from server.evaluation.published import CannotPublish, publish
from server.run_folder.names import new_run_folder
from server.run_folder.verify import verify_run
from server.runs.phase_config import parse_phases
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from simulations.sweep import candidates
from tests.cases.damage import make_run
from tests.cases.finished_runs import settings
from tests.cases.phases import train as run_phases
from tests.cases.sweeps import BROKEN, HELD, RunSweep
from tests.runs.test_private_sweep import SWEEP

COMMAND = typer.main.get_command(app)
PERSON = "person 7"
"""Whose records differ between the worlds."""
WORLDS: dict[str, str] = {
    "enormous": "a text of many words " * 400,
    "another script": "痛み止めを飲みましたか？ هل تناولت الدواء؟",
    "malformed": "\u200b\u202e\x07 {'role': 'user'} [SEP] </s> \ud7ff",
    "one character": "a",
    "slow": "an ordinary text",
    "raising": "an ordinary text",
}
KINDS: dict[str, dict[str, Any]] = {
    "clients, classification": {"task": "classification", "unit": "client"},
    "clients, language model": {"task": "causal-lm", "unit": "client"},
    "clients, chat": {"task": "instruction", "unit": "client"},
    "clients, preferences": {"task": "preference", "unit": "client"},
    "records, language model": {"task": "causal-lm", "unit": "record"},
    "records, classification": {"task": "classification", "unit": "record"},
    "clients, evaluated in private": {
        "task": "classification",
        "unit": "client",
        "evaluation.data": "private",
        "evaluation.held-out": 0.845,  # number 3 is held out
        "evaluation.keep": "best",
    },
    "sites": {"task": "classification", "unit": "record", "clients": 2, "site.batch-size": 8, "site.steps": 2},
    "secure sums": {
        "task": "classification",
        "unit": "client",
        "sampling-rate": 1.0,
        "privacy.trust": "secagg",
        "privacy.mode": "filter",
        "privacy.noise": "discrete",
        "simulation.clients-per-node": 1,
    },
    "phases": {"task": "causal-lm", "privacy.epsilon": 10.0},
}
PHASES = [
    {"kind": "private", "name": "level", "steps": 2, "batch-size": 16, "noise-multiplier": 3.0},
    {"kind": "private", "name": "rising", "steps": 2, "batch-size": 16, "controller": "rise-reset"},
]
WHOLE = ("clients, classification", "records, language model")
"""Kinds that are tried in every world."""


def write_records(path: Path, said: str) -> Path:
    """Records of twenty people, two each; the texts of one of them are ``said``."""
    rows = []
    for number in range(40):
        person = f"person {number // 2}"
        text = f"{'ab'[number % 2] * 4} number {number}?" if person != PERSON else f"{said} {number}"
        answers = {"completion": "Yes." * (1 + number % 3), "chosen": f"Yes, {text}", "rejected": f"No, {text}"}
        rows.append({"who": person, "prompt": text, **answers, "side": number % 2})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_public_records(path: Path) -> Path:
    answers = {"completion": "No.", "chosen": "Yes.", "rejected": "No."}
    rows = [{"who": "nobody", "prompt": f"public {n}?", **answers, "side": n % 2} for n in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def cut_channel(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Releases of known noise alone, known cohorts and names; called, they begin once more."""
    numbers = itertools.count()

    def again() -> None:
        nonlocal numbers
        numbers = itertools.count()

    def known(size: int = 32) -> bytes:
        return hashlib.sha256(b"world %d" % next(numbers)).digest()[:size]

    decoded = mechanism.decode_release

    def without_data(noisy: Tensor, *rest: Any, **named: Any) -> mechanism.Release:
        drawn = torch.randn(len(noisy), generator=torch.Generator().manual_seed(next(numbers)), dtype=noisy.dtype)
        return decoded(drawn, *rest, **named)

    monkeypatch.setattr(mechanism, "decode_release", without_data)
    monkeypatch.setattr("privacy.randomness.sampling.secrets", SimpleNamespace(token_bytes=known))
    monkeypatch.setattr("privacy.ledger.ledger.uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32)))
    return again


def behave_badly(world: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Work on the unit of number 3 is slow, or raises; how often it was worked on."""
    worked = []

    def behaving(work: Callable[..., Any], units: Callable[..., Any]) -> Callable[..., Any]:
        def worked_on(self: Any, *given: Any) -> Any:
            if 3 in units(*given):
                worked.append(3)
                if world == "raising":
                    raise RuntimeError("this unit cannot be trained on")
                time.sleep(0.2)
            return work(self, *given)

        return worked_on

    if world in ("slow", "raising"):
        monkeypatch.setattr(Worker, "_sum", behaving(Worker._sum, lambda request: request.clients))
        monkeypatch.setattr(PrivateSgd, "rows", behaving(PrivateSgd.rows, lambda batch, planned: batch))
    return worked


def train(place: Path, kind: str, said: str) -> Path:
    """The folder of a run on the records of a world."""
    place.mkdir()
    how = dict(KINDS[kind])
    task, unit = how.pop("task"), how.pop("unit", "record")
    write_records(place / "people.jsonl", said)
    public = write_public_records(place / "public.jsonl")
    people = {"data.client-column": "who", "data.partition": "natural", "clients": 16, "sampling-rate": 0.5}
    records = {"clients": 1, "data.client-column": "", "site.batch-size": 16}
    changed = {
        "privacy.unit": unit,
        "privacy.epsilon": 20.0,
        "data.cache": str(place / "cache"),
        "data.source": f"jsonl:{place / 'people.jsonl'}",
        "data.test-source": f"jsonl:{public}",
        "data.validation-records": 8,
        "model.targets": "query,value" if task == "classification" else "q_proj",
        "model.max-length": 24,
        "rounds": 3,
        **(people if unit == "client" else records),
        **how,
    }
    base = "random:bert" if task == "classification" else "random:llama"
    folder = place / "run"
    folder.mkdir()
    config = settings(place, task, base, **changed)
    if kind == "phases":
        read_by_phases = ("model", "data", "privacy.epsilon", "privacy.delta", "evaluation.")
        table = {key: value for key, value in flatten(config.to_table()).items() if key.startswith(read_by_phases)}
        run_phases(parse_phases({**unflatten(table), "phases": PHASES}), folder)
    else:
        run_inprocess(config, folder)
    return folder


def content(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Of every file its time, its permissions and a digest."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_mode, digest(path))
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "secure sums")) for kind in KINDS]
)
def test_what_is_published_differs_between_worlds_by_noisy_releases_only(
    kind: str, tmp_path: Path, cut_channel: Callable[[], None]
) -> None:
    def world(name: str, said: str) -> dict[str, tuple[int, int, str]]:
        cut_channel()
        run = read_finished(train(tmp_path / name, kind, said))
        publish(run, made(tmp_path / f"published {name}"))
        assert verify_run(tmp_path / f"published {name}").statement() == run.statement
        return content(tmp_path / f"published {name}")

    one = world("one", "an ordinary text")
    for name in WORLDS if kind in WHOLE else ("enormous", "raising"):
        with pytest.MonkeyPatch.context() as patch:
            worked = behave_badly(name, patch)
            other = world(name, WORLDS[name])
        assert one == other, name
        assert worked or name not in ("slow", "raising")
    assert content(tmp_path / "one" / "run") != content(tmp_path / "enormous" / "run"), "the worlds are the same"


@pytest.mark.nightly  # one to three minutes
def test_a_private_sweep_does_not_tell_how_many_it_tried(
    run_sweep: RunSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_channel: Callable[[], None]
) -> None:
    """The same run is released, alone or as the second of two."""
    (tmp_path / "tiny.toml").write_text(SWEEP)
    (tmp_path / "own_held.py").write_text(BROKEN.replace(*HELD))
    monkeypatch.setattr("simulations.sweep.tuning.uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32)))

    def run_here(cells: Any, folder_of: Any, jobs: int, plugins: Path, started: Any, ended: Any, look: Any) -> None:
        for cell in cells:
            cut_channel()
            known = SimpleNamespace(hex=f"{cell.variant:0<32}")
            monkeypatch.setattr("privacy.ledger.ledger.uuid", SimpleNamespace(uuid4=lambda known=known: known))
            run_inprocess(cell.config, folder_of(cell))

    def is_fixed(folder: Path) -> tuple[float, float]:
        return (float("g/fixed" in (folder / "cell.json").read_text()), 0.0)

    monkeypatch.setattr(candidates, "run_cells", run_here)
    monkeypatch.setattr(candidates, "_score", is_fixed)
    worlds = []
    for drawn in ([0], [1, 0]):
        monkeypatch.setattr(candidates, "draw", lambda tries, cells, drawn=drawn: drawn)
        output = tmp_path / f"of {len(drawn)}"
        code, said = run_sweep(
            "--private", "--only", "g/fixed", "--only", "g/held", "--tries", "2", "--output", str(output)
        )
        assert code == 0, said
        (folder,) = {path.parent for path in output.rglob("tuning.jsonl")}
        publish(read_finished(folder / "chosen"), made(tmp_path / f"published {len(drawn)}"))
        own = {str(path.relative_to(folder)): path.stat() for path in [folder, *folder.rglob("*")]}
        assert max(found.st_mtime for found in own.values()) - min(found.st_mtime for found in own.values()) < 0.2
        names = {name: found.st_mode for name, found in own.items() if "events.out" not in name}
        worlds.append((content(tmp_path / f"published {len(drawn)}"), names))
    assert worlds[0] == worlds[1]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("published") / "place", "client", ended=True)


def published(run_folder: Path, place: Path) -> tuple[Path, str]:
    done = CliRunner().invoke(COMMAND, ["publish", str(run_folder), str(place)])
    return place, done.output + done.stderr


def test_a_published_run_is_verified_as_the_run_itself(run_folder: Path, tmp_path: Path) -> None:
    folder, said = published(run_folder, tmp_path / "given")
    assert said.strip() == str(folder)
    assert verify_run(folder).statement() == read_finished(run_folder).statement
    assert {path.name for path in folder.iterdir()} == {
        "PUBLISHED.md", "adapter", "config.toml", "files.sha256", "ledger.jsonl", "metrics.jsonl", "privacy.json",
        "results.json",
    }  # fmt: skip
    report = CliRunner().invoke(COMMAND, ["report", str(folder)])
    assert report.exit_code == 0, report.output
    assert read_finished(run_folder).statement["sentence"] in html.unescape((folder / "report.html").read_text())
    assert read_finished(folder).label_names == read_finished(run_folder).label_names


def test_no_published_file_has_a_time_of_day_a_duration_a_secret_or_a_place(run_folder: Path, tmp_path: Path) -> None:
    folder, _ = published(run_folder, tmp_path / "given")
    secrets = [(run_folder / name).read_text().strip() for name in ("sampling.key", "data.digest", "source.digest")]
    for path in folder.rglob("*"):
        assert datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%H:%M:%S") == "00:00:00", path
        text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        assert not re.search(r"\d\d:\d\d:\d\d|\"[a-z_]*seconds\"", text), path
        assert not [secret for secret in [*secrets, str(run_folder.parent)] if secret in text], path


@pytest.mark.parametrize("name", ["ledger.jsonl", "privacy.json", "config.toml"])
def test_a_published_run_with_a_changed_or_missing_file_is_refused(name: str, run_folder: Path, tmp_path: Path) -> None:
    folder, _ = published(run_folder, tmp_path / "given")
    (folder / "files.sha256").unlink()  # as whoever changes a file would
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("0.001", "0.0001"))
    with pytest.raises(CorruptRun, match=re.escape(str(folder / name))):
        verify_run(folder).statement()
    (folder / name).unlink()
    with pytest.raises(CorruptRun, match=re.escape(f"{folder / name} is missing")):
        verify_run(folder)


@pytest.mark.parametrize(
    ("kind", "ledgers", "further"),
    [("phases", ["ledger.jsonl"], {"NOT-PRIVATE.txt", "ledger.jsonl", "recipe.toml"}),
     ("sites", ["silos/0/ledger.jsonl", "silos/1/ledger.jsonl"], {"silos"})],
)  # fmt: skip
def test_phases_and_sites_are_published_with_every_ledger(
    kind: str, ledgers: list[str], further: set[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "place", kind, ended=True)
    folder, said = published(run, tmp_path / "given")
    assert said.strip() == str(folder)
    assert [str(path.relative_to(folder)) for path in sorted(folder.rglob("ledger.jsonl"))] == ledgers
    assert {path.name for path in folder.iterdir()} == further | {
        "PUBLISHED.md", "adapter", "config.toml", "files.sha256", "metrics.jsonl", "privacy.json", "results.json",
    }  # fmt: skip
    assert verify_run(folder).statement() == read_finished(run).statement
    for path in folder.rglob("*.*"):
        assert str(tmp_path) not in path.read_bytes().decode(errors="replace"), path
    assert CliRunner().invoke(COMMAND, ["report", str(folder)]).exit_code == 0
    (folder / "files.sha256").unlink()
    (folder / ledgers[-1]).unlink()
    with pytest.raises(CorruptRun, match=r"is missing|silos is"):
        verify_run(folder).statement()


def test_what_cannot_be_verified_by_others_is_not_published(run_folder: Path, tmp_path: Path) -> None:
    run = read_finished(run_folder)
    with pytest.raises(CannotPublish, match="holds no ledger"):
        publish(replace(run, verified=replace(run.verified, ledger=None)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_folder_and_prepared_data_are_their_owners(run_folder: Path, tmp_path: Path) -> None:
    cache = run_folder.parent / "cache"
    for folder in (new_run_folder(RunConfig(output=str(tmp_path / "runs"))), cache, *cache.iterdir()):
        assert folder.stat().st_mode & 0o777 == 0o700
