"""The formula of `lacquer plan` against numbers worked out by hand, and its defaults against what was measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from server.config.load import ConfigError
from simulations.planning.signal import (
    agreement_of,
    default_agreement,
    given_agreement,
    least_signal,
    measured_agreement,
    signal_to_noise,
)

RESULTS = Path(__file__).resolve().parents[3] / "simulations" / "benchmarks" / "results"


def test_the_formula() -> None:
    # 10 * 0.126 * 50 / (0.9395 * sqrt(3842) = 58.234)
    assert signal_to_noise((0.9395,) * 100, 50.0, 3842, 0.126) == pytest.approx(1.0818, abs=1e-4)
    # rounds of unequal noise count by 1/z^2
    assert signal_to_noise((1.0, 2.0), 10.0, 4, 0.5) == pytest.approx(0.5 * 10 / 2 * math.sqrt(1.25))


@pytest.mark.parametrize(
    "better",
    [
        {"noise_multipliers": (1.9,) * 10},
        {"noise_multipliers": (2.0,) * 11},
        {"cohort": 21.0},
        {"dimension": 99},
        {"agreement": 0.11},
    ],
)
def test_what_raises_it(better: dict[str, object]) -> None:
    now = {"noise_multipliers": (2.0,) * 10, "cohort": 20.0, "dimension": 100, "agreement": 0.1}
    assert signal_to_noise(**{**now, **better}) > signal_to_noise(**now)  # type: ignore[arg-type]


def test_the_agreement_of_larger_clients_rises_to_a_limit() -> None:
    assert agreement_of(1, between=0.0, within=99.0) == pytest.approx(0.1)
    assert agreement_of(10, between=3.0, within=50.0) == pytest.approx(1 / 3)
    assert agreement_of(10**9, between=3.0, within=50.0) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, math.nan])
def test_an_agreement_is_a_share(value: float) -> None:
    with pytest.raises(ValueError, match="agreement"):
        given_agreement(value)


def test_the_defaults_are_what_was_measured() -> None:
    cases = {case["case"]: case for case in json.loads((RESULTS / "agreement.json").read_text())["cases"]}
    for records in (2, 10, 40):
        name = f"SST-2, {records} records a client"
        assert default_agreement("classification", records).value == pytest.approx(cases[name]["both"], rel=0.1)
    diabetes = cases["Diabetes 130, one record"]
    assert default_agreement("causal-lm", 1).value == pytest.approx(diabetes["both"], rel=0.1)


def test_hopeless_is_where_public_records_alone_were_better() -> None:
    group, *_ = json.loads((RESULTS / "planner.json").read_text())["groups"]
    controllers = json.loads((RESULTS / "controllers.json").read_text())["cells"]
    floor = [cell["test_accuracy"] for cell in controllers if "-sst2/floor" in cell["cell"]]
    public = sum(floor) / len(floor)
    below = [row["measured"] for row in group["rows"] if row["signal"] < least_signal("classification")]
    above = [row["measured"] for row in group["rows"] if row["signal"] >= least_signal("classification")]
    assert max(below) < public < sum(above) / len(above)


def _with_norms(folder: Path, update: float, noise: float) -> Path:
    """The run, its releases of these norms."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        if record["phase"] == "round":
            record |= {"update_norm": update, "noise_norm": noise, "clip_bound": 1.0}
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_agreement_is_read_from_releases(record_run: Callable[..., Path]) -> None:
    folder = _with_norms(record_run(), math.sqrt(0.25 + 1 / 50 + 0.09), 0.3)  # a = 0.5, m = 50
    assert measured_agreement(folder).value == pytest.approx(0.5)


def test_noise_is_not_taken_for_agreement(record_run: Callable[..., Path]) -> None:
    folder = _with_norms(record_run(), 10.0, 9.999)
    with pytest.raises(ConfigError, match="cannot be told from their noise"):
        measured_agreement(folder)
