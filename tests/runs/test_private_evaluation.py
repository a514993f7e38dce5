"""Runs that are evaluated on held-out clients, and runs that end with their best round."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client.data.prepared import PreparedData
from client.models.lora import adapter_layout, load_peft, read_spec
from client.models.tasks import Metrics
from client.worker import Job, Worker, make_engine
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import held_out
from server.evaluation.best_round import BestRound
from server.run_folder.names import BEST_FILE, LEDGER_FILE, RESULTS_FILE
from server.run_folder.telemetry import Telemetry, read_metrics, read_status
from server.run_folder.verify import verify_run
from server.runs.lifecycle import ending_words
from server.runs.loop import Loop
from simulations.engines.inprocess import run_inprocess
from simulations.report.page import render
from simulations.report.read_run import read_run
from strategies.controllers.fixed import Fixed
from strategies.messages.client_update import TrainRequest
from tests.cases.finished_runs import settings
from tests.cases.loop import Run, clients
from tests.cases.loop import settings as loop_settings
from tests.cases.runs import MakeRun

PRIVATE = {
    "privacy.unit": "client", "clients": 12, "sampling-rate": 0.5, "rounds": 4, "privacy.epsilon": 20.0,
    "evaluation.data": "private", "evaluation.held-out": 0.5, "evaluation.every": 2, "model.targets": "query,value",
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[bool, set[int]]:
    """Clients that a run asked: to train, and to measure."""
    found: dict[bool, set[int]] = {False: set(), True: set()}
    real = Worker._sum

    def noted(self: Worker, request: TrainRequest) -> Any:
        found[any(query.name == "accuracy" for query in request.plan.queries)] |= set(request.clients.tolist())
        return real(self, request)

    monkeypatch.setattr(Worker, "_sum", noted)
    return found


def make(place: Path, name: str = "run", **changed: Any) -> Path:
    folder = place / name
    folder.mkdir()
    run_inprocess(settings(place, "classification", "random:bert", **{**PRIVATE, **changed}), folder)
    return folder


def test_a_run_is_evaluated_on_clients_that_it_never_trains(tmp_path: Path, asked: dict[bool, set[int]]) -> None:
    folder = make(tmp_path)
    out = set(np.flatnonzero(held_out(12, 0.5, 0)).tolist())
    assert asked[True] == out
    assert asked[False] <= set(range(12)) - out
    records = read_metrics(folder)
    assert [record.round for record in records] == [1, 2, 3, 4], "the model of the start would cost a release"
    measured = [record for record in records if record.validation_loss is not None]
    assert [record.round for record in measured] == [2, 4]
    for record in measured:
        assert record.validation_accuracy_within is not None
        assert record.validation_loss_within == pytest.approx(2 * math.log(2) * record.validation_accuracy_within)
        assert f" +- {100 * record.validation_accuracy_within:.1f} %, loss " in str(record)
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        names = [(charge.event.label, charge.event.round) for charge in ledger.charges]
        assert ledger.not_private is None
    assert names == [("round", 1), ("round", 2), ("evaluation", 2), ("round", 3), ("round", 4), ("evaluation", 4)]
    results, statement = json.loads((folder / RESULTS_FILE).read_text()), verify_run(folder).statement()
    assert results["missing"] == {}
    assert results["validation_loss"] == measured[-1].validation_loss
    assert results["validation_accuracy_within"] == measured[-1].validation_accuracy_within
    assert statement is not None
    assert statement["epsilon"] <= 20.0
    assert "evaluation: loss, accuracy (2 charged)" in statement["covered"]


def exact_metrics(place: Path, folder: Path) -> list[Metrics]:
    """Of the adapter that a run serves, on the records of each client that it held out."""
    (cache,) = (path for path in (place / "cache").iterdir() if (path / "meta.json").is_file())
    data, spec = PreparedData.open(cache), read_spec(folder / "adapter")
    own = settings(place, "classification", "random:bert", **PRIVATE)
    job = Job(model="random:bert", task="classification", num_labels=2, spec=spec, local=own.local, data="", seed=0)
    model, _ = job.base.load(job.model, job.task, job.num_labels)
    vector, engine = load_peft(folder / "adapter", adapter_layout(model, spec)), make_engine(job)
    return [engine.evaluate(vector, data.client(i)) for i in np.flatnonzero(held_out(12, 0.5, 0))]


def test_without_noise_the_estimate_is_the_mean_over_held_out_clients(tmp_path: Path) -> None:
    """Of the adapter that is served, each client counting once with its loss clipped."""
    folder = make(tmp_path, **{"privacy.non-private": True, "privacy.noise": "insecure-zero", "evaluation.every": 4})
    found = exact_metrics(tmp_path, folder)
    record = read_metrics(folder)[-1]
    assert record.validation_loss == pytest.approx(
        np.mean([min(metrics.loss, 2 * math.log(2)) for metrics in found]), abs=1e-5
    )
    assert record.validation_accuracy == pytest.approx(np.mean([metrics.accuracy for metrics in found]), abs=1e-9)


def test_confusions_are_the_mean_shares_of_held_out_clients(tmp_path: Path) -> None:
    noiseless = {"privacy.non-private": True, "privacy.noise": "insecure-zero", "evaluation.every": 4}
    folder = make(tmp_path, **noiseless, **{"evaluation.confusion": True})
    found = np.array([metrics.confusion for metrics in exact_metrics(tmp_path, folder)], dtype=float)
    exact = (found / found.sum((1, 2), keepdims=True)).sum(0)
    results = json.loads((folder / RESULTS_FILE).read_text())
    assert np.abs(np.array(results["validation_confusion"]) - exact).max() <= 0.5, "counts of clients, rounded"
    record = read_metrics(folder)[-1]
    assert record.validation_confusion == tuple(map(tuple, results["validation_confusion"]))
    covered = json.loads((folder / "privacy.json").read_text())["covered"]
    assert "evaluation: counts, loss, accuracy (1 charged)" in covered


def test_confusions_cost_what_was_committed_and_are_shown(tmp_path: Path) -> None:
    folder = make(tmp_path, **{"evaluation.confusion": True})
    results = json.loads((folder / RESULTS_FILE).read_text())
    assert np.array(results["validation_confusion"]).shape == (2, 2)
    assert results["validation_confusion_within"] > 0
    assert verify_run(folder).statement()["epsilon"] <= 20.0
    assert "Clients held out by class (row) and answer (column), with noise: +-" in render(read_run(folder))


def test_tokens_are_the_clipped_counts_of_held_out_clients(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    noiseless = {"privacy.non-private": True, "privacy.noise": "insecure-zero", "evaluation.every": 4}
    changed = {**PRIVATE, **noiseless, "model.targets": "q_proj,v_proj", "evaluation.tokens": 31}
    run_inprocess(settings(tmp_path, "causal-lm", "random:llama", **changed), folder)
    (cache,) = (path for path in (tmp_path / "cache").iterdir() if (path / "meta.json").is_file())
    data = PreparedData.open(cache)
    counts = [int((data.client(i).lengths - 1).sum()) for i in np.flatnonzero(held_out(12, 0.5, 0))]
    assert min(counts) <= 31 < max(counts), "some are clipped"
    record, results = read_metrics(folder)[-1], json.loads((folder / RESULTS_FILE).read_text())
    assert record.validation_tokens == pytest.approx(sum(min(count, 31) for count in counts), rel=1e-5)
    assert results["validation_tokens"] == record.validation_tokens


def test_an_evaluation_that_is_lost_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is charged; the run goes on without it, and the ledger keeps its steps for the rounds to come."""
    told = Telemetry.round

    def dying(self: Telemetry, record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt
        told(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Telemetry, "round", dying)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    folder = tmp_path / "run"
    config = settings(tmp_path, "classification", "random:bert", **PRIVATE)
    run_inprocess(config, folder, keys={"resume": str(folder)})
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        evaluated = [charge.event.round for charge in ledger.charges if charge.event.label == "evaluation"]
    assert evaluated == [2, 4]
    assert [record.round for record in read_metrics(folder) if record.validation_loss is not None] == [4]


# --- the best round ---------------------------------------------------------------------------------------------------

LOSSES = [3.0, 1.0, 2.0, 1.5, 1.2, 0.5]


@dataclass
class Measured(Run):
    """A run of given public losses, which keeps its best round."""

    patience: int = 0
    ends: list[torch.Tensor] = field(default_factory=list)
    served: dict[int, torch.Tensor] = field(default_factory=dict)
    the_loop: Loop | None = None

    def evaluate(self, adapter: torch.Tensor, split: str) -> Metrics:
        round = max(self.last.state.round, 0) if bool(adapter.any()) else 0
        self.served[round] = adapter.clone()
        return Metrics(LOSSES[round - 1] if round else 4.0, 0.5, 10)

    def loop(self, ledger: Ledger, telemetry: Telemetry) -> Loop:
        made = super().loop(ledger, telemetry)
        made.best, made.complete = BestRound(self.folder, keeps=True, patience=self.patience), self.ends.append
        self.the_loop = made
        return made


def measured(start: MakeRun, name: str, patience: int = 0, fail_in: tuple[int, ...] = ()) -> tuple[Measured, Ledger]:
    plain, ledger = start(name, loop_settings(len(LOSSES)), Fixed(0.5))
    return Measured(
        plain.folder, plain.config, plain.controller, app=clients(fail_in=fail_in), patience=patience
    ), ledger


def test_a_run_ends_with_its_best_round(start: MakeRun) -> None:
    run, ledger = measured(start, "whole")
    assert run.go(ledger) is None
    assert run.ends[-1].equal(run.served[6]), "the last round is the best one here"
    run, ledger = measured(start, "patient", patience=3)
    assert run.go(ledger) is None
    assert len(ledger.charges) == 5, "rounds 3, 4 and 5 were no better than round 2"
    assert run.ends[-1].equal(run.served[2])
    assert run.the_loop is not None
    assert ending_words(run.the_loop) == (
        "ended early: 3 evaluations in a row without a lower loss; "
        "round 2 is kept, which had the lowest validation loss"
    )


def test_a_resumed_run_keeps_its_best_round(start: MakeRun) -> None:
    run, ledger = measured(start, "resumed", patience=3, fail_in=(4,))
    with pytest.raises(Exception, match="round 4: too few messages"):
        run.go(ledger)
    run.app = clients()
    run.go(ledger, resume=True)
    assert run.ends[-1].equal(run.served[2])
    assert max(run.served) == 5
    (run.folder / BEST_FILE).unlink()
    with pytest.raises(CorruptRun, match="holds no adapter of round 2"):
        run.go(ledger, resume=True)


def test_what_is_written_behind_the_record_is_written_again(start: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ledger = measured(start, "broken", patience=3)

    def broken(self: BestRound, round: int, loss: float | None, served: torch.Tensor) -> None:
        if round == 2:
            raise KeyboardInterrupt
        real(self, round, loss, served)

    real = BestRound.take
    with monkeypatch.context() as patch:
        patch.setattr(BestRound, "take", broken)
        with pytest.raises(KeyboardInterrupt):
            run.go(ledger)
    run.go(ledger, resume=True)
    assert run.ends[-1].equal(run.served[2])


def test_a_private_run_keeps_the_round_that_its_estimates_choose(tmp_path: Path) -> None:
    folder = make(tmp_path, **{"evaluation.keep": "best", "evaluation.every": 1, "privacy.epsilon": 30.0})
    records = read_metrics(folder)
    best = min(records, key=lambda record: record.validation_loss or 0.0)
    results, status = json.loads((folder / RESULTS_FILE).read_text()), read_status(folder)
    assert results["kept_round"] == best.round
    assert results["validation_loss"] == best.validation_loss
    assert status is not None
    assert status.message == f"4 rounds done; round {best.round} is kept, which had the lowest validation loss"
