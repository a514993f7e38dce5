"""A federation of sites over Flower messages in one process: every site keeps its own ledger, the server averages."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from client.data.prepare import prepare
from client.data.records import Records
from client.models.base import load_base
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, flatten, parse, unflatten
from server.config.schema import RunConfig
from server.run_folder.errors import CannotResume
from server.run_folder.names import SITES_FILE
from server.run_folder.progress import load_progress
from server.run_folder.resume import check_resumable
from server.run_folder.telemetry import read_metrics, read_status
from server.runs.assembly import data_spec
from server.runs.public_data import PublicTraining
from server.runs.record_level_assembly import assemble_sites
from server.runs.sites import prepare_span
from simulations.engines.inprocess import run_inprocess
from tests.cases.moments import Witness


def config(folder: Path, **strategy: Any) -> RunConfig:
    return parse(
        {
            "rounds": 2,
            "clients": 2,
            "sampling-rate": 1.0,
            "privacy": {"unit": "record", "delta": 1e-3},
            "strategy": {"controller": "fixed", "aggregation": "ffa", "optimizer": "fedadam", **strategy},
            "model": {"name": "random:bert", "rank": 2, "max-length": 16},
            "data": {
                "records-per-client": 30,
                "validation-records": 10,
                "test-records": 10,
                "partition": "iid",
                "cache": str(folder / "cache"),
            },
            "site": {"steps": 2, "batch-size": 5},
            "engine": {"kind": "inprocess", "workers": 1},
        }
    )


@pytest.mark.parametrize("aggregation", ["ffa", "fedgsa", "fedex", "flora"])
def test_sites_train_and_the_server_averages(tmp_path, aggregation):
    folder = tmp_path / "run"
    folder.mkdir()
    run_inprocess(config(tmp_path, aggregation=aggregation), folder)
    assert read_status(folder).state == "completed"
    for site in ("0", "1"):
        ledger = Ledger.open(folder / "silos" / site / "ledger.jsonl", read_only=True)
        assert [event.round for event in ledger.events] == [1, 2, 3, 4]
        assert ledger.commitment.unit == "record"
        assert 20 < ledger.commitment.population <= 40
    assert not (folder / "ledger.jsonl").exists()
    statement = json.loads((folder / "privacy.json").read_text())
    assert "one record of any one site" in statement["sentence"]
    assert set(statement["silos"]) == {"0", "1"}
    assert 0 < statement["epsilon"] <= 4.0
    assert [record.round for record in read_metrics(folder)] == [0, 1, 2]
    base, _ = load_base("random:bert", "classification", 2)
    loaded = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    assert _loss(loaded, prepare(data_spec(config(tmp_path))).test) == pytest.approx(
        json.loads((folder / "results.json").read_text())["test_loss"], rel=1e-4
    )
    # what FedEx and FLoRA add to the base has more ranks than the adapter
    assert (loaded.peft_config["default"].r > 2) == (aggregation in ("fedex", "flora"))
    with pytest.raises(CannotResume, match="has ended"):
        check_resumable(folder)


def _loss(model: Any, records: Records) -> float:
    losses = []
    for row in range(len(records)):
        one = records.select([row])
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(one.tokens.astype("int64"))[None])
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(one.labels))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("aggregation", ["rolora", "fedsvd", "dp-dylora"])
def test_what_sites_cannot_follow_is_refused(tmp_path, aggregation):
    with pytest.raises(ConfigError, match=r"strategy.aggregation|model.rank"):
        assemble_sites(config(tmp_path, aggregation=aggregation))


def test_a_controller_that_reads_public_losses_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reads the public loss"):
        assemble_sites(config(tmp_path, controller="rl"))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"site": {"span": {"method": "projection"}}}, "site.span.method = 'projection' must be 'coefficients'"),
        ({"site": {"span": {"method": "coefficients"}}}, "site.steps = 2 must be 1"),
        (
            {"site": {"steps": 1, "span": {"method": "coefficients"}}, "strategy": {"controller": "percentile"}},
            "strategy.controller = 'percentile' must be 'fixed'",
        ),
        (
            {
                "site": {"steps": 1, "span": {"method": "coefficients"}},
                "strategy": {"aggregation": "fedex"},
                "model": {"name": "random:llama", "task": "causal-lm", "targets": "q_proj,v_proj"},
            },
            "strategy.aggregation = 'fedex' must be 'plain' or 'ffa'",
        ),
        ({"strategy": {"aggregation-options": {"scale-b": 2.0}, "aggregation": "plain"}}, "must be empty .*plain"),
        ({"site": {"gradients": "opacus"}}, "site.gradients = 'opacus' must be 'stacked'"),
        ({"strategy": {"served-average": 0.9, "aggregation": "fedex"}}, "served-average = 0.9 must be 0 with .*fedex"),
    ],
)
def test_settings_that_would_be_of_no_effect_are_refused(tmp_path, table, says):
    made = flatten(config(tmp_path).to_table()) | flatten(table)
    with pytest.raises(ConfigError, match=says):
        assemble_sites(parse(unflatten(made)))


def test_sites_start_warm_and_the_average_over_rounds_is_served(tmp_path):
    """Both as in every other run: the warm start's records are in no metric, and x_bar = (a x_1 + x_2) / (1 + a)."""
    table = config(tmp_path, aggregation="plain", **{"served-average": 0.5}).to_table()
    table["public"] |= {"warm-start-epochs": 2, "training-fraction": 0.4}
    witness = Witness(tmp_path / "run", tmp_path / "copies", quiet=False)
    folder = witness.folder
    folder.mkdir()
    with witness.watching():
        run_inprocess(parse(table), folder)
    described = assemble_sites(parse(table))
    replaced = [moment.folder for moment in witness.moments if moment.name == f"rename {SITES_FILE}"][1:]
    start, first, second = (load_progress(each, described.layout).model for each in (*replaced, folder))
    assert not torch.equal(start.adapter, described.start)
    assert torch.equal(first.served, first.adapter)
    torch.testing.assert_close(second.served, (0.5 * first.adapter + second.adapter) / 1.5)
    results = json.loads((folder / "results.json").read_text())
    assert results["validation_records"] == 6
    base, _ = load_base("random:bert", "classification", 2)
    loaded = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    test = prepare(data_spec(parse(table))).test
    assert _loss(loaded, test) == pytest.approx(results["test_loss"], rel=1e-4)
    engine = PublicTraining.of(described).engine
    assert engine is not None
    alone = engine.evaluate(start.adapter, test)
    assert results["public_test_loss"] == pytest.approx(alone.loss, rel=1e-5)
    assert results["public_test_accuracy"] == pytest.approx(alone.accuracy)
    said = json.loads((folder / "privacy.json").read_text())["not_covered"]
    assert any("40% of the validation records (held-out): they are trained on WITHOUT noise" in line for line in said)


