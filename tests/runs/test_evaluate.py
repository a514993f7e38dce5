"""Numbers of a finished run again: those of its results, of another file, beside the base model; refusals."""

import json
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from server.evaluation.finished import read_finished
from simulations.cli.app import app
from tests.cases.finished_runs import run_of_every_task

MakeRun = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A finished run of a task, made once."""
    return run_of_every_task(tmp_path_factory.mktemp("evaluate"))


def lacquer(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, words)])


def numbers(*words: str | Path) -> dict[str, Any]:
    result = lacquer(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def results_of(run: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((run / "results.json").read_text())
    return results


def test_the_test_set_gives_the_numbers_of_the_run_and_the_base_model_others(made: MakeRun) -> None:
    run = made("instruction")
    found, results = numbers(run), results_of(run)
    assert found["adapter"]["perplexity"] == pytest.approx(results["test_perplexity"], rel=1e-5)
    assert found["adapter"]["accuracy"] == pytest.approx(results["test_accuracy"], abs=1e-6)
    assert found["adapter"]["rougeL"] == pytest.approx(results["test_rougeL"], abs=1e-6)
    assert found["adapter"]["count"] == results["test_records"]
    assert found["base"]["perplexity"] != pytest.approx(found["adapter"]["perplexity"], rel=1e-3)
    assert (found["records"], found["answers"]) == (6, 3)
    shown = lacquer(run).stdout
    assert f"{found['adapter']['perplexity']:.3f}" in shown
    assert f"{found['base']['perplexity']:.3f}" in shown
    assert "ROUGE-L" in shown


def test_the_base_models_perplexity_is_that_of_transformers(made: MakeRun) -> None:
    run = read_finished(made("causal-lm"))
    text = "A text of its own."
    path = run.folder.parent / "one.jsonl"
    path.write_text(json.dumps({"prompt": text}) + "\n")
    found = numbers(run.folder, "--data", path)
    tokenizer: Any = run.tokenizer()
    ids = tokenizer(text)["input_ids"]
    ids = torch.tensor([ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]])
    for adapted, name in ((False, "base"), (True, "adapter")):
        with torch.no_grad():
            loss = run.language_model(adapted=adapted)(input_ids=ids, labels=ids).loss
        assert found[name]["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert "answers" not in found


def test_a_classifier_is_held_against_its_most_frequent_class(made: MakeRun) -> None:
    run = made("classification")
    found, results = numbers(run), results_of(run)
    assert found["adapter"]["accuracy"] == pytest.approx(results["test_accuracy"])
    assert found["most_frequent_class"] == pytest.approx(results["majority_accuracy"])
    assert "base" not in found
    path = run.parent / "mine.csv"
    path.write_text("prompt,side\naaaa,0\nbbbb,1\nbbbb,1\n")
    result = lacquer(run, "--data", path)
    assert result.exit_code == 0, result.output
    assert "3 records" in result.stdout
    assert "\nalways the most frequent class: 0.6667\n" in result.stdout
    assert "taken to be public" in result.stderr
    assert numbers(run, "--data", path, "--limit", "1")["records"] == 1


def test_what_does_not_fit_the_run_is_refused(made: MakeRun, tmp_path: Path) -> None:
    run = made("classification")
    (tmp_path / "other.csv").write_text("prompt,side\naaaa,7\n")
    (tmp_path / "bare.csv").write_text("text\naaaa\n")
    (tmp_path / "data.txt").write_text("a")
    for name, reason in (("other.csv", "never occur"), ("bare.csv", "no column"), ("data.txt", "its ending must be")):
        result = lacquer(run, "--data", tmp_path / name)
        assert result.exit_code == 2
        assert reason in result.stderr
    assert "for language models" in lacquer(run, "--lm-eval", "piqa").stderr


def test_the_harness_is_given_the_merged_model_and_missed_in_words(
    made: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made("instruction")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = lacquer(run, "--lm-eval", "piqa")
    assert missing.exit_code == 2
    assert "pip install lm-eval" in missing.stderr
    monkeypatch.undo()
    given: dict[str, Any] = {}
    modules = [types.ModuleType(f"lm_eval{end}") for end in ("", ".models", ".models.huggingface", ".tasks")]
    package, _, huggingface, known = modules
    known.TaskManager = lambda include_path: {"folders": include_path}  # type: ignore[attr-defined]
    huggingface.HFLM = lambda **parts: parts  # type: ignore[attr-defined]
    package.simple_evaluate = lambda **words: given.update(words) or {"results": {"piqa": {"acc": 0.5}}}  # type: ignore[attr-defined]
    package.__spec__ = ModuleSpec("lm_eval", None)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert numbers(run, "--lm-eval", "piqa, arc_easy", "--limit", "3") == {"tasks": {"piqa": {"acc": 0.5}}}
    assert (given["tasks"], given["limit"], given["apply_chat_template"]) == (["piqa", "arc_easy"], 3, True)
    assert given["task_manager"] == {"folders": None}
    (tmp_path / "own.yaml").write_text("output_type: multiple_choice\ntask: triage\n")
    numbers(run, "--lm-eval", f"piqa,{tmp_path / 'own.yaml'}")
    assert (given["tasks"], given["task_manager"]) == (["piqa", "triage"], {"folders": [str(tmp_path)]})
    assert "no file" in lacquer(run, "--lm-eval", "other.yaml").stderr
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            given["model"]["pretrained"](ids).logits, read_finished(run).language_model()(ids).logits, atol=1e-5, rtol=0
        )
