"""Every command that a document shows is run, on tiny settings, or is listed with the reason why not.

Python is run where it is marked runnable.
"""

import csv
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
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
from simulations.tools.sample_records import write_records
from tests.cases.finished_runs import records, run_of_every_task

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(<!-- runnable -->\n)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELL = {"", "bash", "console", "sh", "shell"}
COMMAND = re.compile(r"(?:\.venv/bin/)?(lacquer|make|flwr|docker|python -m) ")
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

DATA = "needs a data set that is not here, and hours"
BENCHMARK = "hours; tests/test_documents.py checks its name, options and arguments"
NOT_RUN = {
    r"docs/deploy\.md: ": "containers: docker/container_test.sh, operations_test.sh, organisations_test.sh",
    r"docs/results/transcripts\.md: ": "docs/tools/transcripts.py ran them; tests/test_documents.py compares",
    r"docs/results/chat-transcript\.md: ": "docs/tools/chat_transcript.py ran them; the last test compares",
    r".*: make run": "installs for minutes; docs/tools/transcripts.py runs it in a fresh clone",
    r".*: flwr (run|build)": "installs gigabytes",
    r".*: python -m simulations\.benchmarks ": BENCHMARK,
    r".*\b(DATA|FOLDER|ROOM|NOTES)\b": DATA,
    r"docs/audit\.md: lacquer audit RUN --shadows": "eight runs; tests/runs/test_audit_attacks.py has four",
    r"docs/atdp\.md: lacquer (run|resume) ": f"{DATA}; tests/runs/test_phases_command.py runs phases",
    r"docs/results/personal\.md: lacquer ": f"{DATA}; tests/runs/test_personalise.py measures on a tiny run",
    r"docs/results/comparisons\.md: lacquer sweep methods": "hours; tests/runs/test_sweep.py runs sweeps",
    r"docs/(gpu|scale)\.md: lacquer run .*ray-address": "needs other hosts",
    r"docs/strategy\.md: lacquer sweep mine\.toml$": "six runs; tests/runs/test_sweep.py runs sweeps",
    r"docs/start\.md: lacquer .*(mlflow|wandb)": "needs a tracker; tests/runs/test_trackers.py runs them",
    r"docs/tuning\.md: lacquer sweep .* --private$": "by chance; tests/runs/test_private_sweep.py runs it",
}
"""Patterns of "page: command", and why such a command is not run here."""
REFUSED = {"docs/planning.md": "is hopeless", "docs/synthetic.md": "nothing was spent"}
"""What a page says about its command that is refused with exit code 2."""


def shown(language: str, block: str) -> list[str]:
    """The commands of a shell block, without what they printed."""
    lines = block.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines] if language in SHELL else []
    return [line.removeprefix(".venv/bin/") for line in lines if COMMAND.match(f"{line} ")]


def excuses(page: str, line: str) -> list[str]:
    return [pattern for pattern in NOT_RUN if re.match(pattern, f"{page}: {line}")]


def parts(page: str) -> list[tuple[str, str]]:
    """Python and commands of a page that are run, in order."""
    found = []
    for marked, language, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "python" and marked:
            found.append((language, block))
        lines = [("sh", line) for line in shown(language, block) if not excuses(page, line)]
        found += [each for each in lines if "RUN" in each[1] or each not in found]  # a page may show one again
    return found


