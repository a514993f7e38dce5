"""Personalisation: it helps a client whose records differ, nothing of it leaves, the statistic is bounded and paid."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from typer.testing import CliRunner

from client.data.prepare import prepare
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from privacy.audit.two_world import TwoWorldAudit, two_world
from privacy.ledger.ledger import Ledger
from server.evaluation import personal
from server.evaluation.finished import read_finished
from server.evaluation.personal import ask_gain, gain_rows, price_gain, split_own
from server.runs.assembly import data_spec
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from tests.cases.finished_runs import base_model, run_of_every_task, settings

MakeRun = Callable[[str], Path]
LOCAL = LocalTraining(optimizer="adamw", learning_rate=0.01, batch_size=4, epochs=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    return run_of_every_task(tmp_path_factory.mktemp("personalise"))


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 clients, of whom some have one record."""
    place = tmp_path_factory.mktemp("simulation")
    task = "classification"
    config = settings(
        place, task, str(base_model(place / "base", "bert", task)),
        **{"privacy.unit": "client", "clients": 20, "sampling-rate": 0.5, "site.batch-size": 64},
    )  # fmt: skip
    (place / "run").mkdir()
    run_inprocess(config, place / "run")
    return place / "run"


@pytest.mark.parametrize("count", range(7))
def test_records_are_trained_on_or_judge(count: int) -> None:
    from client.data.records import Records

    records = Records.from_lists([[number] for number in range(count)])
    trained, judged = split_own(records)
    assert [*trained.tokens[trained.offsets[:-1]], *judged.tokens[judged.offsets[:-1]]] == list(range(count))
    assert len(judged) >= (count > 1)
    assert len(trained) >= min(count, 1)


def test_own_training_helps_and_stays_with_its_owner(made: MakeRun, tmp_path: Path) -> None:
    run, mine = made("classification"), tmp_path / "mine.jsonl"
    rows = [{"prompt": f"{'ab'[number % 2] * 4} number {number}?", "side": 1 - number % 2} for number in range(30)]
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))  # this client means the opposite
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = ["personalise", str(run), "--data", str(mine), "--folder", str(tmp_path / "own")]
    done = CliRunner().invoke(app, [*words, "--epochs", "10", "--learning-rate", "0.01"])
    assert done.exit_code == 0, done.output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    told = re.search(r"(\d\.\d{4})\s+before,\s+(\d\.\d{4})\s+after", done.output)
    assert told is not None, done.output
    assert float(told[2]) < float(told[1])
    assert "do not release it" in (tmp_path / "own" / "NOT-PRIVATE.txt").read_text()
    assert not (tmp_path / "own" / "privacy.json").exists()
    assert not (tmp_path / "own" / "README.md").exists()
    base, _ = load_base(read_finished(run).config.model.name, "classification", 2)
    PeftModel.from_pretrained(base, str(tmp_path / "own"))
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, "nothing is overwritten" in again.output) == (2, True)


def test_rows_are_bounded_whatever_a_client_holds(simulation: Path) -> None:
    run = read_finished(simulation)
    data = prepare(data_spec(run.config))
    engine, adapter = run.engine()
    wild = LOCAL.replace(learning_rate=1e3)
    for bound in (1e-6, 0.1, 10.0):
        rows = gain_rows(engine, adapter, [data.client(i) for i in range(20)], wild, list(range(20)), bound)
        assert np.isfinite(rows).all()
        assert (np.linalg.norm(rows, axis=1) <= 3**0.5).all()
        few = [len(data.client(i)) < 2 for i in range(20)]
        assert (rows[few] == 0).all()
        assert (rows[np.logical_not(few), 2] == 1).all()


def test_a_row_is_of_its_own_client_alone(simulation: Path) -> None:
    run = read_finished(simulation)
    data = prepare(data_spec(run.config))
    engine, adapter = run.engine()
    clients, seeds = [data.client(i) for i in range(6)], list(range(6))
    together = gain_rows(engine, adapter, clients, LOCAL, seeds, 1.0)
    for number in range(6):
        alone = gain_rows(engine, adapter, [clients[number]], LOCAL, [seeds[number]], 1.0)
        assert together[number] == pytest.approx(alone[0], abs=1e-4)


