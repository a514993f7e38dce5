"""The parts of the nightly tests: together they are all, and what is said of one is what pytest said."""

import re
from pathlib import Path

from simulations.benchmarks.harness.nightly import PARTS, counted
from simulations.benchmarks.harness.results import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="2.5"/>
<testcase classname="tests.a" name="two" time="90.1"><failure message="no"/></testcase>
<testcase classname="tests.b" name="three" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_the_parts_are_the_makefiles_and_leave_nothing_out() -> None:
    parts = dict(re.findall(r"(?m)^NIGHTLY_(\d+) = (.+)$", (ROOT / "Makefile").read_text()))
    assert tuple(map(int, parts)) == PARTS
    whole, *rest = (value.split() for value in parts.values())
    assert whole == ["tests", *(f"--ignore={folder}" for (folder,) in rest)]


def test_a_row_says_what_pytest_reported(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert counted(tmp_path / "report.xml") == {
        "tests": 3,
        "failed": ["two"],
        "skipped": ["three"],
        "test_seconds": 93,
        "longest": {"tests.a::two": 90, "tests.a::one": 2, "tests.b::three": 0},
    }