RUNNABLE = [page for page in PAGES if parts(page)]
LENGTHY = "tuning record-level audit api chat faults trust planning coming-from strategy"
LONG = {f"docs/{page}.md" for page in LENGTHY.split()}
"""Pages of half a minute to two, in the nightly tier."""

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
CHAT = {
    **SMALL,
    "model.name": "random:llama",
    "model.targets": "q_proj,v_proj",
    "model.max-length": 64,
    "clients": 60,
    "sampling-rate": 0.2,
    "privacy.delta": 1e-3,
    "evaluation.rouge-records": 2,
    "evaluation.rouge-tokens": 4,
}
PREFERENCE = {key: value for key, value in CHAT.items() if not key.startswith("evaluation.")}
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
[site]
batch-size = 40
"""
FEDERATION = """name = "federation"
clients = 3
sampling-rate = 1.0
[privacy]
unit = "group"
delta = 1e-6
[model]
name = "random:bert"
[data]
held-by = "nodes"
unit-column = "patient"
cache = "cache"
"""


def table(path: Path, columns: list[str], rows: int) -> None:
    """Texts with three classes that a word tells; a third column, if asked for, names who wrote them."""
    kinds = ("card", "loan", "account")
    lines = [[f"my {kinds[n % 3]} makes trouble number {n}", kinds[n % 3], f"c{n % 60}"] for n in range(rows)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *(line[: len(columns)] for line in lines)])


def conversation(number: int) -> str:
    """A line of a file of conversations, of one of 60 users."""
    turns = [
        {"role": "user", "content": f"My number {number}?"},
        {"role": "assistant", "content": "Yes. " * (number % 3)},
    ]
    return f"{json.dumps({'user': f'u{number % 60}', 'messages': turns})}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs of every task, for pages that use one and make none."""
    return run_of_every_task(tmp_path_factory.mktemp("made"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder with the files that pages speak of; runs from Python and the choices of a plan are small."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    table(tmp_path / "complaints.csv", ["complaint", "product", "customer"], 360)
    table(tmp_path / "published.csv", ["complaint", "product"], 90)
    shutil.copy(ROOT / "strategies" / "controllers" / "rl" / "policy.json", tmp_path / "mine.json")
    table(tmp_path / "reviews.csv", ["review", "stars"], 300)
    table(tmp_path / "my.csv", ["complaint", "product", "customer"], 360)
    records(tmp_path / "public.jsonl")
    (tmp_path / "conversations.jsonl").write_text("".join(map(conversation, range(360))))
    records(tmp_path / "other.jsonl")
    (tmp_path / "my-site.toml").write_text(SITE)
    (tmp_path / "federation.toml").write_text(FEDERATION)
    shutil.move(write_records(tmp_path / "notes", 1, 200)[0], tmp_path / "records.jsonl")
    monkeypatch.setattr(choices, "RATES", (0.5, 1))
    monkeypatch.setattr(choices, "ROUNDS", (1,))
    whole = api.run
    monkeypatch.setattr(
        api, "run", lambda config, settings=None, **more: whole(config, {**(settings or {}), **QUICKSTART}, **more)
    )
    return tmp_path


def small(words: list[str]) -> list[str]:
    if words[0] != "run" or "--help" in words:
        return words
    kinds = {
        "quickstart": QUICKSTART,
        "site-quickstart": {**SMALL, "rounds": 8},
        "chat": CHAT,
        "preference": PREFERENCE,
    }
    settings = kinds.get(words[1], SMALL)
    if any(word.startswith("audit.canaries=") for word in words):
        settings = {**settings, "clients": 400}  # canaries take the places of at most half of them
    own = {word.partition("=")[0] for word in words}
    settings = {key: value for key, value in settings.items() if key not in own}
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
    if not runs and text == "lacquer runs":
        shutil.copytree(made("classification"), folder / "runs" / "made-1")
    if runs or "RUN" not in text:
        return str(runs[-1]) if runs else "RUN"
    if "synthesise" in text:
        return str(made("causal-lm"))
    return str(made("instruction" if chat or "generate" in text or "CausalLM" in text else "classification"))


def run_line(page: str, line: str) -> None:
    """Run a command of the program, with its output sent where the line says."""
    line, _, file = line.partition(" > ")
    words = shlex.split(line)
    assert words[0] == "lacquer", line
    done = CliRunner().invoke(app, small(words[1:]), input="Hello?\n\n")
    refused = page in REFUSED and REFUSED[page] in done.output and done.exit_code == 2
    unfit_host = words[1] == "doctor" and "Problem: " in done.output and done.exit_code == 1
    assert done.exit_code == 0 or refused or unfit_host, (line, done.output, done.exception)
    assert done.output.strip() or words[1] == "generate", line  # a random model may end its answer at once
    if file:
        Path(file).write_text(done.output, encoding="utf-8")


def write_files(text: str, folder: Path) -> None:
    """The files that a page shows: settings by their first line, modules by the block that imports them, examples."""
    if "my.toml" in text:
        kept = 'name = "my"\nrounds = 20\n[model]\nname = "random:bert"\n[data]\npartition = "iid"\n'
        (folder / "my.toml").write_text(kept)
    for file in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if named := re.match(r"# ([\w-]+\.toml)\n", file):
            (folder / named[1]).write_text(small_sweep(file), encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for module, use in pairwise(blocks):
        if named := re.match(r"from (my_\w+) import", use):
            (folder / f"{named[1]}.py").write_text(module, encoding="utf-8")
    for example in re.findall(r"\]\((examples/\w+\.py)\)", text):
        shutil.copy(ROOT / "docs" / example, folder)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.nightly] if page in LONG else []) for page in RUNNABLE]
)
def test_what_a_page_shows_runs(page: str, here: Path, made: Callable[[str], Path]) -> None:
    write_files((ROOT / page).read_text(encoding="utf-8"), here)
    for language, text in parts(page):
        ready = text.replace("RUN", last_run(here, text, made, chat=page == "docs/chat.md"))
        if language == "python":
            exec(ready, {})
        else:
            run_line(page, ready)


def test_every_command_is_run_or_has_a_reason() -> None:
    listed, lines = set(), 0
    for page in PAGES:
        for _, language, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            for line in shown(language, block):
                lines += 1
                listed |= (reasons := set(excuses(page, line)))
                assert reasons or line.startswith("lacquer "), f"{page}: run it, or say in NOT_RUN why not: {line}"
    assert set(NOT_RUN) == listed, "no document shows such a command"
    assert lines > 140


def test_the_pages_to_start_with_are_run() -> None:
    pages = "audit budget chat coming-from data faults gpu owners planning record-level serve settings start strategy "
    pages += "troubleshooting trust tuning"
    assert {"README.md", *(f"docs/{page}.md" for page in pages.split())} <= set(RUNNABLE)
    assert set(RUNNABLE) >= LONG
    assert len(parts("docs/start.md")) == 8


def test_a_command_is_found_in_every_kind_of_block() -> None:
    assert shown("sh", ".venv/bin/lacquer init my.csv   # settings\ncp a b\n  make run\n") == [
        "lacquer init my.csv",
        "make run",
    ]
    assert shown("", "$ lacquer runs\nlacquer predict\n$ docker compose \\\n  up\n") == [
        "lacquer runs",
        "docker compose    up",
    ]
    assert shown("python", "lacquer runs\n") == []


def test_the_chat_transcript_shows_the_commands_of_its_script() -> None:
    page = (ROOT / "docs/results/chat-transcript.md").read_text(encoding="utf-8")
    lines = [re.sub(r"\bruns/[\w-]+", "RUN", line) for line in re.findall(r"^\$ (.*)$", page, re.MULTILINE)]
    script = runpy.run_path(str(ROOT / "docs/tools/chat_transcript.py"))
    here, elsewhere = script["MADE_HERE"], script["used_elsewhere"]()
    unversioned = [re.sub(r"==[\d.]+", "", line) for line in (*lines, *here, *elsewhere)]
    assert unversioned[: len(lines)] == unversioned[len(lines) :]  # the page keeps the versions that it was made with
    assert max(len(here), len(elsewhere)) <= 3
