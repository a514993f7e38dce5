"""A transcript of the first pages, as a reader sees it: run from a fresh clone, and written down.

    python docs/tools/transcripts.py docs/results/transcripts.md

Takes some ten minutes of processor time and downloads what `make run` installs. The chat model has a page of its own,
``docs/tools/chat_transcript.py``.
"""

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from simulations.tools.sample_records import write_records

ROOT = Path(__file__).resolve().parents[2]
NOTES = 3000
QUESTION = "burning pain behind the breastbone after meals"
ENDED_AFTER = re.compile(r"^round +2/")
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell."""

SWEEP = """\
name = "strategies"
[settings]                          # small, to be quick: for a result take rounds and clients as they are
rounds = 4
clients = 200
sampling-rate = 0.2
data.validation-records = 400
data.test-records = 400
engine.kind = "inprocess"
[variants.quantile]
strategy.controller = "quantile"
[variants.dp-lac]
strategy.controller = "dp-lac"
[[grids]]
name = "two"
base = "quickstart"
variants = ["quantile", "dp-lac"]
seeds = [0, 1, 2]
"""

ASK = """\
import sys
from sentence_transformers import SentenceTransformer

print(SentenceTransformer(sys.argv[1]).encode([sys.argv[2]]))
"""


@dataclass(frozen=True)
class Task:
    """A task of the transcript: heading, sentence and commands; RUN stands for the folder of the latest run."""

    title: str
    about: str
    commands: tuple[str, ...]
    file: tuple[str, str] | None = None
    interrupted: bool = False
    """Whether Ctrl-C ends the first command after its second round."""


def tasks() -> tuple[Task, ...]:
    """The tasks of the page, in order."""
    plain = f"sentence-transformers=={version('sentence-transformers')} torch=={version('torch').partition('+')[0]}"
    return (
        Task(
            "Install",
            "The second command installs what a run needs, and says what the quickstart would do.",
            ("git clone -q lacquer.git && cd lacquer", "make run ARGS=--dry-run", ". .venv/bin/activate && cd .."),
        ),
        Task(
            "Quickstart",
            "Five of its twenty rounds, at the whole epsilon.",
            ("lacquer run --set rounds=5", f'lacquer predict RUN "{QUESTION}"', "lacquer runs"),
        ),
        Task(
            "Your own table",
            f"`notes.csv` has {NOTES:,} generated notes with the columns `text`, `label` and `patient`.",
            ("lacquer init notes.csv", "lacquer run notes.toml --set rounds=5 --engine inprocess"),
        ),
        Task(
            "Interrupt and resume",
            "Ctrl-C after the second round.",
            ("lacquer run notes.toml --set rounds=5 --engine inprocess", "lacquer resume RUN"),
            interrupted=True,
        ),
        Task(
            "Compare two strategies over three seeds",
            "`strategies.toml`:",
            ("lacquer sweep strategies.toml",),
            file=("toml", SWEEP),
        ),
        Task("Export", "A classifier becomes a model of sentence-transformers.", ("lacquer export RUN my-model",)),
        Task(
            "Load it where Lacquer is not installed",
            "`ask.py`:",
            (
                f"python3 -m venv elsewhere && elsewhere/bin/pip install -q {plain}",
                f'elsewhere/bin/python ask.py my-model "{QUESTION}"',
            ),
            file=("python", ASK),
        ),
    )


PAGE = """\
# Transcripts

The first tasks from a fresh clone, each in at most three commands, with what the terminal prints. Runs are short, so
their accuracies are no results. A chat model has [its own page](chat-transcript.md).
"""
MADE = """
---

Made by `python docs/tools/transcripts.py docs/results/transcripts.md`, which runs the commands shown.
"""


def write(page: Path) -> None:
    """Run every task in a temporary folder and write the commands to `page`, with what they printed.

    Raises:
        subprocess.CalledProcessError: a command failed; its output was shown.
    """
    parts = [PAGE]
    with tempfile.TemporaryDirectory() as name:
        session = _Session(Path(name))
        session.prepare()
        for task in tasks():
            parts.append(f"\n## {task.title}\n\n{task.about}\n")
            if task.file:
                parts.append("\n```{}\n{}```\n".format(*task.file))
            for number, line in enumerate(task.commands):
                parts.append(f"\n```console\n{session.run(line, interrupt=task.interrupted and number == 0)}\n```\n")
        page.write_text("".join([*parts, MADE]), encoding="utf-8")


class _Session:
    """A shell's folder and environment, kept from line to line."""

    def __init__(self, folder: Path) -> None:
        self.home = self.folder = folder
        self.environment: Mapping[str, str] = {
            key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}
        }

    def prepare(self) -> None:
        subprocess.run(["git", "clone", "-q", "--bare", ROOT, self.home / "lacquer.git"], check=True)
        (records,) = write_records(self.home, 1, NOTES)
        rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
        with (self.home / "notes.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["text", "label", "patient"])
            table.writeheader()
            table.writerows(rows)
        (self.home / "strategies.toml").write_text(SWEEP, encoding="utf-8")
        (self.home / "ask.py").write_text(ASK, encoding="utf-8")

    def run(self, line: str, *, interrupt: bool) -> str:
        """Run a line of shell; the line and what it printed."""
        line = line.replace("RUN", self._latest_run())
        after = self.home / ".after"
        script = f"{line}\nstatus=$?\npwd > {after}; env -0 >> {after}\nexit $status"
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT if interrupt else None,
        )  # fmt: skip
        assert process.stdout is not None
        told: list[str] = []
        for text in process.stdout:
            sys.stderr.write(text)
            told.append(text.rstrip().replace(f"{self.home}/", ""))
            if interrupt and ENDED_AFTER.match(text):
                os.killpg(process.pid, signal.SIGINT)
                told.append("^C")
                interrupt = False
        if process.wait() not in ({INTERRUPTED, -signal.SIGINT} if "^C" in told else {0}):
            raise subprocess.CalledProcessError(process.returncode, line)
        if "^C" not in told:
            folder, _, variables = after.read_text(encoding="utf-8").partition("\n")
            self.folder = Path(folder)
            self.environment = dict(entry.split("=", 1) for entry in variables.split("\0") if entry)
        kept = [text for text in told if not re.match(r"round +\d+/\d+ +clip", text)]
        return "\n".join([f"$ {line}", *kept]).rstrip()

    def _latest_run(self) -> str:
        runs = sorted((self.folder / "runs").glob("*-*"), key=lambda path: path.stat().st_mtime_ns)
        return f"runs/{runs[-1].name}" if runs else "RUN"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python docs/tools/transcripts.py")
    parser.add_argument("page", type=Path)
    write(parser.parse_args().page.resolve())
