"""Detectors in docs/results/atdp.md: who finds the secrets, and what is trained once or for each detector."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from privacy.sensitive_text import Span
from server.runs.phase_config import parse_phases
from simulations.benchmarks.papers.atdp import tiers
from simulations.benchmarks.papers.atdp.chains import HERE
from simulations.benchmarks.papers.atdp.tiers import ATDP, JFT, NO_DP, REDACTED

BLIND = "regex:-number,-identifier"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The recipe on a very small model and a few notes, with secrets of two digits' worth of ranks."""
    texts = [{"text": f"on day {i} the nurse Ann wrote a note of {i * i} words"} for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    table: dict[str, Any] = tomllib.loads((HERE / "atdp-tiers.toml").read_text())
    table["privacy"] = {"epsilon": 50.0, "delta": 1e-3}
    table["model"] |= {"name": "random:llama", "rank": 2, "targets": "q_proj,v_proj", "max-length": 48}
    table["data"] = {
        "source": f"jsonl:{tmp_path / 'texts.jsonl'}", "partition": "iid", "validation-records": 8, "test-records": 12,
        "canaries": 4, "canary-kind": "six-digit", "canary-copies": 2, "cache": str(tmp_path / "cache"),
    }  # fmt: skip
    for phase in table["phases"]:
        phase |= {"epochs": 1} if phase["kind"] == "ordinary" else {"steps": 2, "batch-size": 16}
    monkeypatch.setattr("simulations.benchmarks.papers.atdp.frontier.LENGTH", 2)
    monkeypatch.setattr("simulations.benchmarks.papers.atdp.frontier.secrets", lambda *_: ["17", "42", "99", "05"])
    return table


def test_arms_share_what_no_detector_changes(recipe: dict[str, Any]) -> None:
    plain: list[Any] = []
    rows = []
    for detector in ("regex", BLIND):
        recipe["data"]["detector"] = detector
        found = tiers.measured(parse_phases(recipe), 8, plain)
        assert len(plain) == 1
        rows += [{"seed": 0, "detector": detector, "machine": "m", "commit": "c", **row} for row in found]
    of = {(row["detector"], row["arm"]): row for row in rows}
    assert [row["arm"] for row in rows[:4]] == [NO_DP, ATDP, REDACTED, JFT]
    assert of["regex", NO_DP]["bits"] == of[BLIND, NO_DP]["bits"]
    assert of["regex", REDACTED]["perplexity"] != of[BLIND, REDACTED]["perplexity"]
    assert of["regex", JFT]["secrets_found"] == 1.0
    assert of[BLIND, JFT]["secrets_found"] == 0.0
    shown = tiers.table({"rows": rows})
    assert "| `regex` | 100% |" in shown
    assert BLIND not in shown  # only the control and the tiers have lines


def test_a_secret_is_found_where_all_its_digits_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        def spans(self, texts: list[str]) -> list[tuple[Span, ...]]:
            return [(Span(9, 15, "ID"),), (Span(9, 12, "ID"),), ()]

    monkeypatch.setattr(tiers, "make_detector", lambda _: Half())
    assert tiers.secrets_found("half", ["123456", "234567", "345678"], "six-digit") == pytest.approx(1 / 3)
