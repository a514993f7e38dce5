"""Blocks of the documentation that are marked runnable are run in order, on tiny settings: commands and Python."""

import csv
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simulations import api
from simulations.cli.app import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- runnable -->\n```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]]
RUNNABLE = [page for page in PAGES if "<!-- runnable -->" in (ROOT / page).read_text(encoding="utf-8")]

SMALL: dict[str, Any] = {
    "rounds": 2,
    "model.name": "random:bert",
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
    "model.layers": 0,
    "data.records-per-client": 4,
}
"""Over what a page shows: the same commands, in seconds."""


def table(path: Path, columns: list[str], rows: int) -> None:
    """Texts with three classes that a word tells; a third column, if asked for, names who wrote them."""
    kinds = ("card", "loan", "account")
    lines = [[f"my {kinds[n % 3]} makes trouble number {n}", kinds[n % 3], f"c{n % 60}"] for n in range(rows)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *(line[: len(columns)] for line in lines)])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder with the tables that pages speak of; a run from Python is as small as one of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    table(tmp_path / "complaints.csv", ["complaint", "product", "customer"], 360)
    table(tmp_path / "reviews.csv", ["review", "stars"], 300)
    whole = api.run
    monkeypatch.setattr(api, "run", lambda config, settings=None: whole(config, {**(settings or {}), **QUICKSTART}))
    return tmp_path


def small(words: list[str]) -> list[str]:
    if words[0] != "run":
        return words
    settings = QUICKSTART if words[1] == "quickstart" else SMALL
    return [*words, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def last_run(folder: Path) -> str:
    runs = sorted((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    return str(runs[-1]) if runs else "RUN"


@pytest.mark.parametrize("page", RUNNABLE)
def test_what_a_page_marks_runs(page: str, here: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for file in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if named := re.match(r"# ([\w-]+\.toml)\n", file):
            (here / named[1]).write_text(file, encoding="utf-8")
    for language, block in BLOCK.findall(text):
        if language == "python":
            exec(block.replace("RUN", last_run(here)), {})
            continue
        for line in block.splitlines():
            command, *words = shlex.split(line.replace("RUN", last_run(here)), comments=True)
            assert command == "lacquer", line
            done = CliRunner().invoke(app, small(words))
            assert done.exit_code == 0, (line, done.output)
            assert done.output.strip(), line


def test_the_pages_to_start_with_are_run() -> None:
    assert {"docs/start.md", "docs/coming-from.md"} <= set(RUNNABLE)
    assert len(BLOCK.findall((ROOT / "docs/start.md").read_text(encoding="utf-8"))) == 3
