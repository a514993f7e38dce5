"""Comparison of docs/results/atdp.md on a very small model: every row, its guarantee, and whose exposure counts."""

import json
import tomllib
from pathlib import Path
from typing import Any

from server.runs.phase_config import parse_phases
from simulations.benchmarks.papers.atdp import chains
from simulations.benchmarks.papers.atdp.chains import ORDER, comparison

KINDS = dict(zip(ORDER, ["public", "none", "none", *["selective"] * 4, "record", "record"], strict=True))


def test_every_row_is_measured_and_says_what_it_guarantees(tmp_path: Path) -> None:
    texts = [{"text": f"on day {i} the nurse Ann wrote a note of {i * i} words"} for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    table: dict[str, Any] = tomllib.loads((chains.HERE / "atdp-small.toml").read_text())
    table["privacy"] = {"epsilon": 20.0, "delta": 1e-3}
    table["model"] |= {"name": "random:llama", "rank": 2, "targets": "q_proj,v_proj", "max-length": 48}
    table["data"] = {
        "source": f"jsonl:{tmp_path / 'texts.jsonl'}", "partition": "iid", "validation-records": 8, "test-records": 12,
        "canaries": 6, "canary-kind": "id-record", "canary-copies": 2, "cache": str(tmp_path / "cache"),
        "detector": chains.DETECTORS["missed"],
    }  # fmt: skip
    for phase in table["phases"]:
        phase |= {"epochs": 1} if phase["kind"] == "ordinary" else {"steps": 2, "batch-size": 16}
    rows = chains.cell_rows(parse_phases(table), test_records=8, candidates=31)
    assert {row["row"]: row["guarantee"] for row in rows} == KINDS
    found = {row["row"]: row for row in rows}
    for row in rows:
        assert row["perplexity"] > 1
        assert row["exposure_low"] <= row["exposure"] <= row["exposure_high"] + 1e-9
        assert 0 <= row["exposure"] <= row["exposure_cap"] == 5.0
        assert row["canaries"] == 6
    # a row with an ATDP phase goes on from the row without, and costs its own noise besides
    for name in ("no DP", "redacted", "JFT", "DP-SGD"):
        before, after = found[name], found[f"{name} + ATDP"]
        assert after["phases"][: len(before["phases"])] == before["phases"]
        assert after["cpu_seconds"] > before["cpu_seconds"]
        assert after["noise_epsilon"] >= before["noise_epsilon"]
    assert found["redacted"]["phases"][0] == found["JFT"]["phases"][0]  # trained once
    cell = {"preset": "p", "kind": "id-record", "detector": "missed", "seed": 0}
    assert all(f"| {name} |" in comparison({"rows": [cell | row for row in rows]}) for name in ORDER)
