"""`lacquer predict`: the classes of a run's classifier, as its adapter gives them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli.app import app
from tests.cases.finished_runs import run_of_every_task


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return run_of_every_task(tmp_path_factory.mktemp("runs"))


def predicted(*arguments: str, given: str = "") -> list[dict[str, object]]:
    done = CliRunner().invoke(app, ["predict", *arguments, "--json"], input=given)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_texts_get_the_probabilities_of_the_run(made: Callable[[str], Path]) -> None:
    folder = made("classification")
    first, second = predicted(str(folder), "aaaa number 1?", "bbbb number 2?")
    assert first["text"] == "aaaa number 1?"
    assert sum(first["classes"].values()) == pytest.approx(1.0)  # type: ignore[attr-defined]
    assert predicted(str(folder), given="bbbb number 2?\n\n") == [second]
    from peft import PeftModel

    from client.models.base import load_base
    from server.evaluation.finished import read_finished

    run = read_finished(folder)
    base, tokenizer = load_base(run.config.model.name, "classification", 2)
    model = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    tokens = tokenizer("aaaa number 1?", return_tensors="pt")
    expected = model(**tokens).softmax(-1).flatten().tolist()
    assert [first["classes"][name] for name in run.label_names] == pytest.approx(expected, rel=1e-5)  # type: ignore[index]


def test_what_cannot_be_classified_is_refused(made: Callable[[str], Path]) -> None:
    for arguments, words in (
        ([str(made("causal-lm")), "x"], "has trained a language model; try: lacquer generate"),
        ([str(made("classification"))], "there is no text to classify"),
        ([str(made("classification")), "x", "--pair", "y"], "leave out --pair"),
    ):
        done = CliRunner().invoke(app, ["predict", *arguments])
        assert done.exit_code == 2
        assert words in done.stderr


def test_a_run_leaves_classes_facts_and_its_start(made: Callable[[str], Path]) -> None:
    folder = made("classification")
    results = json.loads((folder / "results.json").read_text())
    assert sum(map(sum, results["test_confusion"])) == results["test_records"]
    assert set(results["test_recall"]) == set(results["label_names"])
    assert 0 <= results["test_macro_f1"] <= 1
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert first["phase"] == "start"
    assert results["start_validation_accuracy"] == first["validation_accuracy"]
    facts = json.loads((folder / "records.json").read_text())
    assert (facts["note"][:6], facts["read"], facts["clients"]) == ("Public", {}, None)  # the records of one site
    assert len((folder / "source.digest").read_text().strip()) == 64
    language = json.loads((made("causal-lm") / "metrics.jsonl").read_text().splitlines()[0])
    assert language["validation_perplexity"] > 1
    assert language["validation_macro_f1"] is None
