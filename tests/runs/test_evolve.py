"""Private Evolution: votes are bounded and a unit's own, paid before noise is drawn, and move texts to private ones."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from typer.testing import CliRunner

from client.data.records import Records
from client.models.base import load_base
from client.record_level import preferred_texts
from client.record_level.preferred_texts import preferred_pairs
from client.record_level.statistics import Source
from client.record_level.synthetic_texts import Synthesis
from privacy.accountants import epsilon
from privacy.audit.two_world import TwoWorldAudit, two_world
from privacy.ledger.ledger import Ledger
from server.config.load import parse
from server.evaluation import evolution
from server.evaluation.evolution import evolve, nearest, preferring_writer, price_votes, public_writer, vote_rows
from simulations.cli.app import app
from tests.cases.finished_runs import records

UNITS, SAMPLES = 300, 8
MODEL = {"name": "random:llama", "task": "causal-lm", "max-length": 24}


def source_of(texts: list[str], each: int = 1) -> Source:
    """Units with so many of the texts each, as bytes of the random models' tokenizer."""
    _, tokenizer = load_base("random:llama", "causal-lm")
    train = Records.from_lists([tokenizer(text)["input_ids"] for text in texts])
    starts = np.arange(0, len(texts), each)
    return Source(train, (), np.arange(len(texts)), starts, starts + each, len(starts), "random:bert")


def by_letters(texts: Any) -> torch.Tensor:
    """An embedding that only looks at which letters a text has."""
    counts = torch.tensor([[text.count(chr(97 + letter)) + 1e-3 for letter in range(26)] for text in texts])
    return torch.nn.functional.normalize(counts.float(), dim=1)


def config(**changed: Any) -> Any:
    return parse({"clients": UNITS, "model": MODEL, **changed})


def test_a_row_of_votes_is_no_longer_than_one_and_a_units_own() -> None:
    source = source_of(["a", "b", "b", "c", "d", "a"], each=3)
    empty = Source(source.records, (), source.order, np.array([0, 3, 3]), np.array([3, 3, 6]), 3, "random:bert")
    rows = vote_rows(empty, np.array([0, 1, 1, 2, 3, 0])[:, None], range(3), 4)
    assert rows.tolist() == [[1 / 3, 2 / 3, 0, 0], [0, 0, 0, 0], [1 / 3, 0, 1 / 3, 1 / 3]]
    assert (np.linalg.norm(rows, axis=1) <= 1).all()
    assert nearest(by_letters(["aab", "c"]), by_letters(["c", "b", "a"])).tolist() == [2, 0]


def test_texts_move_to_what_units_hold_and_every_vote_was_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, settings = source_of(["zz zz"] * UNITS), config()
    price = price_votes(source, settings, 8.0, 1e-4, samples=SAMPLES, generations=2)
    writer = public_writer(settings, Synthesis(SAMPLES, 24, ("aaa", "bbb", "ccc", "zzz"), kept=(1.0, 1.0)))
    assert writer.synthesiser.synthesis.rule == "proportional", "a softmax of counts would keep the most voted alone"
    released = list[torch.Tensor]()
    kept = evolution._released

    def watched(*given: Any) -> torch.Tensor:
        released.append(kept(*given))
        return released[-1]

    monkeypatch.setattr(evolution, "_released", watched)
    file = evolve(source, price, writer, by_letters, tmp_path, "words", "random:llama")
    texts = [json.loads(line)["words"] for line in file.read_text().splitlines()]
    assert len(texts) == SAMPLES
    assert sum(text.startswith("zzz") for text in texts) > SAMPLES / 2, texts
    ledger = Ledger.open(tmp_path / "ledger.jsonl", read_only=True)
    said = json.loads((tmp_path / "privacy.json").read_text())
    assert len(ledger.charges) == 2
    assert said["sentence"] in (tmp_path / "README.md").read_text()
    assert said["epsilon"] <= 8.0
    assert said["epsilon"] == pytest.approx(epsilon(ledger.commitment.floor, 1e-4), abs=1e-3)


