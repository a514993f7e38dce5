"""Small recorded runs, as the server leaves them."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.commitment import Commitment, FloorStep
from privacy.events import Component, Poisson, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from server.config.load import parse
from server.config.schema import RunConfig
from server.run_folder.provenance import write_environment
from server.run_folder.round_record import RoundRecord, released_values
from server.run_folder.telemetry import State, Telemetry
from simulations.report.read_run import Run


def recorded_metrics(
    done: int, rounds: int, *, histogram: bool = True, not_private: str | None = None
) -> list[RoundRecord]:
    """A histogram and `done` training rounds whose every number is known: accuracy 0.5 + 0.01*round and so on."""
    first = RoundRecord(
        phase="histogram",
        round=0,
        rounds=rounds,
        epsilon_spent=0.125,
        epsilon_budget=2.0,
        noise_multiplier=10.0,
        expected_cohort=1000.0,
        seconds=4.0,
        not_private=not_private,
    )
    training = [
        RoundRecord(
            phase="round",
            round=number,
            rounds=rounds,
            clip_bound=0.5 / number,
            noise_multiplier=1.5,
            epsilon_spent=0.2 * number + 0.001,
            epsilon_budget=2.0,
            validation_loss=1.0 / number,
            validation_accuracy=0.5 + 0.01 * number,
            update_norm=2.0,
            noise_norm=1.5,
            signal_estimate=math.sqrt(2.0**2 - 1.5**2),
            expected_cohort=50.0,
            seconds=2.5,
            extra=released_values({"ratio": 0.75}),
            not_private=not_private,
        )
        for number in range(1, done + 1)
    ]
    return [first, *training] if histogram else training


def recorded_start(rounds: int, not_private: str | None = None) -> RoundRecord:
    """The model before the rounds of :func:`recorded_metrics`."""
    return RoundRecord(
        phase="start",
        round=0,
        rounds=rounds,
        epsilon_spent=0.0,
        epsilon_budget=2.0,
        noise_multiplier=0.0,
        expected_cohort=0.0,
        seconds=0.5,
        validation_loss=1.5,
        validation_accuracy=0.5,
        not_private=not_private,
    )


CONFIG = parse({"name": "small", "rounds": 5, "privacy": {"epsilon": 2.0}, "model": {"rank": 8}})
LABELS = ["card", "cash", "direct debit", "loan", "mortgage", "savings", "something <else>"]


def record_run_in(
    parent: Path, done: int = 5, state: State = "completed", not_private: str | None = None, ledger: bool = True
) -> Path:
    """Write a run folder below `parent` and return it."""
    folder = parent / "small-1"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.to_toml())
    write_environment(folder)
    with Telemetry(folder, tensorboard=False) as telemetry:
        if ledger or done:  # a run records nothing before it has a ledger
            for item in (recorded_start(5, not_private), *recorded_metrics(done, 5, not_private=not_private)):
                telemetry.round(item)
        telemetry.status(state, "worker 2 did not answer" if state == "failed" else "all done")
    if ledger:
        _write_ledger(folder / "ledger.jsonl", done, state, not_private)
    if state == "completed":
        _write_outcome(folder)
    return folder


@pytest.fixture
def run_config() -> RunConfig:
    return CONFIG


@pytest.fixture
def record_run(tmp_path: Path) -> Callable[..., Path]:
    """:func:`record_run_in` a fresh folder."""
    return functools.partial(record_run_in, tmp_path)


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that completed; tests read it and change nothing."""
    return record_run_in(tmp_path_factory.mktemp("complete"))


GOOD = {
    "test_accuracy": 0.8,
    "majority_accuracy": 0.3,
    "validation_accuracy": 0.6,
    "dimension": 100,
    "label_names": ["a", "b", "c"],
}


def finished(results: dict[str, Any] | None = None, **changes: object) -> Run:
    """A run of 8 rounds that learnt, in memory."""
    metrics = [recorded_start(8), *(settled(record) for record in recorded_metrics(8, 8, histogram=False))]
    run = Run(
        path=Path("run"),
        config=parse({"clients": 1000, "sampling-rate": 0.05}),
        phases=(),
        status=None,
        metrics=metrics,
        guarantee=None,
        results={**GOOD, **(results or {})},
        environment=None,
        account=None,
        facts=None,
        resumed=(),
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def settled(record: RoundRecord) -> RoundRecord:
    return replace(record, clip_bound=0.5)


def _write_ledger(path: Path, done: int, state: State, not_private: str | None) -> None:
    everyone, cohort = Poisson(1.0, 1000), Poisson(0.05, 1000)
    floor = (FloorStep("histogram", everyone, 10.0), FloorStep("round", cohort, 1.5, 5))
    commitment = Commitment("client", "add_remove", 1000, 2.0, 1e-5, floor=floor, not_private=not_private)
    with Ledger.create(path, commitment) as ledger:
        votes = ReleaseEvent("histogram", 0, everyone, (Component("votes", 1.0, 10.0, 13),))
        ledger.note_release(ledger.charge(votes))
        for number in range(1, done + 1):
            update = ReleaseEvent("round", number, cohort, (Component("update", 1.0, 1.5, 9000),))
            ledger.note_release(ledger.charge(update))
        if state == "completed":
            path.with_name("privacy.json").write_text(json.dumps(privacy_statement(ledger)))


def _write_outcome(folder: Path) -> None:
    from server.evaluation.card import how_to_use  # loads transformers

    results = {
        "test_accuracy": 0.8125,
        "test_loss": 0.5,
        "validation_accuracy": 0.55,
        "test_macro_f1": 0.8,
        "majority_accuracy": 0.25,
        "seconds": 125.0,
        "rounds_done": 5,
        "dimension": 9000,
        "model": "minilm",
        "label_names": LABELS,
    }
    (folder / "results.json").write_text(json.dumps(results))
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "README.md").write_text(f"# Adapter\n\n{how_to_use(CONFIG, LABELS)}")
