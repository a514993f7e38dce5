"""`lacquer ask`: rows are bounded and a unit's own, answers near the truth, and nothing is spent unasked or twice."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from client.data.columns.shares import RECORDS, TOKENS
from client.data.records import Records
from client.record_level.statistics import Question, Source, answer, price
from privacy.errors import AccountRefused
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms
from privacy.mechanism import charged_release
from privacy.randomness.rng import simulation_generator
from server.config.load import ConfigError, parse
from server.evaluation.statistics import LONGEST, answers, share_within, uncut
from simulations.cli.app import app

UNITS = 1000


def made(seed: int = 0, units: int = UNITS, **changed: int) -> Source:
    """Units of 0 to 5 texts, some of them long, of two labels."""
    draws = simulation_generator(seed, "texts")
    sizes = draws.integers(0, 6, units)
    for unit, size in changed.items():
        sizes[int(unit.removeprefix("unit"))] = size
    count = int(sizes.sum())
    lengths, labels = draws.geometric(1 / 60, count).clip(1, LONGEST), (draws.random(count) < 0.3).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    train = Records(np.zeros(offsets[-1], np.int32), offsets, labels)
    stops = np.cumsum(sizes)
    return Source(train, ("no", "yes"), np.arange(count), stops - sizes, stops, units, "random:bert")


def config(**changed: Any) -> Any:
    return parse({"clients": UNITS, **changed})


@pytest.fixture(autouse=True)
def scripts_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of the first label is in the first script: reading tokens back would load a model's library."""
    monkeypatch.setattr("client.data.columns.shares.scripts_of", lambda records, model: np.asarray(records.labels))


@pytest.fixture(scope="module")
def question() -> Question:
    return price(UNITS, "client", ("no", "yes"), 1.0, 1e-5)


def test_a_row_is_a_units_own_and_no_longer_than_the_clip(question: Question) -> None:
    source, other = made(), made(units=50)
    bound = question.plan.clip.bound  # type: ignore[attr-defined]
    rows = np.array([source.row(unit, question) for unit in range(UNITS)])
    assert (np.linalg.norm(rows, axis=1) <= bound).all()
    assert (rows >= 0).all()
    assert (source.row(0, question)[: len(RECORDS) + 1].sum(), len(other)) == (1.0, 50)
    empty = int(np.flatnonzero(source.stops == source.starts)[0])
    assert source.row(empty, question).sum() == source.row(empty, question)[0] == 1.0


def test_answers_are_near_the_truth_and_charged_first(question: Question, tmp_path: Path) -> None:
    source = made()
    found = answers(question, answer(source, question, tmp_path / "ledger.jsonl"))
    with Ledger.open(tmp_path / "ledger.jsonl", read_only=True) as ledger:
        assert [(charge.event.label, bool(charge.released_at)) for charge in ledger.charges] == [("ask", True)]
        assert 0.99 < ledger.epsilon_guaranteed() <= 1.0
        assert ledger.not_private is None
    sizes = source.stops - source.starts
    assert abs(found["units_with_records"]["value"] - (sizes > 0).sum()) <= 2 * found["units_with_records"]["within"]
    exact = np.mean([source.row(unit, question) for unit in range(UNITS)], axis=0)
    for name, share in zip(("no", "yes"), exact[-2:], strict=True):
        assert abs(found["labels"][name] - share) < 2.5 * found["share_within"]
    for level, value in found["tokens_per_text"]["quantiles"].items():
        weights = np.cumsum(exact[len(RECORDS) + 1 : len(RECORDS) + len(TOKENS) + 2])
        right = next(edge for edge, below in zip(TOKENS, weights, strict=False) if below >= float(level) * weights[-1])
        assert value["least"] <= right
        assert value["most"] is None or right <= value["most"]
    with pytest.raises(FileExistsError):
        answer(source, question, tmp_path / "ledger.jsonl")