def test_counts_carry_the_noise_that_was_paid_for(tmp_path: Path) -> None:
    source, settings = source_of(["b"] * UNITS), config()
    found = list[torch.Tensor]()
    price = replace(price_votes(source, settings, 1.0, 1e-4, samples=50, generations=1), threshold=-1e9)
    for attempt in range(40):
        with Ledger.create(tmp_path / f"{attempt}.jsonl", price.commitment) as ledger:
            found.append(evolution._released(source, price, np.full((UNITS, 1), 3), ledger, 0))
    counts = torch.stack(found)
    others = counts[:, [i for i in range(50) if i != 3]]
    assert counts[:, 3].mean() == pytest.approx(UNITS, abs=5 * price.noise_multiplier / 40**0.5)
    assert others.std() == pytest.approx(price.noise_multiplier, rel=0.07)


def audit_of_votes(folder: Path, votes: int) -> TwoWorldAudit:
    """Try to tell from noisy counts whether one more unit has voted, all its votes for the first texts."""
    source, numbers = source_of(["b"] * (UNITS + 1)), itertools.count()
    price = price_votes(source, config(), 8.0, 1e-4, samples=SAMPLES, generations=1, votes=votes)
    price = replace(price, threshold=-1e9)

    def release(rows: torch.Tensor) -> torch.Tensor:
        stops = source.starts + (np.arange(UNITS + 1) < len(rows))  # a unit that is not there has no record
        there = replace(source, stops=stops)
        chosen = np.resize(rows.long().numpy(), (UNITS + 1, votes))
        with Ledger.create(folder / f"{next(numbers)}.jsonl", price.commitment) as ledger:
            return evolution._released(there, price, chosen, ledger, 0)

    others = torch.arange(UNITS * votes).reshape(UNITS, votes) % SAMPLES
    towards = torch.zeros(SAMPLES, dtype=torch.float64)
    towards[:votes] = 1.0
    z = price.noise_multiplier
    return two_world(
        release, others, torch.arange(votes), noise_multiplier=z, direction=towards, repetitions=300, alpha=1e-6
    )


@pytest.mark.parametrize("votes", [1, 4])
def test_nobody_can_tell_a_voter_better_than_was_paid_for(votes: int, tmp_path: Path) -> None:
    found = audit_of_votes(tmp_path, votes)
    assert found.passed, found
    assert found.mu_estimate == pytest.approx(found.claimed_mu, rel=0.25), "as visible as the guarantee allows"


def test_a_unit_that_votes_twice_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = evolution.contribute
    monkeypatch.setattr(evolution, "contribute", lambda *given: once(*given) + once(*given))
    assert not audit_of_votes(tmp_path, 1).passed


def test_records_vote_behind_every_prompt_with_votes_that_together_weigh_one() -> None:
    source, texts = source_of(["a", "b", "a", "b"], each=2), ["ab", "a", "b", "c", "zz", "c", "b", "z"]
    writer = preferring_writer(config(), Synthesis(8, 24, ("a",)), 0.0)
    chosen = writer.nearest_texts(by_letters(["a", "b", "a", "b"]), by_letters(texts))
    assert chosen.tolist() == [[1, 5], [2, 6], [1, 5], [2, 6]] or (chosen[:, 0] == [1, 2, 1, 2]).all()
    rows = vote_rows(source, chosen, range(2), 8)
    assert (np.linalg.norm(rows, axis=1) <= 1 + 1e-12).all()
    alike = vote_rows(source_of(["a", "a"], each=2), chosen[[0, 0]], range(1), 8)
    assert np.linalg.norm(alike) == pytest.approx(1.0)


