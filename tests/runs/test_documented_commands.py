"""Blocks of the documentation that are marked runnable are run in order, on tiny settings: commands and Python."""

import csv
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from server.config.load import flatten, unflatten
from server.run_folder.round_record import RoundRecord
from simulations import api
from simulations.api import run as run_whole
from simulations.cli.app import app
from simulations.planning import choices
from tests.cases.finished_runs import records, run_of_every_task

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- runnable -->\n```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
RUNNABLE = [page for page in PAGES if "<!-- runnable -->" in (ROOT / page).read_text(encoding="utf-8")]

SMALL: dict[str, Any] = {
    "rounds": 2,
    "model.name": "random:bert",
    "model.layers": 0,
    "model.max-length": 32,
    "data.validation-records": 40,
    "data.test-records": 40,
    "data.cache": "cache",
    "engine.kind": "inprocess",
}
QUICKSTART = {
    **SMALL,
    "clients": 60,
    "sampling-rate": 0.2,
    "privacy.delta": 1e-3,
    "data.records-per-client": 4,
}
"""Over what a page shows: the same commands, in seconds."""
SITE = """name = "my-site"
rounds = 20
clients = 1
sampling-rate = 1.0
[privacy]
unit = "group"
[strategy]
controller = "fixed"
[model]
name = "random:bert"
[data]
source = "notes"
partition = "iid"
records-per-client = 400
[silo]
batch-size = 40
"""


def table(path: Path, columns: list[str], rows: int) -> None:
    """Texts with three classes that a word tells; a third column, if asked for, names who wrote them."""
    kinds = ("card", "loan", "account")
    lines = [[f"my {kinds[n % 3]} makes trouble number {n}", kinds[n % 3], f"c{n % 60}"] for n in range(rows)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *(line[: len(columns)] for line in lines)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs of every task, for pages that use one and make none."""
    return run_of_every_task(tmp_path_factory.mktemp("made"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder with the files that pages speak of; runs from Python and the choices of a plan are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    table(tmp_path / "complaints.csv", ["complaint", "product", "customer"], 360)
    table(tmp_path / "reviews.csv", ["review", "stars"], 300)
    records(tmp_path / "public.jsonl")
    records(tmp_path / "other.jsonl")
    (tmp_path / "my-site.toml").write_text(SITE)
    (tmp_path / "my.toml").write_text('name = "my"\nrounds = 20\n[model]\nname = "random:bert"\n')
    monkeypatch.setattr(choices, "RATES", (0.5, 1))
    monkeypatch.setattr(choices, "ROUNDS", (1,))
    whole = api.run
    monkeypatch.setattr(api, "run", lambda config, settings=None: whole(config, {**(settings or {}), **QUICKSTART}))
    return tmp_path


def small(words: list[str]) -> list[str]:
    if words[0] != "run":
        return words
    settings = {"quickstart": QUICKSTART, "silo-quickstart": {**SMALL, "rounds": 8}}.get(words[1], SMALL)
    return [*words, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def small_sweep(file: str) -> str:
    """A file with [settings] of a sweep, on tiny runs; other files as they are."""
    table = tomllib.loads(file)
    if "settings" not in table:
        return file
    return tomli_w.dumps({**table, "settings": unflatten({**flatten(table["settings"]), **QUICKSTART})})


def interrupted(folder: Path) -> Path:
    """A run that was stopped after its first round."""

    def stop(record: RoundRecord) -> None:
        if record.round == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run_whole("quickstart", {**QUICKSTART, "rounds": 20, "output": str(folder / "interrupted")}, callbacks=stop)
    return next((folder / "interrupted").iterdir())


def last_run(folder: Path, text: str, made: Callable[[str], Path], chat: bool) -> str:
    """The run that a text means: the last of the page, or one of the kind that text or page are for."""
    if "lacquer resume" in text:
        return str(interrupted(folder))
    runs = sorted((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    if runs or "RUN" not in text:
        return str(runs[-1]) if runs else "RUN"
    return str(made("instruction" if chat or "generate" in text or "CausalLM" in text else "classification"))


@pytest.mark.parametrize("page", RUNNABLE)
def test_what_a_page_marks_runs(page: str, here: Path, made: Callable[[str], Path]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for file in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if named := re.match(r"# ([\w-]+\.toml)\n", file):
            (here / named[1]).write_text(small_sweep(file), encoding="utf-8")
    chat = page == "docs/chat.md"
    for language, block in BLOCK.findall(text):
        if language == "python":
            exec(block.replace("RUN", last_run(here, block, made, chat)), {})
            continue
        for line in block.splitlines():
            command, *words = shlex.split(line.replace("RUN", last_run(here, line, made, chat)), comments=True)
            assert command == "lacquer", line
            done = CliRunner().invoke(app, small(words), input="Hello?\n\n")
            assert done.exit_code == 0, (line, done.output)
            assert done.output.strip(), line


def test_the_pages_to_start_with_are_run() -> None:
    pages = "budget chat coming-from data faults planning record-level serve start trust tuning".split()
    assert {f"docs/{page}.md" for page in pages} <= set(RUNNABLE)
    assert len(BLOCK.findall((ROOT / "docs/start.md").read_text(encoding="utf-8"))) == 3
