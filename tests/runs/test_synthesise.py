"""Synthetic texts of a finished run: what they are, what they say of their guarantee, interruptions, near-copies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard
from typer.testing import CliRunner, Result

from server.evaluation import synthetic
from server.evaluation.finished import read_finished
from server.evaluation.synthetic import Synthesis, synthesise
from server.runs.public_data import public_first_tokens
from simulations.cli.app import app
from tests.cases.finished_runs import run_of_every_task

MakeRun = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A finished run of a task, made once."""
    return run_of_every_task(tmp_path_factory.mktemp("synthesise"))


def lacquer(*words: str) -> Result:
    return CliRunner().invoke(app, ["synthesise", *words])


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_texts_come_with_the_guarantee_of_the_run(made: MakeRun, tmp_path: Path) -> None:
    run, folder = made("causal-lm"), tmp_path / "texts"
    result = lacquer(str(run), "--n", "20", "--folder", str(folder), "--tokens", "12")
    assert result.exit_code == 0, result.output
    texts = rows(folder / "texts.jsonl")
    assert len(texts) == 20
    assert all(set(row) == {"prompt"} and row["prompt"] for row in texts), "the column that the run's settings read"
    assert len({row["prompt"] for row in texts}) > 1
    assert json.loads((folder / "privacy.json").read_text()) == read_finished(run).statement
    card = DatasetCard.load(folder / "README.md")
    assert read_finished(run).statement["sentence"] in card.text
    assert card.data.to_dict()["privacy"]["epsilon"] == read_finished(run).statement["epsilon"]


def test_an_interruption_changes_no_text(made: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "AT_ONCE", 4)
    run, synthesis = read_finished(made("causal-lm")), Synthesis(10, 12)
    begin = public_first_tokens(run.config)
    whole = synthesise(run, synthesis, tmp_path / "whole", begin).read_text()

    def end(done: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesise(run, synthesis, tmp_path / "parts", begin, end)
    file = tmp_path / "parts" / "texts.jsonl"
    file.write_text(file.read_text()[:-3])  # as a kill leaves it
    told = list[int]()
    assert synthesise(run, synthesis, tmp_path / "parts", begin, told.append).read_text() == whole
    assert told == [4, 8, 10]
    with pytest.raises(ValueError, match="other settings"):
        synthesise(run, Synthesis(10, 12, seed=1), tmp_path / "parts", begin)


@pytest.mark.parametrize("task", ["instruction", "summarisation"])
def test_answers_to_public_prompts(made: MakeRun, tmp_path: Path, task: str) -> None:
    asked = tmp_path / "prompts.txt"
    asked.write_text("aaaa number 2?\n\nbbbb number 3?\n")
    run, folder = made(task), tmp_path / "texts"
    result = lacquer(str(run), "--n", "5", "--folder", str(folder), "--prompts", str(asked), "--tokens", "6")
    assert result.exit_code == 0, result.output
    questions = [
        row["messages"][0]["content"] if task == "instruction" else row["prompt"]
        for row in rows(folder / "texts.jsonl")
    ]
    assert questions == ["aaaa number 2?", "bbbb number 3?"] * 2 + ["aaaa number 2?"]


def test_near_copies_stay_with_the_owner(made: MakeRun, tmp_path: Path) -> None:
    run = made("causal-lm")
    result = lacquer(str(run), "--n", "8", "--folder", str(tmp_path / "texts"), "--check", "--json")
    assert result.exit_code == 0, result.output
    file = run / "audit" / "near-copies.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["texts"] == 8
    assert not (tmp_path / "texts" / "near-copies.json").exists()


@pytest.mark.parametrize(
    ("task", "words", "said"),
    [
        ("classification", [], "model.task = 'causal-lm'"),
        ("instruction", [], "--prompts FILE"),
        ("causal-lm", ["--temperature", "0"], "temperature must be above 0, got 0"),
        ("causal-lm", ["--prompts", "no-such-file"], "no-such-file"),
        ("causal-lm", ["--folder", "."], "is not empty"),
    ],
)
def test_refused_before_a_model_is_loaded(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, words: list[str], said: str
) -> None:
    run = made(task)
    (tmp_path / "something").touch()
    monkeypatch.chdir(tmp_path)
    result = lacquer(str(run), *words)
    assert result.exit_code == 2
    assert said in result.output
    assert not (run.parent / f"{run.name}-synthetic").exists()
