"""Plant each bug of planted_bugs.toml in a copy of the sources and see which test finds it.

    python tests/planted_bugs.py --json tests/planted_bugs.json
    python tests/planted_bugs.py --table docs/results/planted-bugs.md

The tests that a bug names must pass without it, and one of them fails with it: the bug is caught, or it survived. The
table is that of the results as they are.
"""

import argparse
import ast
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUGS = Path(__file__).with_suffix(".toml")
LIMIT = 600.0  # seconds a bug's tests may take; one that hangs is caught
FOLDERS = {"engine": "run", "runs": "run", "docker": "run", "end_to_end": "slow", "benchmarks": "nightly"}
"""As in conftest.py, which cannot be imported without torch."""
HEAD = """# Planted bugs

Every bug of `tests/planted_bugs.toml`, the first test that noticed it when it was last planted, and that test's tier
(`python tests/planted_bugs.py --table docs/results/planted-bugs.md`). [By kind](guarantee.md#planted-bugs).

| bug | why it matters | noticed by | tier |
|---|---|---|---|
"""
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Place:
    """Where a bug is planted, and what should find it.

    Attributes:
        file: of the sources.
        old, new: what stands there, and what the bug makes of it.
        tests: paths of files or tests.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """ValueError unless the text stands there exactly once and what comes out is Python."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds the text {count} times, it must be once: {self.old!r}")
        bugged = source.replace(self.old, self.new)
        ast.parse(bugged)
        return bugged


@dataclass(frozen=True)
class Bug:
    """One bug, why it matters, and its place in the code of now."""

    name: str
    matters: str
    now: Place


def read_bugs(file: Path = BUGS) -> list[Bug]:
    """All bugs of the file."""
    return [
        Bug(entry["name"], entry["matters"], Place(**{**entry["now"], "tests": tuple(entry["now"]["tests"])}))
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["bugs"]
    ]


@contextmanager
def copied(checkout: Path) -> Iterator[Path]:
    """A copy of the files that git knows, as they are now."""
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as folder:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (source := checkout / name).is_file():
                (target := Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield Path(folder)


def run_tests(tree: Path, tests: tuple[str, ...], limit: float = LIMIT) -> tuple[str, str, float]:
    """What became of tests in a tree: ``"passed"``, ``"failed"`` or ``"broken"``, the first that failed, seconds."""
    options = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    known = {marker.partition(":")[0] for marker in options["markers"]}
    marks = " and ".join(f"not {name}" for name in ("slow", "nightly") if name in known)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks, "-x", *tests]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, "--no-header", "--tb=no", "--override-ini", f"addopts={_others(options['addopts'])}"],
            cwd=tree, env={**outside, "PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "failed", f"no end within {limit:g} s", limit
    seconds = round(time.monotonic() - start, 1)
    if done.returncode not in (PASSED, FAILED):
        return "broken", (done.stdout + done.stderr)[-2000:], seconds
    names = [
        line.partition(" ")[2].partition(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    return ("passed" if done.returncode == PASSED else "failed"), (names or [""])[0], seconds


def _others(options: list[str]) -> str:
    """pytest's options of the tree, but for its -m."""
    return " ".join(option for option in options if option.startswith("--") or option == "-ra")


def tried(tree: Path, bug: Bug) -> dict[str, Any]:
    """Plant, run, put back."""
    file = tree / bug.now.file
    source = file.read_text(encoding="utf-8")
    file.write_text(bug.now.planted(source), encoding="utf-8")
    try:
        became, test, seconds = run_tests(tree, bug.now.tests)
    finally:
        file.write_text(source, encoding="utf-8")
    verdict = {"failed": "caught", "passed": "survived", "broken": "broken"}[became]
    return {"verdict": verdict, "by": test, "seconds": seconds}


def tier_of(test: str) -> str:
    """The tier of a test that noticed a bug: that of its folder, or of its own mark."""
    file, *names = test.partition("[")[0].split("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    own = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    found = [mark for node in own for mark in node.decorator_list]
    found += [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    marks = " ".join(map(ast.unparse, found))
    marked = [tier for tier in ("nightly", "slow", "run") if re.search(rf"\bmark\.{tier}\b", marks)]
    return (marked or [FOLDERS.get(file.split("/")[1], "unit")])[0]


def table() -> str:
    """The page with a row for every bug: what it is, the first test that noticed it, and in which tier that is."""
    tried = json.loads(BUGS.with_suffix(".json").read_text(encoding="utf-8"))["bugs"]
    rows = "".join(
        f"| `{bug.name}` | {bug.matters} | `{by.partition('[')[0]}` | {tier_of(by)} |\n"
        for bug in read_bugs()
        if (by := tried[bug.name]["now"]["by"])
    )
    return f"{HEAD}{rows}"


def environment() -> dict[str, Any]:
    """Of the results."""
    head = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    packages = ("torch", "flwr", "pytest", "hypothesis", "dp-accounting")
    return {
        "commit": head.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def main() -> int:
    """Exit code 0 where everything that was planted was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="names of bugs; the other results of the file are kept")
    parser.add_argument("--json", type=Path, help="results")
    parser.add_argument("--table", type=Path, help="write the table of the results there; plant nothing")
    asked = parser.parse_args()
    if asked.table:
        asked.table.write_text(table(), encoding="utf-8")
        return 0
    bugs = read_bugs()
    if unknown := set(asked.only or ()) - {bug.name for bug in bugs}:
        parser.error(f"unknown bugs: {sorted(unknown)}")
    chosen = [bug for bug in bugs if asked.only is None or bug.name in asked.only]
    kept = json.loads(asked.json.read_text()) if asked.json and asked.json.is_file() else {}
    results = {name: dict(found) for name, found in kept.get("bugs", {}).items()}
    with copied(ROOT) as tree:
        named = sorted({test for bug in chosen for test in bug.now.tests})
        became, test, seconds = run_tests(tree, tuple(named), LIMIT * len(chosen))
        if became != "passed":
            print(f"without any bug the tests do not pass: {test}", file=sys.stderr)
            return 2
        print(f"without any bug: passed in {seconds:g} s", flush=True)
        for bug in chosen:
            found = tried(tree, bug)
            results[bug.name] = {"now": found}
            print(f"{bug.name:<36} {found['verdict']:<14} {found.get('by', '')}", flush=True)
            if asked.json:
                document = {"now": environment(), "bugs": dict(sorted(results.items()))}
                asked.json.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return int(any(results[bug.name]["now"]["verdict"] in ("survived", "broken") for bug in chosen))


if __name__ == "__main__":
    raise SystemExit(main())
