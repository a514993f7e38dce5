"""Recipes: what each guarantees, what its noise costs, one ledger for all private phases, stamped artefacts."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting.dp_event import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from client.models.base import load_base, load_tokenizer
from client.models.lora import adapter_layout, load_peft
from privacy.accountants import composition
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, parse
from server.run_folder.names import STAMP_FILE
from server.run_folder.telemetry import read_metrics, read_status
from server.runs.guarantee import guarantee_of
from server.runs.phase_config import load_phases, parse_phases
from server.runs.phase_plan import DpPhase, NonPrivatePhase, Phase, PhasesConfig, PlannedNoise, plan_noise
from server.runs.phases import PhasesRun
from tests.cases.phases import train

POPULATION = 400
PLAIN = NonPrivatePhase("plain")
REDACTED = NonPrivatePhase("redacted", text="redacted")
DP = DpPhase("dp", steps=8, batch_size=40)
ATDP = DpPhase("atdp", text="weighted", steps=3, batch_size=40, noise_multiplier=4.0, controller="rise-reset")


def in_phases(*phases: Phase, epsilon: float = 1.0, delta: float = 1e-4, detector: str = "regex") -> PhasesConfig:
    privacy = {"unit": "record", "epsilon": epsilon, "delta": delta}
    table = {"clients": 1, "sampling-rate": 1.0, "privacy": privacy, "data": {"detector": detector}}
    return PhasesConfig(parse(table), phases)


@functools.cache
def _noise_of(names: tuple[str, ...]) -> PlannedNoise:
    phases = [phase for phase in (DP, ATDP) if phase.name in names] or [PLAIN]
    return plan_noise(in_phases(*phases), POPULATION)


def noise_of(phases: tuple[DpPhase, ...]) -> PlannedNoise:
    """Calibrating takes seconds; ordinary phases change nothing of it."""
    return _noise_of(tuple(phase.name for phase in phases))


CASES = {
    "no DP": ((PLAIN,), "none"),
    "no DP, ATDP": ((PLAIN, ATDP), "none"),
    "redacted": ((REDACTED,), "selective"),
    "redacted, ATDP": ((REDACTED, ATDP), "selective"),
    "JFT": ((REDACTED, DP), "selective"),
    "JFT, ATDP": ((REDACTED, DP, ATDP), "selective"),
    "DP-SGD": ((DP,), "record"),
    "DP-SGD, ATDP": ((DP, ATDP), "record"),
    "weights without noise": ((NonPrivatePhase("weighted", text="weighted"),), "none"),
}


@pytest.mark.parametrize("name", CASES)
def test_only_runs_whose_every_phase_is_private_print_a_record_level_epsilon(name: str) -> None:
    phases, kind = CASES[name]
    made = in_phases(*phases)
    planned = noise_of(made.private_phases)
    found = guarantee_of(made, planned)
    assert found.kind == kind
    assert (found.record_epsilon is not None) == (found.not_private is None) == (kind == "record")
    assert found.to_json()["record_epsilon"] == (planned.epsilon if kind == "record" else "infinite")
    assert (found.selective_epsilon is not None) == (kind == "selective")
    assert found.sentence.startswith("NOT PRIVATE") == (kind != "record")
    assert ("selective-DP (policy regex, detector assumed perfect)" in found.sentence) == (kind == "selective")
    if kind == "selective":
        # neighbours replace the sensitive spans of a record, which costs more than adding or removing one
        assert found.selective_epsilon is not None
        assert found.selective_epsilon > planned.epsilon or not planned.floor
    if DP in phases:
        assert 0.98 < planned.epsilon <= 1.0


def test_the_private_phases_compose_and_the_calibrated_one_leaves_room_for_the_others() -> None:
    alone, both = noise_of((DP,)), noise_of((DP, ATDP))
    assert both.multipliers[0][0] > alone.multipliers[0][0]
    assert len(both.multipliers) == 2
    shares = [z / 4.0 for z in both.multipliers[1]]
    assert shares[0] == 1.0
    assert max(shares) > 1.0
    exact = composition.epsilon(both.floor, 1e-4)
    assert exact <= both.epsilon < exact + 2e-4  # rounded up, never down
    assert [step.count for step in both.floor] == [8, 1, 1, 1]
    # order in the ledger is order in the file
    given = plan_noise(in_phases(ATDP, replace(DP, noise_multiplier=2.0)), POPULATION)
    assert [step.noise_multiplier for step in given.floor] == [*both.multipliers[1], 2.0]


def test_phases_of_different_batch_sizes_are_a_sampling_rate_that_varies() -> None:
    """DP-Adam-AC's q_t = B_t / N: what such phases cost is what dp_accounting makes of the two events."""
    options = {"source": "histogram"}
    small = DpPhase(
        "small", steps=4, batch_size=40, noise_multiplier=2.0, controller="percentile", controller_options=options
    )
    large = replace(small, name="large", steps=3, batch_size=80, noise_multiplier=0.0)
    planned = plan_noise(in_phases(small, large, epsilon=2.0), POPULATION)
    assert [(step.sampling.rate, step.count) for step in planned.floor] == [(0.1, 4), (0.2, 3)]
    steps = [
        SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(phase[0])), len(phase))
        for rate, phase in zip((0.1, 0.2), planned.multipliers, strict=True)
    ]
    both = PLDAccountant().compose(ComposedDpEvent(steps)).get_epsilon(1e-4)
    assert both <= planned.epsilon < both + 2e-4
    assert 1.99 < planned.epsilon <= 2.0  # calibrated to what the first phase leaves
    assert PLDAccountant().compose(steps[0]).get_epsilon(1e-4) < both


