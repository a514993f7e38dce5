"""What guards the engine's speed: it sees a loss, and judges only what can be compared."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from simulations.benchmarks.engine import guard
from simulations.benchmarks.harness import results


@pytest.mark.parametrize(("ratio", "words"), [(1.61, 0), (1.59, 1)])
def test_a_ratio_below_0_8_of_the_committed_one_is_a_loss(ratio: float, words: int) -> None:
    assert len(guard.lost({"job": ratio}, {"job": 2.0})) == words


def test_a_job_that_is_not_committed_is_said() -> None:
    assert "no ratio is committed" in guard.lost({"new": 9.0}, {"old": 2.0})[0]


def test_what_makes_ratios_incomparable_is_named() -> None:
    here: dict[str, Any] = {"processor": "A", "packages": {"torch": "2"}, "capability": "AVX512"}
    assert guard.other_machine(here, here) == ""
    assert guard.other_machine(here, {**here, "processor": "B"}) == "processor A, not B"
    assert guard.other_machine(here, {**here, "capability": "AVX2"}) == "vector units AVX512, not AVX2"


@pytest.mark.parametrize(("share", "fails"), [(0.6, False), (0.4, True)])
def test_a_ratio_of_one_processor_does_not_fail_another_and_a_loss_does(
    share: float, fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = json.loads((results.RESULTS / f"{guard.NAME}.json").read_text())
    rows = [{**row, "ratio": share * row["ratio"]} for row in committed["ratios"]]
    monkeypatch.setattr(guard, "environment", lambda: committed["environment"])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(guard, "measured", lambda: iter(rows))
    with pytest.raises(typer.Exit) if fails else nullcontext():
        guard.main()
    said = " ".join(capsys.readouterr().out.split())
    assert "judged by 0.5 of the committed ratios and not by 0.8: vector units AVX2, not AVX512" in said


def test_the_tiny_job_takes_long_enough_and_is_the_one_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(guard, "interleaved", lambda works, rounds: {name: [1.0] * rounds for name in works})
    monkeypatch.setattr(guard.jobs, "plain_peft", lambda job: made.append(job))
    list(guard.measured(1))
    assert [records.lengths.tolist() for records in made[0].clients] == [[16] * 8] * 128
    assert made[0].local.batch_size == 4


def test_the_guard_fails_where_the_engine_became_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(guard.measured(1, 2))
    assert [row["variant"] for row in rows] == ["engine"] * 3
    assert all(row["reference"] == "plain PEFT" and row["ratio"] > 0 for row in rows)
    monkeypatch.setattr(guard, "measured", lambda: iter(rows))
    monkeypatch.setattr(guard, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    guard.main(write_them=True)
    guard.main()
    path = tmp_path / f"{guard.NAME}.json"
    found = json.loads(path.read_text())
    for row in found["ratios"]:
        row["ratio"] *= 1.3
    path.write_text(json.dumps(found))
    with pytest.raises(typer.Exit):
        guard.main()
