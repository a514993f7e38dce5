"""The curves of docs/results/atdp.md: what each arm does to the start, and what is read off a curve."""

import json
import tomllib
from typing import Any

import pytest
import torch

from server.runs.phase_config import parse_phases
from simulations.benchmarks.papers.atdp import curves
from simulations.benchmarks.papers.atdp.frontier import BASE, HERE, START, STRENGTHS, Start, variant
from strategies.controllers.schedules import RiseReset


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A very small model, fine-tuned on a few notes."""
    folder = tmp_path_factory.mktemp("frontier")
    texts = [{"text": f"on day {i} the nurse Ann wrote a note of {i * i} words"} for i in range(60)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    table: dict[str, Any] = tomllib.loads((HERE / "atdp-frontier.toml").read_text())
    table["privacy"] = {"epsilon": 50.0, "delta": 1e-3}
    table["model"] |= {"name": "random:llama", "rank": 2, "targets": "q_proj,v_proj", "max-length": 48}
    table["data"] = {
        "source": f"jsonl:{folder / 'texts.jsonl'}", "partition": "iid", "validation-records": 8, "test-records": 12,
        "canaries": 4, "canary-kind": "six-digit", "canary-copies": 2, "cache": str(folder / "cache"),
        "detector": "regex",
    }  # fmt: skip
    table["phases"][0] |= {"epochs": 2}
    table["phases"][1] |= {"steps": 3, "batch-size": 16}
    return Start(parse_phases(table), 8, folder / "start")


def test_noise_alone_reads_no_record(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a record was read")

    run = start._phase_run("noise alone")
    monkeypatch.setattr(run.engine, "per_record_gradients", refused)
    moved = start.adapter_of("noise alone", 1e-3)
    assert not torch.equal(moved, start.adapter)
    assert run.guarantee.not_private is not None
    with pytest.raises(AssertionError, match="a record was read"):
        start.adapter_of("ATDP", 1e-3)


def test_shrinking_goes_from_the_start_to_the_base_model(start: Start) -> None:
    torch.testing.assert_close(start.adapter_of("shrinking", 1.0), start.adapter)
    torch.testing.assert_close(start.adapter_of("shrinking", 0.0), start.base)
    assert torch.equal(start.adapter_of(START, 0), start.adapter)
    assert torch.equal(start.adapter_of(BASE, 0), start.base)


def test_variants_change_what_they_say(start: Start) -> None:
    assert variant(start.atdp, "unweighted").text == "original"
    constant = variant(start.atdp, "constant noise")
    options = {name.replace("-", "_"): value for name, value in start.atdp.controller_options.items()}
    drawn = [start.atdp.noise_multiplier * share for share in RiseReset(**options).profile(start.atdp.steps)]
    assert constant.noise_multiplier**2 * len(drawn) == pytest.approx(sum(each**2 for each in drawn))
    assert (constant.text, constant.controller) == ("weighted", "fixed")
    assert variant(start.atdp, "ATDP") == start.atdp


def test_exposure_is_of_every_planted_secret(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulations.benchmarks.papers.atdp.frontier.LENGTH", 2)
    monkeypatch.setattr("simulations.benchmarks.papers.atdp.frontier.secrets", lambda *_: ["17", "42", "99"])
    found = start.measured(start.adapter)
    assert len(found["bits"]) == 3
    assert all(0 <= bits <= 6.65 for bits in found["bits"])  # log2 100
    assert found["perplexity"] > 1


FALLING = [(1.0, 16.0), (1.1, 12.0), (1.3, 4.0)]


@pytest.mark.parametrize(
    ("curve", "limit", "bits"),
    [
        (FALLING, 0.05, 14.0),
        (FALLING, 0.2, 8.0),
        (FALLING, 0.5, 4.0),  # behind the end, the least there is
        ([(1.0, 16.0), (0.9, 10.0), (0.95, 6.0)], 0.05, 6.0),  # perplexity falls: what a user would take
        ([(1.0, 16.0), (1.2, 18.0)], 0.1, 16.0),  # never more than the start's, which costs nothing
        ([(1.0, 16.0), (1.2, 8.0), (1.1, 4.0)], 0.15, 4.0),  # a curve that comes back
    ],
)
def test_what_is_read_off_a_curve(curve: curves.Curve, limit: float, bits: float) -> None:
    assert curves.least_exposure(curve, limit) == pytest.approx(bits)


def rows(above: dict[str, float]) -> list[dict[str, Any]]:
    """Points of three seeds, on which an arm lies so many bits above a common line."""
    found = []
    for seed in range(3):
        for arm, strengths in {START: (0,), BASE: (0,), **STRENGTHS}.items():
            for place, strength in enumerate(strengths, start=1):
                rise = {START: 0.0, BASE: 0.5}.get(arm, 0.1 * place)
                bits = 16.0 - 20 * rise + above.get(arm, 0.0) + 0.1 * seed * (arm in above)
                found.append(
                    {
                        "seed": seed, "arm": arm, "strength": strength, "perplexity": 30 * (1 + rise), "exposure": bits,
                        "test_tokens": 1000, "cpu_seconds": 10.0, "machine": "2 cores", "commit": "abc",
                    }
                )  # fmt: skip
    return found


def test_tables_find_an_arm_that_lies_above_the_others() -> None:
    results = {"rows": rows({"ATDP": 2.0})}
    lines = {line.split("|")[1].strip(): line for line in curves.differences(results).splitlines()}
    assert lines["ATDP less noise alone"].endswith("| above | 3 |")
    table = curves.exposures(results)
    assert all(f"| {arm} |" in table for arm in STRENGTHS)
    assert "Not complete" not in table


def test_an_incomplete_arm_is_named_and_not_compared() -> None:
    results = {"rows": [row for row in rows({}) if (row["arm"], row["seed"]) != ("unweighted", 2)]}
    assert "Not complete for every seed: unweighted" in curves.exposures(results)