def test_the_answer_is_the_mean_with_the_noise_that_was_charged(simulation: Path, tmp_path: Path) -> None:
    run = read_finished(simulation)
    data = prepare(data_spec(run.config))
    engine, adapter = run.engine()
    exact = gain_rows(engine, adapter, [data.client(i) for i in range(20)], LOCAL, [0] * 20, 1.0).sum(axis=0)
    question = price_gain(20, 15.0, 1e-3, 1.0)
    found = [ask_gain(engine, adapter, data, LOCAL, question, tmp_path / f"{n}.jsonl") for n in range(12)]
    noise = 3.0 * question.noise_multiplier * 3**0.5 / 12**0.5
    assert np.mean([one["clients"] for one in found]) == pytest.approx(exact[2], abs=noise + 0.5)
    sums = [one["gain"]["value"] * one["clients"] for one in found]
    assert np.mean(sums) == pytest.approx(exact[0], abs=noise + 0.5)
    within = [one["gain"]["within"] for one in found]
    assert np.mean(within) == pytest.approx(1.96 * question.noise_multiplier * 3**0.5 / exact[2], rel=0.3)
    assert len(Ledger.open(tmp_path / "0.jsonl", read_only=True).charges) == 1


def audit_of_the_question(folder: Path, monkeypatch: pytest.MonkeyPatch, told_by: int = 0) -> TwoWorldAudit:
    """Try to tell from the answers whether one more client, whose loss falls as far as counts, was asked.

    Args:
        told_by: other clients whose rows are then those of that client: a fault.
    """
    question, numbers = price_gain(8, 12.0, 1e-3, 1.0), itertools.count()

    def release(rows: torch.Tensor) -> torch.Tensor:
        all_rows = np.zeros((8, 3))  # a client that is not there has no record
        all_rows[: len(rows)] = rows.numpy()
        all_rows[:told_by] = all_rows[-1]
        monkeypatch.setattr(personal, "gain_rows", lambda *_: all_rows)
        data: Any = SimpleNamespace(num_clients=8, client=lambda number: number)
        engine: Any = None  # the rows, whose training is long, are given
        found = ask_gain(engine, torch.zeros(1), data, LOCAL, question, folder / f"{next(numbers)}.jsonl")
        counted = found["clients"]
        return torch.tensor([found["gain"]["value"] * counted, found["share_that_gains"]["value"] * counted, counted])

    others, extreme = torch.tensor([[0.1, 1.0, 1.0]] * 7), torch.ones(3)
    z = question.noise_multiplier
    return two_world(release, others, extreme, noise_multiplier=z, repetitions=300, alpha=1e-6)


def test_nobody_can_tell_a_client_better_than_was_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = audit_of_the_question(tmp_path, monkeypatch)
    assert found.passed, found
    assert found.mu_estimate == pytest.approx(found.claimed_mu, rel=0.25), "as visible as the guarantee allows"


def test_rows_that_tell_of_other_clients_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not audit_of_the_question(tmp_path, monkeypatch, told_by=3).passed


def test_nothing_is_released_before_it_is_charged(
    simulation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_finished(simulation)
    engine, adapter = run.engine()
    data: Any = prepare(data_spec(run.config))

    def end(*_: Any, **given: Any) -> torch.Tensor:
        given["ledger"].close()
        raise InterruptedError

    monkeypatch.setattr(personal, "charged_release", end)
    with pytest.raises(InterruptedError):
        ask_gain(engine, adapter, data, LOCAL, price_gain(20, 1.0, 1e-3, 1.0), tmp_path / "ledger.jsonl")
    with pytest.raises(FileExistsError):
        ask_gain(engine, adapter, data, LOCAL, price_gain(20, 1.0, 1e-3, 1.0), tmp_path / "ledger.jsonl")


def test_the_command_asks_first_and_answers_again_for_free(simulation: Path, tmp_path: Path) -> None:
    words = ["personalise", str(simulation), "--measure", "--folder", str(tmp_path / "asked"), "--epsilon", "2"]
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, "nothing was spent" in refused.output) == (2, True), refused.output
    done = CliRunner().invoke(app, [*words, "--yes"])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert again.output.splitlines()[-2:] == done.output.splitlines()[-2:]


@pytest.mark.parametrize(("words", "said"), [([], "not both"), (["--measure", "--data", "x.csv"], "not both")])
def test_refused(made: MakeRun, words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["personalise", str(made("classification")), *words])
    assert (done.exit_code, said in done.output) == (2, True), done.output