def test_sites_send_coefficients_and_the_server_steps_in_the_span(tmp_path):
    """FixSample at rate 1: the first round moves the adapter inside the span of the texts' gradients, and not at all
    outside; the ledgers have paid for as many numbers as there are texts."""
    table = config(tmp_path).to_table()
    table["strategy"] |= {"aggregation": "plain", "optimizer": "fedavg"}
    table["model"] |= {"name": "random:llama", "task": "causal-lm", "targets": "q_proj,v_proj"}
    table["site"] |= {"steps": 1}
    table["site"]["span"] |= {"method": "coefficients", "evolve": False, "samples": 6, "openings": "Notes: |A patient"}
    settings, folder = parse(table | {"rounds": 1}), tmp_path / "run"
    folder.mkdir()
    run_inprocess(settings, folder)
    ready = assemble_sites(settings)
    adapter, span = prepare_span(ready)
    progress = load_progress(folder, ready.layout)
    moved = (progress.model.adapter - adapter).double()
    gradients = span.public.basis(adapter, progress.texts, ready.part).double()
    inside = torch.linalg.lstsq(gradients.T, moved[:, None]).solution[:, 0] @ gradients
    assert float(moved.norm()) > 0
    assert float((moved - inside).norm()) < 1e-5 * float(moved.norm())
    assert progress.texts.tokens.tolist() == span.public.texts.tokens.tolist()
    for site in ("0", "1"):
        ledger = Ledger.open(folder / "silos" / site / "ledger.jsonl", read_only=True)
        assert [event.components[0].dim for event in ledger.events] == [6]
    assert json.loads((folder / "privacy.json").read_text())["private"]
