"""Every file of a run folder, deleted, cut, garbled and edited, under every command that speaks of a guarantee.

Either the command does not depend on the file, and says what it says of the sound folder; or it ends with exit code 2
and a line that names the file. It never states another epsilon than the ledger's and never advises a second budget.
"""

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases.damage import COMMANDS, DAMAGES, KINDS, Outcome, call, make_run

READ_BY_ALL = ("ledger.jsonl", "privacy.json", "metrics.jsonl", "results.json", "config.toml", "source.digest")
"""Files under which all commands are tried, on one kind of run."""
FEW = ("api", "resume")
"""Commands that are tried under every file of every kind: all read a folder through one function."""
MEASURED = ("status.json", "times.jsonl", "environment.json", "records.json", "config.toml")
"""Of a run that goes on: files that may change on the way and decide nothing of a guarantee are told as they stand."""
NOT_READ = ("run.lock", "launch.lock", "report.html", "files.sha256", "tensorboard/")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """The sound folder of a run of a kind, made once."""
    place, made = tmp_path_factory.mktemp("sound"), dict[tuple[str, bool], Path]()

    def make(kind: str, ended: bool) -> Path:
        if (kind, ended) not in made:
            made[kind, ended] = make_run(place / f"{kind}-{ended}", kind, ended=ended)
        return made[kind, ended]

    return make


def files(folder: Path) -> Iterator[str]:
    """Those that a command may read."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith(NOT_READ):
            yield name


def excused(sound: Outcome, found: Outcome, name: str) -> bool:
    """Whether the outcomes differ only in that a list of the folder's files leaves out the one that is gone."""

    def without(outcome: Outcome) -> tuple[object, ...]:
        row = re.compile(rb".*<code>" + re.escape(name).encode() + rb"</code>.*\n")
        pages = [(page, row.sub(b"", text)) for page, text in outcome.written]
        return outcome.code, outcome.output, outcome.errors, pages

    return without(sound) == without(found)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "interrupted"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_or_does_not_matter(
    kind: str, ended: bool, folders: Callable[[str, bool], Path], tmp_path: Path
) -> None:
    original, folder, out = folders(kind, ended), tmp_path / "run", tmp_path / "out"

    def outcomes(
        commands: tuple[str, ...], name: str = "", damage: Callable[[Path], None] | None = None
    ) -> dict[str, Outcome]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        if damage is not None:
            damage(folder / name)
        return {command: call(command, folder, out) for command in commands}

    sound, wrong, named = outcomes(COMMANDS), [], set[tuple[str, str]]()
    for name, damage in itertools.product(files(original), DAMAGES):
        few = FEW[:1] if ended else FEW  # what has ended is not resumed, whatever its files are
        every = kind == "client" and name in READ_BY_ALL
        for command, found in outcomes(COMMANDS if every else few, name, damage).items():
            where = f"{command} with {name}, {damage.__name__}: {found.code} {found.errors or found.output}"
            if "anew" in found.errors or "new run" in found.errors or "Traceback" in found.output + found.errors:
                wrong.append(f"bad advice or a traceback: {where}")
            elif found == sound[command] or excused(sound[command], found, name):
                continue
            elif found.code == 2 and str(folder / name) in found.errors and len(found.errors.splitlines()) == 1:
                named.add((command, name))
            elif not (found.epsilons <= sound[command].epsilons and name in MEASURED and not ended):
                wrong.append(where)
    assert not wrong, "\n".join(wrong)
    assert ("api", "privacy.json" if ended else "config.toml") in named, "nothing was damaged"
