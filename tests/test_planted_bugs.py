"""The bugs that tests are measured by: each has its place in the code of now, and was caught there when last tried."""

import json
import re
from typing import Any

import pytest

from tests.planted_bugs import BUGS, FOLDERS, ROOT, Bug, Place, copied, read_bugs, table, tried

ALL = read_bugs()
QUICK = ("sampling-rate-doubled", "clip-bound-doubled", "answers-without-noise", "share-at-a-quarter")
"""Those that are planted in every run of the tests; the others are nightly."""


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.name)
def test_a_bug_has_its_place(bug: Bug) -> None:
    source = (ROOT / bug.now.file).read_text(encoding="utf-8")
    assert bug.now.planted(source) != source
    assert bug.now.tests
    assert [test for test in bug.now.tests if not (ROOT / test.partition("::")[0]).is_file()] == []


def test_the_whole_house_has_bugs() -> None:
    assert len({bug.name for bug in ALL}) == len(ALL) >= 24
    rooms = {bug.now.file.split("/")[0] for bug in ALL}
    assert rooms == {"privacy", "strategies", "client", "server", "simulations"}
    assert any(bug.now.file.startswith("client/record_level/") for bug in ALL)


def test_every_bug_was_tried_and_none_survives() -> None:
    results = json.loads(BUGS.with_suffix(".json").read_text(encoding="utf-8"))["bugs"]
    assert results.keys() == {bug.name for bug in ALL}
    assert all(found["now"]["verdict"] == "caught" for found in results.values())


def test_the_table_of_all_bugs_is_what_the_results_say() -> None:
    page = (ROOT / "docs" / "results" / "planted-bugs.md").read_text(encoding="utf-8")
    assert page == table(), "run `python tests/planted_bugs.py --table docs/results/planted-bugs.md`"
    assert page.count("\n| `") == len(ALL)
    assert f"TIERS = {json.dumps(FOLDERS)}" in (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")


def test_the_page_names_bugs_and_the_tests_that_notice_them() -> None:
    page = (ROOT / "docs" / "results" / "guarantee.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.partition("## Planted bugs")[2].partition("\n## ")[0].splitlines() if "`test_" in line
    ]
    tests = {bug.name: {test.partition("::")[0].rpartition("/")[2] for test in bug.now.tests} for bug in ALL}
    assert len(rows) == 9
    for row in rows:
        _, kind, bugs, noticed, *_ = row.split("|")
        named = re.findall("`([^`]+)`", bugs)
        assert named, kind
        assert set(re.findall("`([^`]+)`", noticed)) <= set().union(*(tests[name] for name in named)), kind
        assert all(tests[name] & set(re.findall("`([^`]+)`", noticed)) for name in named), kind


def tiers() -> list[Any]:
    marks = {name: pytest.mark.run for name in QUICK}
    return [pytest.param(bug, marks=marks.get(bug.name, pytest.mark.nightly), id=bug.name) for bug in ALL]


@pytest.mark.parametrize("bug", tiers())
def test_a_bug_is_caught(bug: Bug) -> None:
    with copied(ROOT) as tree:
        found = tried(tree, bug)
    assert found["verdict"] == "caught", found


@pytest.mark.parametrize("source", ["clip()\nclip()\n", "nothing\n"])
def test_a_text_that_does_not_stand_there_once_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"must be once: 'clip\(\)'"):
        Place("a.py", "clip()", "pass", ("tests",)).planted(source)


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        Place("a.py", "clip()", "clip(", ("tests",)).planted("clip()\n")
