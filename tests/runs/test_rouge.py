"""Runs of summarisation end with ROUGE: that of their saved adapter, in every file that tells of the run."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from rouge_score.rouge_scorer import RougeScorer
from typer.testing import CliRunner

from client.data.prepare import prepare
from client.models.base import load_base
from client.models.lora import load_peft
from client.record_level.dp_sgd import PrivateSgd
from server.config.load import ConfigError, flatten, parse, unflatten
from server.config.schema import RunConfig
from server.evaluation.answers import SCORES, adapter_answers
from server.run_folder.resume import check_resumable
from server.runs.assembly import data_spec
from server.runs.phase_config import parse_phases
from server.runs.record_level_assembly import assemble_record_level, assemble_sites
from server.runs.sites import final_adapter
from server.runs.start import run_in_folder
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from simulations.report.page import loading_code, write_report
from simulations.report.read_run import read_run
from simulations.report.summary import print_summary
from strategies.adapter.residual import pairs, residual_size
from strategies.sites import GlobalModel
from tests.cases.phases import train

MODEL = {
    "name": "random:llama", "task": "summarisation", "rank": 8, "alpha": 16.0, "max-length": 60,
    "targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head",
}  # fmt: skip
ASKED = 6  # of 10 test records


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a file of texts whose summaries have the first words in common."""
    folder = tmp_path_factory.mktemp("summaries")
    ends = ("today", "at home", "in the rain", "once more")
    lines = [{"chat": f"{i}: {ends[i % 4]}", "gist": f"They will meet {ends[i % 4]}"} for i in range(80)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def config(place: Path, **settings: Any) -> RunConfig:
    """One site; a long warm start, so that its summaries say something."""
    table = {
        "rounds": 2,
        "clients": 1,
        "sampling-rate": 1.0,
        "privacy": {"unit": "record", "delta": 1e-3},
        "strategy": {"controller": "fixed", "controller-options": {"clip-norm": 0.001}},
        "model": MODEL,
        "public": {
            "warm-start-epochs": 25,
            "warm-start-batch-size": 6,
            "warm-start-learning-rate": 0.01,
            "training-fraction": 0.9,
        },
        "data": {
            "source": f"jsonl:{place / 'chats.jsonl'}",
            "text-column": "chat",
            "text-pair-column": "gist",
            "partition": "iid",
            "validation-records": 40,
            "test-records": 10,
            "cache": str(place / "cache"),
        },
        "site": {"batch-size": 8},
        "evaluation": {"rouge-records": ASKED, "rouge-tokens": 20},
        "engine": {"kind": "inprocess", "workers": 1},
    }
    return parse(unflatten({**flatten(table), **settings}))


def run(settings: RunConfig, folder: Path, *, resume: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    run_in_folder(settings, folder, resume=resume)


def results_of(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def independent(settings: RunConfig, folder: Path) -> dict[str, float]:
    """ROUGE of the saved adapter: PEFT, one token after the other, references from the file itself."""
    base, tokenizer = load_base(settings.model.name, "causal-lm")
    model = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    source = Path(settings.data.source.removeprefix("jsonl:"))
    gists = {row["chat"]: row["gist"] for row in map(json.loads, source.read_text().splitlines())}
    scorer, scores = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True), []
    test = prepare(data_spec(settings)).test
    for number in range(ASKED):
        text = tokenizer.decode(test.select([number]).tokens, skip_special_tokens=True).partition("\nSummary:")[0]
        tokens = [1, *tokenizer(f"{text}\nSummary:", add_special_tokens=False)["input_ids"]]
        start = len(tokens)
        for _ in range(20):
            with torch.no_grad():
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_token_id:
                break
        found = tokenizer.decode(tokens[start:], skip_special_tokens=True)
        scores.append(scorer.score(gists[text], found))
    return {kind: float(np.mean([score[kind].fmeasure for score in scores])) for kind in scores[0]}


@pytest.fixture(scope="module")
def site(place: Path) -> Path:
    folder = place / "site"
    run(config(place), folder)
    return folder


@pytest.mark.slow
def test_the_scores_are_those_of_the_saved_adapter(place, site):
    results, expected = results_of(site), independent(config(place), site)
    assert 0.2 < expected["rougeL"] < 1, "a score that any adapter gets shows nothing"
    for kind, value in expected.items():
        assert results[f"test_{kind}"] == pytest.approx(value, abs=1e-6)
    assert results["rouge_records"] == ASKED
    assert results["rouge_decoding"] == "greedy"
    assert results["rouge_new_tokens"] == 20
    assert results["rouge_references_cut"] == 0


@pytest.mark.slow
def test_card_report_and_summary_say_them(site, capsys, monkeypatch):
    results = results_of(site)
    terms = f"over {ASKED} test records, greedy decoding, at most 20 new tokens"
    line = ", ".join(f"{name} {results[key]:.3f}" for key, name in SCORES.items())
    card = (site / "adapter" / "README.md").read_text()
    assert line in card
    assert terms in card
    page = write_report(site).read_text()
    assert "Test ROUGE-L" in page
    assert f"{results['test_rougeL']:.3f}" in page
    assert line.rpartition(",")[0] in page
    assert terms in page
    monkeypatch.setenv("COLUMNS", "500")
    print_summary(site)
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_the_lines_of_the_card_write_a_summary(site, monkeypatch, capsys):
    monkeypatch.chdir(site.parents[1])
    code = loading_code(read_run(site))
    assert code is not None
    exec(code.replace('"a text"', '"3: once more"'), {})
    assert capsys.readouterr().out.startswith("They will meet")


@pytest.mark.slow
def test_a_run_that_breaks_off_goes_on_to_the_same_end(place, tmp_path, monkeypatch):
    folder, whole = tmp_path / "run", PrivateSgd.step
    settings = config(place, **{"rounds": 3, "site.checkpoint-every": 1})

    def breaks(training: PrivateSgd) -> Any:
        if training.state.round == 1:
            raise OSError("the machine is gone")
        return whole(training)

    monkeypatch.setattr(PrivateSgd, "step", breaks)
    with pytest.raises(OSError, match="gone"):
        run(settings, folder)
    assert not (folder / "results.json").exists()
    monkeypatch.undo()
    # what is measured at the end may be set anew: a run must not be stuck there
    (folder / "config.toml").write_text(
        config(place, **{"rounds": 3, "site.checkpoint-every": 1, "evaluation.rouge-records": 4}).to_toml()
    )
    run(check_resumable(folder), folder, resume=True)
    results = results_of(folder)
    assert results["rouge_records"] == 4
    assert results["test_rougeL"] > 0.2
    assert "ROUGE-L" in (folder / "adapter" / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_federation_of_clients_ends_with_them(place, tmp_path):
    settings = config(place, clients=3, **{"privacy.unit": "client", "privacy.delta": 1e-3})
    (tmp_path / "run").mkdir()
    run_inprocess(settings, tmp_path / "run")
    results, expected = results_of(tmp_path / "run"), independent(settings, tmp_path / "run")
    assert expected["rougeL"] > 0.2
    assert results["test_rougeL"] == pytest.approx(expected["rougeL"], abs=1e-6)
    assert "ROUGE-L" in (tmp_path / "run" / "adapter" / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_what_an_aggregation_wrote_into_the_base_is_in_the_scores(place, site):
    ready = assemble_sites(config(place, clients=2))
    layout, spec = ready.layout, ready.spec
    trained = load_peft(site / "adapter", layout)
    residual = torch.zeros(residual_size(layout))
    for pair in pairs(layout):  # all that was learnt is in the base, and the adapter is the first
        pair.of(residual)[:] = spec.scale * pair.b.of(trained) @ pair.a.of(trained)
    final = final_adapter(ready, GlobalModel(ready.start, residual))
    moved = adapter_answers(ready.config, ready.data.test, *final)
    plain = adapter_answers(ready.config, ready.data.test, ready.start, layout, spec)
    assert moved["test_rougeL"] == pytest.approx(results_of(site)["test_rougeL"], abs=1e-6) != plain["test_rougeL"]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_federation_of_sites_ends_with_them(place, tmp_path):
    settings = config(place, clients=2, **{"strategy.aggregation": "fedex", "public.warm-start-epochs": 0})
    (tmp_path / "run").mkdir()
    run_inprocess(settings, tmp_path / "run")
    results, expected = results_of(tmp_path / "run"), independent(settings, tmp_path / "run")
    assert results["test_rougeL"] == pytest.approx(expected["rougeL"], abs=1e-6)  # of hardly trained sites
    assert results["rouge_records"] == ASKED
    assert "ROUGE-L" in (tmp_path / "run" / "adapter" / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_recipe_ends_with_them(place, tmp_path):
    table = config(place).to_table()
    kept = {key: table[key] for key in ("privacy", "model", "data", "evaluation")}
    phase = {
        "kind": "ordinary",
        "name": "all",
        "text": "original",
        "epochs": 30,
        "batch-size": 6,
        "learning-rate": 0.01,
    }
    settings = parse_phases({**kept, "phases": [phase]})
    train(settings, tmp_path / "run")
    results, expected = results_of(tmp_path / "run"), independent(settings.run, tmp_path / "run")
    assert expected["rougeL"] > 0.2
    assert results["test_rougeL"] == pytest.approx(expected["rougeL"], abs=1e-6)
    assert "ROUGE-L" in (tmp_path / "run" / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("change", [{"evaluation.rouge-records": 0}, {"model.task": "causal-lm"}])
def test_none_are_written_where_none_are_asked_for(place, tmp_path, change):
    run(config(place, **{**change, "public.warm-start-epochs": 0, "rounds": 1}), tmp_path / "run")
    assert not [key for key in results_of(tmp_path / "run") if "rouge" in key]
    assert "ROUGE" not in (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "ROUGE" not in write_report(tmp_path / "run").read_text()


def test_longer_summaries_than_records_hold_are_refused(place):
    with pytest.raises(ConfigError, match=r"evaluation\.rouge-tokens = 31 .* 30, .*model\.max-length"):
        assemble_record_level(config(place, **{"evaluation.rouge-tokens": 31}))


def test_a_missing_package_is_told_before_anything_starts(place, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, find=importlib.util.find_spec: None
                        if name == "rouge_score" else find(name))  # fmt: skip
    (tmp_path / "site.toml").write_text(config(place).to_toml())
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "site.toml"])
    assert result.exit_code == 2
    assert "evaluation.rouge-records = 6 needs the package rouge-score" in result.output
    assert "model.targets" not in result.output
    assert not (tmp_path / "runs").exists()
