"""What is made of mutmut's results: counts, survivors with their lines, and a score with an interval."""

import json
from collections import Counter
from pathlib import Path

import pytest

from simulations.benchmarks.harness.results import environment
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

def x_price__mutmut_5(rate, pairs):
    low = max(None, 0)
    return sum(a for a, b in zip(pairs, pairs, strict=True)) + low
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
    where = {"system": "Linux", "cores": 2, "python": "3.11", "commit": "abc", "packages": packages}
    page = mutation.page({**found, "made": 40, "share": 0.1, "seeds": [4], "environment": where})
    assert "10 % of 40 changes, drawn with seed 4" in page
    assert "No difference: lengths are equal" in page
    assert "- `privacy.ledger.budget.price`: `low = max(rate, 0)` became `low = max(rate, 1)`" in page


@pytest.mark.parametrize(
    ("was", "became", "explained"),
    [
        ("m, f = (self.g.to(finite.device, torch.float64), self._f.to(d.device))",
         "m, f = (self.g.to(finite.device, torch.float64), self._f.to(None))", True),
        ("rest = self.rest.to(device, torch.float64)", "rest = self.rest.to(torch.float64)", True),
        ("rest = self.rest.to(device, torch.float64)", "rest = self.rest.to(device, None)", False),
        ("scale.to(copy) + 1", "scale.to(None) - 1", False),
    ],
)  # fmt: skip
def test_where_a_tensor_lies_makes_no_difference_and_all_else_does(was: str, became: str, explained: bool) -> None:
    assert bool(mutation.reason({"where": "privacy.it", "was": was, "became": became})) is explained


def test_what_was_missed_is_tried_again_alone(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = mutation.summary(made)
    results["survivors"].append({"where": "privacy.ledger.budget.price", "was": "gone", "became": "too", "status": ""})
    (made / "mutants").symlink_to(made, target_is_directory=True)
    asked: list[str] = []

    def try_these(folder: Path, *names: str) -> None:
        asked.extend(names)
        path = folder / "privacy" / "ledger" / "budget.py.meta"
        path.write_text(json.dumps({"exit_code_by_key": {name: int(name.endswith("_1")) for name in names}}))

    monkeypatch.setattr(mutation, "mutmut", try_these)
    found = mutation.tried_again(made, results)
    assert [name.rpartition("_")[2] for name in asked] == ["1", "4"]  # the second has a reason
    assert [each.get("again") for each in found["survivors"]] == ["killed", None, "survived", "the line is gone"]
    assert found["rows"] == results["rows"]  # the score stays that of the sample as drawn
    said = mutation.page({**found, "share": 1.0, "seeds": [0], "made": 4, "again": "abc", "environment": environment()})
    assert "Of the 3 missed, the tests of commit `abc` notice 1; lines that are gone: 1." in said
    assert said.count("\n- `") == 1  # the one that is missed still


def test_a_second_sample_takes_the_place_of_what_was_said_about_its_modules(made: Path) -> None:
    sample = {**mutation.summary(made), "made": 5, "share": 0.2, "seeds": [1]}
    old = {"rows": [{"module": "privacy.ledger.budget"}, {"module": "privacy.checks"}], "survivors": [], "made": 9}
    both = mutation.added(old, sample, "privacy.ledger*")
    assert [row["module"] for row in both["rows"]] == ["privacy.checks", "privacy.ledger.budget"]
    assert both["rows"][1]["killed"] == 1
    assert (both["made"], both["samples"][0]["names"], len(both["survivors"])) == (9, "privacy.ledger*", 3)


def test_the_score_leaves_out_what_makes_no_difference_and_has_an_exact_interval() -> None:
    row = Counter({"killed": 90, "ended by its time limit": 5, "survived": 8, "explained": 3})
    share, low, high = mutation.score(row)
    assert share == 0.95
    assert (low, high) == pytest.approx((0.8872, 0.9836), abs=1e-4)  # Clopper-Pearson, 95 of 100
    assert mutation.score(Counter({"killed": 10}))[::2] == (1.0, 1.0)


def test_methods_are_named_as_in_the_code() -> None:
    assert mutation.readable("privacy.mechanism.xǁReleaseǁanswer__mutmut_3") == "privacy.mechanism.Release.answer"
    assert mutation.readable("privacy.events.noise.x__of__mutmut_12") == "privacy.events.noise._of"
