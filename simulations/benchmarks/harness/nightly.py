"""How long each part of the nightly tests takes and whether it passes: a part must fit in one sitting, an hour.

Run: `python -m simulations.benchmarks harness.nightly [--part N ...]`. Parts that are not run keep their last result.
"""

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

from simulations.benchmarks.harness.results import RESULTS, ROOT, origin, say, write

PARTS = (1, 2, 3, 4)
"""As NIGHTLY_1 and so on in the Makefile."""
LONGEST = 3600.0
"""Seconds that a part may take on two cores."""
NAMED = 5


def measure(part: int) -> dict[str, Any]:
    """Run one part; its row."""
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = ["make", "test-nightly", f"PART={part}", f"ARGS=--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - began
        return {"part": part, "exit_code": code, "wall_seconds": round(seconds), **counted(report), **origin()}


def counted(report: Path) -> dict[str, Any]:
    """What pytest's JUnit report says: how many tests, which failed, which took longest, with their seconds."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    seconds = {f"{case.get('classname')}::{case.get('name')}": float(case.get("time", 0)) for case in cases}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:NAMED]

    def names(*kinds: str) -> list[str]:
        return [str(case.get("name")) for case in cases if any(case.find(kind) is not None for kind in kinds)]

    return {
        "tests": len(cases),
        "failed": names("failure", "error"),
        "skipped": names("skipped"),
        "test_seconds": round(sum(seconds.values())),
        "longest": {name: round(seconds[name]) for name in longest},
    }


def main(part: Annotated[list[int] | None, typer.Option(help="Only these; repeatable.")] = None) -> None:
    """Run the parts one after the other; fails if one of them does or takes more than an hour."""
    file, good = RESULTS / "nightly.json", True
    rows = {row["part"]: row for row in json.loads(file.read_text())["parts"]} if file.is_file() else {}
    for number in part or PARTS:
        row = rows[number] = measure(number)
        write("nightly", {"parts": [rows[key] for key in sorted(rows)]})
        say(f"part {number}: {row['tests']} tests, {len(row['failed'])} failed, {row['wall_seconds']} s")
        good &= row["exit_code"] == 0 and row["wall_seconds"] <= LONGEST
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