def test_the_width_is_that_of_the_noise(question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released mean less the exact one has the standard deviation that the interval says."""
    source, seen = made(), list[torch.Tensor]()
    exact = torch.from_numpy(np.mean([source.row(unit, question) for unit in range(UNITS)], axis=0))

    def noted(*given: Any, **named: Any) -> Any:
        release = charged_release(*given, **named)
        seen.append(release.update.double() - exact)
        return release

    monkeypatch.setattr("client.record_level.statistics.charged_release", noted)
    for number in range(10):
        answer(source, question, tmp_path / f"{number}.jsonl")
    errors = torch.cat(seen)
    assert float(errors.std()) == pytest.approx(share_within(question) / 1.96, rel=0.15)


def test_without_noise_the_answers_are_exact(question: Question) -> None:
    source = made()
    found = answers(question, torch.from_numpy(np.mean([source.row(u, question) for u in range(UNITS)], axis=0)))
    sizes, lengths = source.stops - source.starts, source.records.lengths
    assert found["units_with_records"]["value"] == (sizes > 0).sum()
    assert found["records_per_unit"]["shares"]["3-4"] == pytest.approx(np.isin(sizes, (3, 4)).mean())
    assert found["tokens_per_text"]["cut_at"][4 * 64] == pytest.approx((lengths > 256).mean(), abs=0.02)
    assert found["advice"]["clients"] == (sizes > 0).sum()
    assert found["advice"]["site.records-per-unit"] == 8
    assert found["advice"]["model.max-length"] == 192


def test_the_account_of_the_data_pays_first(question: Question, tmp_path: Path) -> None:
    """What it does not pay for makes no ledger; the price of an answer is debited whole."""
    account = tmp_path / "data.account", tmp_path / "place"
    with Account.create(account[0], Terms("data", "client", 1.5, 2e-5, rule="sum"), account[1]):
        pass
    answer(made(), question, tmp_path / "first.jsonl", account)
    with Account.open(*account, read_only=True) as held:
        assert [(debit.epsilon, debit.delta) for debit in held.debits.values()] == [(1.0, 1e-5)]
    with pytest.raises(AccountRefused):
        answer(made(), question, tmp_path / "second.jsonl", account)
    assert not (tmp_path / "second.jsonl").exists()


def test_units_that_bring_no_row_count_as_without_records(question: Question) -> None:
    source = made()
    rows = np.array([source.row(unit, question) for unit in range(UNITS)])
    away = np.zeros_like(rows[: UNITS // 2])
    found = answers(question, torch.from_numpy(np.concatenate([rows[UNITS // 2 :], away]).mean(axis=0)), everyone=False)
    present = (source.stops - source.starts)[UNITS // 2 :]
    assert found["units_with_records"]["value"] == (present > 0).sum()
    assert found["units_with_records"]["within"] == math.ceil(UNITS * share_within(question) * math.sqrt(12))


def test_an_answer_is_protected_or_not_given() -> None:
    with pytest.raises(ConfigError, match="an answer is protected or not given"):
        uncut(config(privacy={"non-private": True, "noise": "insecure-zero"}))


@pytest.mark.run
def test_the_command_tells_the_price_first_and_spends_once(tmp_path: Path) -> None:
    small = ["data.records-per-client=3", "clients=60", "data.validation-records=20", "data.test-records=20"]
    options = [part for one in [*small, f"data.cache={tmp_path / 'cache'}"] for part in ("--set", one)]
    asked = ["ask", "quickstart", *options, "--epsilon", "4", "--delta", "1e-3", "--folder", str(tmp_path / "asked")]
    runner = CliRunner()
    refused = runner.invoke(app, asked)
    assert refused.exit_code == 2
    assert "This costs epsilon 4 at delta 0.001 for each of 60 clients" in refused.output
    assert "nothing was spent: whoever cannot be asked says --yes" in refused.output
    assert not (tmp_path / "asked").exists()
    first = runner.invoke(app, [*asked, "--yes"])
    assert first.exit_code == 0, first.output
    assert "lacquer run quickstart --set clients=" in first.output
    ledger = (tmp_path / "asked" / "ledger.jsonl").read_bytes()
    again = runner.invoke(app, [*asked, "--json"])
    assert json.loads(again.output)["epsilon"] == 4.0
    assert (tmp_path / "asked" / "ledger.jsonl").read_bytes() == ledger
    (tmp_path / "asked" / "answers.json").unlink()
    lost = runner.invoke(app, [*asked, "--yes"])
    assert (lost.exit_code, "were paid for and lost" in lost.output) == (2, True)
    free_form = runner.invoke(app, ["ask", "quickstart", "how old are they?"])
    assert free_form.exit_code == 2
