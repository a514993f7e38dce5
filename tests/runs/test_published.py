"""What a published run tells: of two worlds that differ in one person, nothing but what noisy releases do.

The channel that the guarantee covers is the noisy sum. Here it is cut, by putting noise of a known key in the sum's
place: whatever still differs between the folders of two worlds has left on another way. Log and status, which stay
with the run's owner, are the same too, unless a unit raises, and quote no record in any case.
"""

import hashlib
import html
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from click.testing import CliRunner
from flwr.app import Message
from torch import Tensor

from client.record_level.dp_sgd import PrivateSgd
from client.worker import Worker
from privacy import mechanism
from privacy.commitment import Tries
from privacy.errors import CorruptRun
from privacy.randomness.sampling import CohortSampler
from server.config.load import flatten, parse, unflatten
from server.config.methods import methods
from server.config.schema import RunConfig
from server.evaluation.finished import read_finished
from server.evaluation.published import CannotPublish, publish
from server.run_folder.names import TIMES_FILE, new_run_folder
from server.run_folder.telemetry import Telemetry
from server.run_folder.verify import verify_run
from server.runs.commitment import commit_clients
from server.runs.phase_config import parse_phases
from simulations.cli.app import app
from simulations.engines.inprocess import InProcessGrid, run_inprocess
from simulations.sweep import candidates
from simulations.sweep.candidates import PrivateSweep
from simulations.sweep.cells import Cell
from simulations.sweep.tuning import plan_tuning
from strategies.calibration import Calibrated
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
    "empty": "",
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
        "privacy.epsilon": 8.0,
        "rounds": 1,
    },
    "private sweep": {"task": "classification", "unit": "client", "rounds": 1, "privacy.epsilon": 8.0},
    "phases": {"task": "causal-lm", "privacy.epsilon": 10.0},
}
ROUNDS = 24
"""Of the attack by times."""
PHASES = [
    {"kind": "private", "name": "level", "steps": 2, "batch-size": 16, "noise-multiplier": 3.0},
    {"kind": "private", "name": "rising", "steps": 2, "batch-size": 16, "controller": "rise-reset"},
]
WHOLE = ("clients, classification",)
"""Kinds that are tried in every world; the others in one by day, and in all by night."""
CALIBRATED: dict[float, Calibrated] = {}
"""Noise of a candidate of the private sweep, by its epsilon."""
SECRET = "quoted from a record"
"""In what a unit raises."""


def write_records(path: Path, said: str) -> Path:
    """Records of twenty people, two each; the texts of one of them are ``said``."""
    rows = []
    for number in range(40):
        person = f"person {number // 2}"
        text = f"{'ab'[number % 2] * 4} number {number}?"
        if person == PERSON:  # whose second text is left out where nothing is said: a file names nobody without any
            text = f"{said} {number}" if said or number % 2 == 0 else ""
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
    named = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=known(16).hex()))
    monkeypatch.setattr("privacy.ledger.ledger.uuid", named)
    monkeypatch.setattr("simulations.sweep.tuning.uuid", named)
    return again


def behave_badly(world: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Work on one unit, number 3 or a record of the first batch, is slow or raises; how often it was worked on."""
    worked = list[int]()

    def behaving(work: Callable[..., Any], units: Callable[..., Any]) -> Callable[..., Any]:
        def worked_on(self: Any, *given: Any) -> Any:
            numbers = units(*given)
            unit = 3 if isinstance(self, Worker) else int((worked or numbers)[0])
            if unit in numbers:
                worked.append(unit)
                if world == "raising":
                    raise RuntimeError(SECRET)
                time.sleep(0.2)
            return work(self, *given)

        return worked_on

    if world in ("slow", "raising"):
        monkeypatch.setattr(Worker, "_sum", behaving(Worker._sum, lambda request: request.clients))
        monkeypatch.setattr(PrivateSgd, "rows", behaving(PrivateSgd.rows, lambda batch, planned: batch))
    return worked


def train(place: Path, kind: str, said: str, **further: Any) -> Path:
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
        **further,
    }
    base = "random:bert" if task == "classification" else "random:llama"
    folder = place / "run"
    folder.mkdir()
    config = settings(place, task, base, **changed)
    if kind == "private sweep":
        return sweep(config, folder)
    if kind == "phases":
        read_by_phases = ("model", "data", "privacy.epsilon", "privacy.delta", "evaluation.")
        table = {key: value for key, value in flatten(config.to_table()).items() if key.startswith(read_by_phases)}
        run_phases(parse_phases({**unflatten(table), "phases": PHASES}), folder)
    else:
        run_inprocess(config, folder)
    return folder


def sweep(config: RunConfig, folder: Path) -> Path:
    """The chosen one of a private sweep's two candidates, each run in this process."""
    options = {"strategy.controller-options": {"clip-norm": 2.0}}
    other = parse(unflatten({**flatten(config.to_table()), **flatten(options)}))
    cells = [Cell(key, "g", key, (), "run", each, key) for key, each in (("tight", config), ("loose", other))]

    def noise_of(cell: Cell, epsilon: float) -> Calibrated:
        if epsilon not in CALIBRATED:  # a function of the settings alone, and slow
            privacy = config.privacy.model_copy(update={"epsilon": epsilon})
            CALIBRATED[epsilon] = commit_clients(
                config.model_copy(update={"privacy": privacy}), methods(config).controller
            )
        return CALIBRATED[epsilon]

    def run_here(cells: Any, folder_of: Any, *_: Any) -> None:
        for cell in cells:
            run_inprocess(cell.config, folder_of(cell))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "run_cells", run_here)
        patch.setattr(candidates, "draw", lambda tries, cells: [1, 0])
        tuned = PrivateSweep("tiny", folder, cells, plan_tuning(cells, Tries(2.0, 1.0), noise_of))
        with closing(tuned):
            tuned.run(1, folder, lambda: None)
            released = tuned.release()
    assert released.folder is not None
    return released.folder