def test_given_noise_is_reported_as_what_it_costs() -> None:
    planned = plan_noise(in_phases(ATDP, epsilon=8.0), POPULATION)
    assert 0 < planned.epsilon < 2.0
    with pytest.raises(ValueError, match=r"epsilon .*more than 0.05"):
        plan_noise(in_phases(ATDP, epsilon=0.05), POPULATION)


def test_phases_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="missing in dp and other"):
        in_phases(DP, DpPhase("other", steps=2))
    with pytest.raises(ValueError, match="names of their own"):
        in_phases(PLAIN, PLAIN)
    with pytest.raises(ValueError, match="phases must be non-empty"):
        in_phases()
    with pytest.raises(ValueError, match="all of them find"):
        in_phases(REDACTED, replace(REDACTED, name="again", detector="regex:-number"))
    with pytest.raises(ValueError, match="text must be one of"):
        NonPrivatePhase("x", text="masked")
    for phase in (NonPrivatePhase, DpPhase):  # a phase that reads the original texts as well
        with pytest.raises(ValueError, match=r"detector = 'high-entitty': .*regex"):
            phase("x", detector="high-entitty")
    with pytest.raises(ValueError, match="regex has no pattern 'names'"):
        in_phases(DP, detector="regex:-names")
    with pytest.raises(ValueError, match=r"batch_size .*units"):
        plan_noise(in_phases(DP), 10)
    given = replace(DP, noise_multiplier=4.0)
    for phases in ((DP,), (given,), (REDACTED, given)):
        with pytest.raises(ValueError, match=r"delta .*0\.0025, got 0\.5"):
            plan_noise(in_phases(*phases, delta=0.5), POPULATION)


