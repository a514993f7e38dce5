"""A handful of bugs planted from end to end: the runner copies, plants, and the tests of the house find them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_bugs import ROOT

SOME = [
    "noise-halved",
    "noise-shrunk-behind-the-line",
    "cohort-topped-up",
    "replay-trusts-the-price",
    "quantile-of-the-wrong-share",
    "resume-compares-privacy-only",
]


@pytest.mark.timeout(1800)
def test_planted_bugs_are_caught(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    names = [word for name in SOME for word in ("--only", name)]
    command = [sys.executable, "tests/planted_bugs.py", "--json", str(file), *names]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    found = json.loads(file.read_text())["bugs"]
    assert {name: found[name]["now"]["verdict"] for name in SOME} == dict.fromkeys(SOME, "caught")