def content(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Of every file its time, its permissions and a digest."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_mode, digest(path))
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def form_of(reply: Message) -> str:
    """What a reply says, but for the content of arrays and bytes: of these the sizes."""
    if reply.has_error():
        return "an error"
    values = [(name, key, value) for name, record in reply.content.items() for key, value in record.items()]
    sizes = [len(value) if isinstance(value, bytes | list) else getattr(value, "shape", value) for *_, value in values]
    return repr([(name, key, size) for (name, key, _), size in zip(values, sizes, strict=True)])


def cells() -> list[Any]:
    """Kinds and the worlds that each is tried in: by day two of them or all, by night the others."""
    found = []
    for kind, told in KINDS.items():
        # A record without any text is none, and whether it is there changes the public number of records.
        every = [name for name in WORLDS if name != "empty" or told.get("unit") == "client"]
        short = every if kind in WHOLE else ["raising"]
        for names, time_of_day in ((short, "day"), ([name for name in every if name not in short], "night")):
            late = [pytest.mark.nightly] * (time_of_day == "night")
            found += [pytest.param(kind, names, marks=late, id=f"{kind}, {time_of_day}")] if names else []
    return found


@pytest.mark.parametrize(("kind", "names"), cells())
def test_what_is_published_differs_between_worlds_by_noisy_releases_only(
    kind: str,
    names: list[str],
    tmp_path: Path,
    cut_channel: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    shown, status = list[str](), Telemetry.status
    monkeypatch.setattr(Telemetry, "status", lambda self, *said: (shown.append(f"{said}"), status(self, *said))[1])

    answer = InProcessGrid._answer

    def answered(grid: Any, message: Message) -> Message:
        reply = answer(grid, message)
        seen.append((reply.metadata.message_type, message.metadata.dst_node_id, form_of(reply)))
        return reply

    seen = list[Any]()
    monkeypatch.setattr(InProcessGrid, "_answer", answered)

    def world(name: str, said: str) -> tuple[dict[str, tuple[int, int, str]], str]:
        cut_channel()
        caplog.clear()
        shown.clear()
        seen.clear()
        run = read_finished(train(tmp_path / name, kind, said))
        publish(run, made(tmp_path / f"published {name}"))
        assert verify_run(tmp_path / f"published {name}").statement() == run.statement
        told = "\n".join([*shown, *(record.getMessage() for record in caplog.records)])
        told = re.sub(r"\b[0-9.]+ s\b", "SECONDS", told.replace(str(tmp_path / name), "PLACE"))
        return content(tmp_path / f"published {name}"), told

    one, told = world("one", "an ordinary text")
    assert "completed" in told
    replies = list(seen)
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            worked = behave_badly(name, patch)
            other, said = world(name, WORLDS[name])
        assert one == other, name
        assert worked or name not in ("slow", "raising")
        assert told == said or name == "raising"
        assert seen == replies or kind != "secure sums", (
            "a server that nobody trusts sees sealed vectors, and nothing else"
        )
        assert SECRET not in said
        assert "number 3" not in said
        own = content(tmp_path / name)
        assert content(tmp_path / "one") != own or name in ("slow", "raising"), "the worlds are the same"


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
    inside = [path for path in cache.iterdir() if path.is_dir()]
    for folder in (new_run_folder(RunConfig(output=str(tmp_path / "runs"))), cache, *inside):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_times_of_published_files_do_not_tell_who_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack that was found: work on one unit takes long, and a release comes later where it was drawn."""
    drawn: list[bool] = []
    draw = CohortSampler.draw

    def watched(sampler: CohortSampler, *given: Any, **named: Any) -> Any:
        cohort = draw(sampler, *given, **named)
        drawn.append(3 in cohort.ids)
        return cohort

    clock = itertools.count(0.0, 1.0).__next__  # a second between two looks, ten where the unit was worked on
    monkeypatch.setattr(CohortSampler, "draw", watched)
    monkeypatch.setattr("server.runs.loop.time", SimpleNamespace(monotonic=clock))
    nine = SimpleNamespace(sleep=lambda _: [clock() for _ in range(9)])
    monkeypatch.setattr(sys.modules[__name__], "time", nine)
    behave_badly("slow", monkeypatch)
    run = train(tmp_path / "world", "clients, classification", "an ordinary text", rounds=ROUNDS)
    publish(read_finished(run), made(tmp_path / "published"))
    coins = np.array(drawn[-ROUNDS:])
    own = [json.loads(line) for line in (run / TIMES_FILE).read_text().splitlines()]
    seconds = np.array([line["seconds"] for line in own if line["phase"] == "round"])
    assert area(seconds, coins) == 1.0, "the owner's times tell"
    lines = [json.loads(line)["body"] for line in (tmp_path / "published" / "ledger.jsonl").read_text().splitlines()]
    charged, released = (
        np.array([datetime.fromisoformat(body[key]).timestamp() for body in lines if key in body][-ROUNDS:])
        for key in ("debited_at", "released_at")
    )
    found = area(charged[1:] - released[:-1], coins[1:])
    error = float(np.sqrt(ROUNDS / (12 * coins[1:].sum() * (~coins[1:]).sum())))
    assert abs(found - 0.5) <= error
    print(
        f"AUC by times of {ROUNDS} rounds: {area(seconds, coins):.2f} the owner's, {found:.2f} +- {error:.2f} published"
    )


def area(scores: np.ndarray, coins: np.ndarray) -> float:
    """AUC: the share of pairs of a round with the unit and one without in which the first has the larger score."""
    differences = scores[coins][:, None] - scores[~coins][None, :]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)