def test_pairs_are_of_one_prompt_the_best_before_one_of_the_middle_and_no_noise() -> None:
    texts = Records.from_lists([[7, 10 + n, 1] for n in range(8)])
    counts = torch.tensor([3.0, 90, 40, 60, 8, 7, 9, 8])
    pairs = preferred_pairs(texts, counts, [[7], [7]], noise=2.0)
    assert [pairs.tokens.tolist(), pairs.splits.tolist()] == [[7, 11, 1, 7, 12, 1], [3]]
    assert pairs.token_weights.tolist() == [0, 1, 1, 0, 1, 1]
    assert len(preferred_pairs(texts, counts, [[7], [7]], noise=0.0)) == 2


def test_a_generator_learns_to_prefer_what_units_voted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last texts are written; of the records it is given paid counts alone."""
    source, settings = source_of(["abcd"] * UNITS), config(model={**MODEL, "max-length": 12, "rank": 4})
    price = price_votes(source, settings, 20.0, 1e-4, samples=40, generations=2, votes=10)
    writer = preferring_writer(settings, Synthesis(40, 12, ("b",)), price.noise)
    writer.local = writer.local.replace(learning_rate=0.02)
    given = list[tuple[Records, torch.Tensor]]()

    def watched(*arguments: Any) -> Records:
        given.append((preferred_pairs(*arguments), writer.adapter))
        return given[-1][0]

    monkeypatch.setattr(preferred_texts, "preferred_pairs", watched)
    file = evolve(source, price, writer, by_letters, tmp_path, "words", "random:llama")
    after = [*(adapter for _, adapter in given[1:]), writer.adapter]
    for (pairs, before), tuned in zip(given, after, strict=True):
        assert writer.engine.evaluate(tuned, pairs).loss < writer.engine.evaluate(before, pairs).loss - 0.01
    assert len(file.read_text().splitlines()) == 40
    with Ledger.open(tmp_path / "ledger.jsonl", read_only=True) as ledger:
        assert len(ledger.charges) == 2
    assert "POPri" in (tmp_path / "README.md").read_text()
    base, _ = load_base("random:llama", "causal-lm")
    PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (tmp_path / "adapter/privacy.json").read_bytes() == (tmp_path / "privacy.json").read_bytes()


def test_the_command_asks_first_and_spends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolution, "sentence_embedding", lambda: by_letters)
    monkeypatch.chdir(tmp_path)
    records(tmp_path / "records.jsonl")
    words = ["evolve", "quickstart", "--n", "6", "--generations", "1", "--epsilon", "2", "--folder", "out"]
    changed = {
        "data.source": "jsonl:records.jsonl", "data.text-column": "prompt", "model.task": "causal-lm",
        "model.name": "random:llama", "model.max-length": 40, "model.targets": "auto", "clients": 20,
        "data.validation-records": 4, "data.test-records": 4, "data.train-records": 20, "data.partition": "iid",
        "privacy.delta": 1e-3, "data.cache": "cache",
    }  # fmt: skip
    words += [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    refused = CliRunner().invoke(app, words)
    assert (refused.exit_code, "--yes" in refused.output) == (2, True), refused.output
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(app, [*words, "--yes"])
    assert done.exit_code == 0, done.output
    assert set(json.loads((tmp_path / "out/texts.jsonl").read_text().splitlines()[0])) == {"prompt"}
    again = CliRunner().invoke(app, [*words, "--yes"])
    assert (again.exit_code, "were paid for" in again.output) == (2, True)
    other = [*words[:2], "--method", "popri", *words[2:-2], "--folder", "other", *words[-2:], "--yes"]
    odd = CliRunner().invoke(app, other)
    assert (odd.exit_code, "multiple of 4" in odd.output) == (2, True), odd.output
    tuned = CliRunner().invoke(app, [*other, "--n", "8"])
    assert tuned.exit_code == 0, tuned.output
    assert len(Path("other/texts.jsonl").read_text().splitlines()) == 8