TABLE: dict[str, Any] = {
    "name": "small",
    "privacy": {"epsilon": 6.0, "delta": 1e-3},
    "model": {"name": "random:llama", "task": "causal-lm", "rank": 2, "targets": "q_proj,v_proj", "max-length": 48},
    "data": {"partition": "iid", "validation-records": 8, "test-records": 8, "detector": "regex:-identifier"},
    "phases": [
        {"kind": "ordinary", "name": "redacted", "text": "redacted", "batch-size": 8, "learning-rate": 0.01},
        {
            "kind": "private", "name": "dp", "steps": 3, "batch-size": 16, "noise-multiplier": 2.0,
            "controller-options": {"clip-norm": 0.1},
        },
        {
            "kind": "private", "name": "atdp", "text": "weighted", "steps": 2, "batch-size": 16,
            "noise-multiplier": 6.0, "controller": "rise-reset", "optimizer": "fedavg",
            "optimizer-options": {"learning-rate": 0.1}, "controller-options": {"clip-norm": 0.1, "seed": 3},
        },
    ],
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    rows = [{"text": f"the nurse saw Ann Smith on ward {1000 + i} at {i % 12} o'clock"} for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"source": f"jsonl:{tmp_path / 'texts.jsonl'}", "cache": str(tmp_path / "cache")}
    return {**TABLE, "data": {**TABLE["data"], **source}}


def test_jft_with_atdp_runs_on_one_ledger_and_every_artefact_says_it_is_not_private(
    table: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    results = train(parse_phases(table), folder)
    run = PhasesRun(parse_phases(table))
    assert [phase["name"] for phase in results["phases"]] == ["redacted", "dp", "atdp"]
    assert [(record.phase, record.round, record.rounds) for record in read_metrics(folder)] == [
        ("start", 0, 5),
        ("round", 3, 5),
        ("round", 5, 5),
    ]
    assert read_status(folder).state == "completed"
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [event.round for event in ledger.events] == [1, 2, 3, 1, 2]
        multipliers = [z for phase in run.planned.multipliers for z in phase]
        assert [event.effective_noise_multiplier for event in ledger.events] == pytest.approx(multipliers)
        assert all(charge.released_at for charge in ledger.charges)
        assert ledger.not_private == run.guarantee.not_private is not None
        assert math.isinf(ledger.epsilon_spent())
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["record_epsilon"] == "infinite"
    assert statement["private"] is False
    assert statement["ledger"]["private"] is False
    assert statement["policy"] == "regex:-identifier"
    assert json.loads((folder / "results.json").read_text())["not_private"] == run.guarantee.not_private
    for file in (STAMP_FILE, f"adapter/{STAMP_FILE}", "adapter/README.md"):
        assert "NOT PRIVATE at record level (epsilon infinite)" in (folder / file).read_text()
    kept = load_peft(folder / "adapter", adapter_layout(load_base("random:llama", "causal-lm")[0], run.assembly.spec))
    assert not torch.equal(kept, run.assembly.start)
    tokenizer = load_tokenizer("random:llama")
    first = {use: tokenizer.decode(data.train.select([0]).tokens) for (use, _), data in run.data.items()}
    assert "Ann Smith" in first["none"] == first["weights"]
    assert "saw <MASK> on ward <MASK> at" in first["redaction"]


def test_a_phase_whose_controller_cannot_plan_is_refused_before_anything_is_charged(table: dict[str, Any]) -> None:
    phase = {
        "kind": "private", "name": "few", "steps": 2, "batch-size": 8, "noise-multiplier": 1.5,
        "controller": "percentile", "controller-options": {"source": "histogram"},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="phase 'few', controller = 'percentile': "):
        PhasesRun(parse_phases({**table, "phases": [phase]}))


def test_a_run_of_private_phases_has_a_record_level_guarantee_and_no_stamp(
    table: dict[str, Any], tmp_path: Path
) -> None:
    folder, config = tmp_path / "run", parse_phases({**table, "phases": table["phases"][1:]})
    train(config, folder)
    run = PhasesRun(config)
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["private"] is True
    assert statement["record_epsilon"] == run.guarantee.record_epsilon == run.planned.epsilon <= 6.0
    assert statement["ledger"]["epsilon"] <= run.planned.epsilon
    assert not (folder / STAMP_FILE).exists()


def test_wrong_files_are_refused_in_words(table: dict[str, Any], tmp_path: Path) -> None:
    def with_phase(**changes: Any) -> dict[str, Any]:
        return {**table, "phases": [{**table["phases"][1], **changes}]}

    for message, wrong in {
        "there are none": {**table, "phases": []},
        "did you mean steps": with_phase(stepps=3),
        "did you mean 'private'": with_phase(kind="privat"),
        "steps must be an integer >= 1": with_phase(steps=0),
        "must be of type int": with_phase(steps="many"),
        "must be a table of options": with_phase(**{"controller-options": 3}),
        "every phase says what text it reads": {**table, "data": {**table["data"], "sensitive": "weights"}},
        "a run in phases trains at one site": {**table, "privacy": {**table["privacy"], "unit": "client"}},
        "served-average = 0.9 has no effect in a run in phases": {**table, "strategy": {"served-average": 0.9}},
        "site.sampling-level = 'example' has no effect in a run in phases": {
            **table,
            "privacy": {**table["privacy"], "unit": "group"},
            "data": {**table["data"], "unit-column": "who"},
            "site": {"sampling-level": "example", "records-per-unit": 2},
        },
        "privacy.noise = 'discrete' has no effect": {**table, "privacy": {**table["privacy"], "noise": "discrete"}},
        "least-words = 4 must be 0": {**table, "data": {**table["data"], "least-words": 4}},
        "privacy.epsilonn": {**table, "privacy": {"epsilonn": 1.0}},
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_phases(wrong)
    with pytest.raises(ConfigError, match="does not exist"):
        load_phases(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[[phases")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_phases(tmp_path / "broken.toml")
