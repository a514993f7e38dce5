"""What is made of mutmut's results: counts, survivors with their lines, and a score with an interval."""

import json
from collections import Counter
from pathlib import Path

import pytest

from simulations.benchmarks.privacy import mutation

MODULE = """
def x_price__mutmut_orig(rate, pairs):
    low = max(rate, 0)
    return sum(a for a, b in zip(pairs, pairs, strict=True)) + low

def x_price__mutmut_1(rate, pairs):
    low = max(rate, 1)
    return sum(a for a, b in zip(pairs, pairs, strict=True)) + low

def x_price__mutmut_2(rate, pairs):
    low = max(rate, 0)
    return sum(a for a, b in zip(pairs, pairs, strict=False)) + low

def x_price__mutmut_3(rate, pairs):
    low = None
    return sum(a for a, b in zip(pairs, pairs, strict=True)) + low

def x_price__mutmut_4(rate, pairs):
    low = max(rate, 0)
    return sum(a for a, b in zip(pairs, pairs, strict=True)) - low
"""
CODES = {1: 0, 2: 0, 3: 1, 4: 33, 5: None}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "privacy" / "ledger"
    folder.mkdir(parents=True)
    (folder / "budget.py").write_text(MODULE)
    codes = {f"privacy.ledger.budget.x_price__mutmut_{number}": code for number, code in CODES.items()}
    (folder / "budget.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    return tmp_path


def test_survivors_are_listed_with_their_line_and_counted_by_module(made: Path) -> None:
    found = mutation.summary(made)
    assert found["rows"] == [
        {
            "module": "privacy.ledger.budget",
            "killed": 1,
            "ended by its time limit": 0,
            "survived": 2,
            "reached by no test": 1,
        }
    ]
    lines = [(each["was"], each["became"]) for each in found["survivors"]]
    assert lines[0] == ("low = max(rate, 0)", "low = max(rate, 1)")
    assert "strict=False" in lines[1][1]
    assert [bool(mutation.reason(each)) for each in found["survivors"]] == [False, True, False]
    assert {each["where"] for each in found["survivors"]} == {"privacy.ledger.budget.price"}
    assert len(mutation.all_names(made)) == 5
    text = mutation.scores(found)
    assert "| `ledger/` | 4 | 1 | 1 | 2 | 33.3 %" in text
    assert "| all | 4 |" in text
    packages = dict.fromkeys(("flwr", "torch", "dp-accounting", "numpy"), "1.0")
    environment = {"system": "Linux", "cores": 2, "python": "3.11", "commit": "abc", "packages": packages}
    page = mutation.page({**found, "made": 40, "share": 0.1, "seeds": [4], "environment": environment})
    assert "10 % of 40 changes, drawn with seed 4" in page
    assert "No difference: lengths are equal" in page
    assert "- `privacy.ledger.budget.price`: `low = max(rate, 0)` became `low = max(rate, 1)`" in page


def test_the_score_leaves_out_what_makes_no_difference_and_has_an_exact_interval() -> None:
    row = Counter({"killed": 90, "ended by its time limit": 5, "survived": 8, "explained": 3})
    share, low, high = mutation.score(row)
    assert share == 0.95
    assert (low, high) == pytest.approx((0.8872, 0.9836), abs=1e-4)  # Clopper-Pearson, 95 of 100
    assert mutation.score(Counter({"killed": 10}))[::2] == (1.0, 1.0)


def test_methods_are_named_as_in_the_code() -> None:
    assert mutation.readable("privacy.mechanism.xǁReleaseǁanswer__mutmut_3") == "privacy.mechanism.Release.answer"
    assert mutation.readable("privacy.events.noise.x__of__mutmut_12") == "privacy.events.noise._of"
