"""A run over the records of one site: what it leaves behind, and what is refused before anything is spent."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from client.models.base import load_base
from client.record_level.settings import RecordLevelSettings
from privacy.accountants.composition import epsilon
from privacy.events import ExampleLevelPoisson, Poisson
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, flatten, parse, unflatten
from server.config.schema import RunConfig
from server.run_folder import names
from server.run_folder.telemetry import read_metrics, read_status
from server.runs.record_level_assembly import assemble_record_level
from server.runs.start import run_in_folder
from simulations.report.page import loading_code, render
from simulations.report.read_run import read_run

STEPS = 6


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def config(cache: Path, **settings: Any) -> RunConfig:
    table = {
        "rounds": STEPS,
        "clients": 1,
        "sampling-rate": 1.0,
        "privacy": {"unit": "group", "delta": 1e-3},
        "strategy": {"controller": "fixed", "optimizer": "fedadam", "served-average": 0.5},
        "model": {"name": "random:bert", "rank": 2, "max-length": 16},
        "data": {
            "partition": "iid",
            "records-per-client": 60,
            "validation-records": 10,
            "test-records": 10,
            "cache": str(cache),
        },
        "site": {"batch-size": 8, "records-per-unit": 1, "checkpoint-every": 4, "warm-up": 1, "schedule": "cosine"},
        "evaluation": {"every": 3},
    }
    return parse(unflatten({**flatten(table), **{key.replace("_", "-"): value for key, value in settings.items()}}))


def run(settings: RunConfig, folder: Path, *, resume: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    run_in_folder(settings, folder, resume=resume)


def test_a_run_leaves_what_a_federation_leaves(cache, tmp_path):
    folder = tmp_path / "run"
    run(config(cache), folder)
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["unit"] == "group:patient"
    assert "adding or removing one patient" in statement["sentence"]
    assert statement["rounds"] == {"committed": STEPS, "charged": STEPS, "released": STEPS}
    assert statement["trust_model"].startswith("the site itself")
    assert any("number of protected units" in line for line in statement["not_covered"])
    assert not any("WITHOUT noise" in line or "steers" in line for line in statement["not_covered"])
    assert 0 < statement["epsilon"] <= 4.0
    assert [record.round for record in read_metrics(folder)] == [0, 3, 6]
    assert read_status(folder).state == "completed"
    base, _ = load_base("random:bert", "classification", 2)
    assert PeftModel.from_pretrained(base, str(folder / "adapter")) is not None
    results = json.loads((folder / "results.json").read_text())
    assert results["rounds_done"] == STEPS
    assert results["label_names"] == ["routine", "urgent"]


EXAMPLES = {"site.sampling-level": "example", "site.records-per-unit": 2}


def test_a_run_that_samples_records_says_so_and_is_charged_as_that(cache, tmp_path):
    folder = tmp_path / "run"
    run(config(cache, **EXAMPLES), folder)
    statement = json.loads((folder / "privacy.json").read_text())
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        (sampling,) = {event.sampling for event in ledger.events}
        multiplier = ledger.charges[0].noise_multiplier
    assert isinstance(sampling, ExampleLevelPoisson)
    assert (sampling.unit, sampling.records_per_unit) == ("group:patient", 2)
    assert sampling.population < sampling.records <= 2 * sampling.population
    assert sampling.expected_units == 8
    assert statement["population"] == sampling.population
    assert "adding or removing one patient" in statement["sentence"]
    assert (
        f"from {sampling.records:,} records of {sampling.population:,} patients, at most 2"
        in statement["sampling"]["round"]
    )
    assert any(
        "number of records that are sampled, at most 2 of one patient" in line for line in statement["not_covered"]
    )
    assert statement["epsilon"] <= 4.0
    units = Poisson(sampling.rate, sampling.population, sampling.unit)
    assert epsilon([(units, multiplier, STEPS)], 1e-3) < 0.9 * statement["epsilon"]
    assert read_status(folder).state == "completed"
    page = render(read_run(folder))
    assert f"{sampling.records:,} records, at most 2 of each of {sampling.population:,} group:patients" in page
    assert read_run(folder).config.units_text == "records"


def test_what_is_done_with_held_out_records_is_stated(cache, tmp_path):
    folder = tmp_path / "run"
    public = {"public.warm-start-epochs": 1, "public.training-fraction": 0.3, "strategy.controller": "rl"}
    run(config(cache, **public, **{"evaluation.every": 1, "rounds": 2}), folder)
    found = json.loads((folder / "privacy.json").read_text())["not_covered"]
    assert any(
        line.startswith("30% of the validation records (held-out): they are trained on WITHOUT") for line in found
    )
    assert any("it is read without noise and steers what is released (rl, fedadam)" in line for line in found)


@pytest.mark.nightly
def test_the_lines_of_the_card_say_the_class_of_a_text(cache, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    run(config(cache), folder)
    monkeypatch.chdir(tmp_path.parent)
    code = loading_code(read_run(folder))
    assert code is not None
    assert code.replace(f"{tmp_path.name}/run/adapter", "adapter") in (folder / "adapter" / "README.md").read_text()
    long = code.replace('"a text"', repr("chest pain " * 100))  # cut, since the model has 64 positions
    assert long != code
    for lines in (code, long):
        names: dict[str, Any] = {}
        exec(lines, names)
        logits = names["model"](**names["tokens"])
        assert names["tokens"]["input_ids"].shape[1] <= 16
        assert capsys.readouterr().out.strip() == ("routine", "urgent")[int(logits.argmax())]
    # of the trained adapter: without it, the head is zero and cannot tell the classes apart
    assert logits.abs().max() > 0


def test_without_a_statement_the_guarantee_is_that_of_the_ledger(cache, tmp_path):
    """In the words of a site, of a run that was interrupted before it wrote one: no server is trusted."""
    run(config(cache), tmp_path / "run")
    for name in (names.PRIVACY_FILE, names.RESULTS_FILE, names.SEAL_FILE):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run" / names.ADAPTER_FOLDER)
    status = tmp_path / "run" / names.STATUS_FILE
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "running"}))
    said = read_run(tmp_path / "run").guarantee
    assert said is not None
    assert "against anyone; other runs" in said["sentence"]
    assert any("that a site fails" in line for line in said["not_covered"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"site.batch-size": 5000}, "batch_size must be <= the number of units"),
        ({"privacy.epsilon": 5000.0}, "privacy.epsilon = 5000 over 6 steps of 8 of"),
        ({"privacy.delta": 0.4}, "delta must be < 1/population"),
        ({"strategy.controller": "dp-lac", "evaluation.every": 1}, "clip-norm"),
        ({"strategy.aggregation": "flora"}, "this is one"),
        ({"clients": 2, "sampling-rate": 1.0}, "clients = 2: .* grid"),
        ({"site.warm-up": 6}, "warm_up must be < steps"),
        ({**EXAMPLES, "site.batch-size": 500}, "batch_size must be <= the number of records under the cap"),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(cache, tmp_path, settings, reason):
    with pytest.raises(ValueError, match=reason):
        run(config(cache, **settings), tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"local.balance": "prior"}, "local.balance"),
        ({"site.steps": 2}, "site.steps"),
        ({"data.source": "jsonl:x.jsonl"}, "unit-column"),
        ({**EXAMPLES, "privacy.mode": "filter"}, "privacy.mode = 'filter' with .*'example' must be 'floor'"),
        ({**EXAMPLES, "privacy.unit": "record"}, "privacy.unit = 'record' with .*'example' must be 'group'"),
        ({**EXAMPLES, "site.records-per-unit": 0}, "site.records-per-unit = 0 with .* must be in 1..256"),
        ({**EXAMPLES, "audit.canaries": 2}, "audit.canaries = 2 with"),
        ({**EXAMPLES, "clients": 3}, "clients = 3 with .* draw whole units"),
    ],
)
def test_settings_that_no_site_can_have(cache, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        config(cache, **settings)


def test_no_noise_needs_the_flag_and_is_stamped(cache, tmp_path):
    with pytest.raises(ValueError, match="not_private"):
        RecordLevelSettings(unit="record", steps=1, batch_size=1, epsilon=1.0, delta=1e-5, noise="insecure-zero")
    folder = tmp_path / "run"
    run(
        config(
            cache, **{"privacy.noise": "insecure-zero", "privacy.non-private": True, "rounds": 2, "site.warm-up": 0}
        ),
        folder,
    )
    assert "NOT PRIVATE" in json.loads((folder / "privacy.json").read_text())["sentence"]
    assert "NOT PRIVATE" in (folder / "adapter" / "README.md").read_text()
    assert all(record.not_private for record in read_metrics(folder))


def test_records_of_a_language_model(cache, tmp_path):
    lines = [json.dumps({"text": f"Patient {i} has a diagnosis of code {i % 7}."}) for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    settings = config(
        cache,
        **{
            "data.source": f"jsonl:{tmp_path / 'texts.jsonl'}", "privacy.unit": "record", "model.task": "causal-lm",
            "model.name": "random:llama", "model.targets": "q_proj,v_proj", "rounds": 2, "site.warm-up": 0,
            "site.gradients": "opacus",
        },
    )  # fmt: skip
    assert len(assemble_record_level(settings).index) == 40
    run(settings, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert 1 < results["test_perplexity"] < 400
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["unit"] == "record"
