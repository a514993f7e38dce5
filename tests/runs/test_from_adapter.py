"""A run that goes on from an adapter: the same numbers, a lineage from verified ledgers, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from client.settings import state_folder
from privacy.accountants import composition
from privacy.errors import CorruptRun
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms
from privacy.ledger.statement import rounded_up
from server.config.load import ConfigError, flatten, parse, unflatten
from server.config.schema import RunConfig
from server.evaluation import started_from
from server.evaluation.finished import read_finished
from server.evaluation.published import publish
from server.evaluation.started_from import find_start, keep_start, refuse_other_labels
from server.lineage import read_lineage
from server.run_folder.errors import CannotResume
from server.run_folder.names import LEDGER_FILE, PRIVACY_FILE, RESULTS_FILE, START_FOLDER
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Telemetry
from server.run_folder.verify import verify_run
from server.runs.phase_plan import PhasesConfig
from server.runs.record_level_assembly import assemble_record_level
from server.runs.start import run_in_folder
from simulations.cli.app import app
from simulations.cli.model.export import export
from simulations.history.statement import write_statement
from simulations.presets.load import absolute_paths
from simulations.report.page import write_report
from simulations.report.read_run import read_run
from tests.cases.finished_runs import base_model, records, settings
from tests.cases.kinds import KINDS, begin_or_resume

LLAMA = {"model.targets": "q_proj,v_proj"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("from")
    base_model(place / "base", "llama", "causal-lm")
    return place


def config(place: Path, **changed: Any) -> RunConfig:
    """Of a run on the base model and the records in `place`, unless something else is named."""
    return settings(place, "causal-lm", str(place / "base"), **{**LLAMA, "name": "later", "rounds": 1, **changed})


def made(place: Path, name: str, **changed: Any) -> Path:
    folder = place / name
    folder.mkdir()
    run_in_folder(config(place, **{"name": name, **changed}), folder)
    return folder


@pytest.fixture(scope="module")
def first(place: Path) -> Path:
    return made(place, "first", rounds=2)


@pytest.fixture(scope="module")
def second(place: Path, first: Path) -> Path:
    """Of a run whose folder has gone since."""
    gone = place / "gone"
    shutil.copytree(first, gone)
    folder = made(place, "second", **{"model.adapter": str(gone), "privacy.epsilon": 5.0})
    shutil.rmtree(gone)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def said(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / PRIVACY_FILE).read_text()))


def exported(run: Path, folder: Path) -> Path:
    folder.mkdir()
    export(read_finished(run), folder, folder.name, merged=False)
    return folder


def test_it_begins_where_the_other_ended(place: Path, first: Path, second: Path, tmp_path: Path) -> None:
    for start in (second / START_FOLDER, exported(first, tmp_path / "export")):
        for name, values in weights(first / "adapter").items():
            assert torch.equal(weights(start)[name], values)
    begun = json.loads((second / "metrics.jsonl").read_text().partition("\n")[0])
    ended = json.loads((first / RESULTS_FILE).read_text())
    assert begun["validation_loss"] == pytest.approx(ended["validation_loss"], rel=1e-6)


def test_both_ledgers_are_composed(first: Path, second: Path) -> None:
    told, ledgers = said(second), [Ledger.open(run / LEDGER_FILE, read_only=True) for run in (first, second)]
    steps = [step for ledger in ledgers for step in ledger.commitment.floor]
    epsilon = rounded_up(composition.tightest_bound(steps, 1e-3)[0], 4)
    assert max(said(first)["epsilon"], told["epsilon"]) < epsilon < said(first)["epsilon"] + told["epsilon"]
    assert [(group["runs"], group["epsilon"], group["delta"]) for group in told["together"]] == [
        (["first", "this run's"], epsilon, 1e-3)
    ]
    (entry,) = told["lineage"]
    assert (entry["name"], entry["data"], entry["covered"]) == ("first", "this run's", True)
    assert (entry["epsilon"], entry["ledgers"]) == (said(first)["epsilon"], [ledgers[0].head])
    assert f"epsilon at most {rounded_up(epsilon, 2):.2f} at delta 0.001" in told["sentence"]
    assert "everything this run adds to what it went on from" in told["sentence"]


def test_every_page_says_it(second: Path, tmp_path: Path) -> None:
    told = said(second)
    card = (second / "adapter" / "README.md").read_text()
    assert told["start"] in card
    assert f"epsilon_with_start: {told['together'][0]['epsilon']}" in card
    assert told["start"] in (exported(second, tmp_path / "export") / "README.md").read_text()
    _, officer = write_statement(second)
    assert told["start"] in officer["sentence"]
    alone = read_finished(second)
    assert not officer["risks"]["tight"]
    assert "The 2 runs on this run" in write_report(second).read_text()
    assert alone.statement["together"] == told["together"]
    copy = tmp_path / "copy"
    copy.mkdir()
    publish(alone, copy)
    assert verify_run(copy).statement() == {**alone.statement}
    assert not list(copy.rglob("lineage.json"))


@pytest.mark.nightly
def test_three_runs_in_a_row(place: Path, second: Path) -> None:
    other = f"jsonl:{records(place / 'others.jsonl', 44)}"
    third = made(place, "third", **{"model.adapter": str(second / "adapter"), "data.source": other})
    told = said(third)
    before = [(entry["name"], entry["data"]) for entry in told["lineage"]]
    assert before == [("first", "other 1"), ("second", "other 1")]
    (group,) = told["together"]
    assert (group["data"], group["runs"]) == ("other 1", ["first", "second"])
    assert group["epsilon"] == said(second)["together"][0]["epsilon"]
    fourth = made(place, "fourth", **{"model.adapter": str(third), "model.layers": 0})
    own, others = said(fourth)["together"][0], said(fourth)["lineage"][2]
    assert (own["runs"], others["data"]) == (["first", "second", "this run's"], "other 1")
    assert own["epsilon"] > group["epsilon"]


def test_a_sentence_that_the_ledgers_do_not_bear_out_is_found(second: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(second, run)
    (run / "files.sha256").unlink()
    true = said(run)
    for wrong in (
        {"together": [{**true["together"][0], "epsilon": 1.0}]},
        {"lineage": [{**true["lineage"][0], "data": "other 1"}]},
        {"lineage": [], "together": []},
    ):
        (run / PRIVACY_FILE).write_text(json.dumps(true | wrong))
        with pytest.raises(CorruptRun, match=PRIVACY_FILE):
            verify_run(run).statement()
    (run / PRIVACY_FILE).write_text(json.dumps(true))
    assert verify_run(run).statement() is not None
    shutil.rmtree(run / START_FOLDER / "0")
    with pytest.raises(CorruptRun, match="lineage"):
        verify_run(run).statement()


def test_what_is_not_verified_is_not_covered(place: Path, first: Path, tmp_path: Path) -> None:
    told = said(made(tmp_path, "of-export", **of(place, exported(first, tmp_path / "export"))))
    assert told["together"] == [
        {"data": "this run's", "runs": ["export", "this run's"], "epsilon": None, "delta": 1e-3,
         "how": "'export' has no verified guarantee"}
    ]  # fmt: skip
    assert "The guarantee covers only what this run adds" in told["sentence"]
    assert any("which has no ledger and is not covered" in text for text in told["not_covered"])
    open_run = made(tmp_path, "open", **of(place), **{"privacy.noise": "insecure-zero", "privacy.non-private": True})
    later = made(tmp_path, "of-open", **of(place, open_run))
    assert "which is NOT PRIVATE" in said(later)["start"]
    assert said(later)["together"][0]["epsilon"] is None
    _, officer = write_statement(later)
    assert officer["risks"]["advantage"] == 1.0


def test_a_model_that_an_export_was_merged_into_is_named(place: Path, first: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    export(read_finished(first), whole, "whole", merged=True)
    run = made(tmp_path, "run", **{"model.name": str(whole)})
    (entry,) = said(run)["lineage"]
    assert (entry["kind"], entry["name"], entry["covered"]) == ("base", "whole", False)
    assert (
        "the export of an earlier run, which has no ledger and is not covered" in verify_run(run).statement()["start"]
    )
    keep_start(config(place, **{"model.adapter": str(run), "model.name": str(whole)}), tmp_path)
    assert [ancestor.kind for ancestor in read_lineage(tmp_path / START_FOLDER)] == ["base", "run"]


def test_a_run_that_does_not_verify_is_refused(place: Path, first: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(first, run)
    asked = config(place, **{"model.adapter": str(run)})
    assert find_start(asked).ancestors[0].kind == "run"
    (run / PRIVACY_FILE).write_text(json.dumps(said(run) | {"epsilon": 1.0}))
    with pytest.raises(ConfigError, match=r"model\.adapter = .* cannot be verified: .*privacy\.json is not as the run"):
        find_start(asked)
    shutil.copyfile(first / PRIVACY_FILE, run / PRIVACY_FILE)
    (run / RESULTS_FILE).unlink()
    with pytest.raises(ConfigError, match="cannot be verified"):
        find_start(asked)


def test_canaries_and_a_loss_with_another_start_are_refused(place: Path, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(plain, folder)
    (folder / PRIVACY_FILE).write_text(json.dumps({"canaries": "200 canaries"}))
    with pytest.raises(ConfigError, match="holds the canaries of an audit"):
        find_start(config(place, **{"model.adapter": str(folder)}))
    with pytest.raises(ConfigError, match=r"needs another loss than local\.preference\.loss = 'dpo'"):
        find_start(config(place, **{"model.adapter": str(plain), "model.task": "preference"}))


def test_other_labels_are_refused(place: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(place, **{"model.adapter": str(plain)})
    found = replace(find_start(asked), labels=("no", "yes"))
    monkeypatch.setattr(started_from, "find_start", lambda config: found)
    refuse_other_labels(asked, ["no", "yes"], None)
    with pytest.raises(ConfigError, match="tells no, yes apart, the data have yes, no"):
        refuse_other_labels(asked, ["yes", "no"], None)


def of(place: Path, adapter: Path | None = None) -> dict[str, Any]:
    """Settings on the base model in `place`, and the adapter to go on from."""
    base = {"model.name": str(place / "base")}
    return base if adapter is None else {**base, "model.adapter": str(adapter)}


@pytest.fixture(scope="module")
def plain(place: Path) -> Path:
    """An adapter of PEFT alone, with values that no run starts with."""
    folder = place / "plain"
    model = AutoModelForCausalLM.from_pretrained(place / "base")
    form = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj"], lora_dropout=0.1)
    adapted = get_peft_model(model, form)
    for name, values in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(values, std=0.05)
    adapted.save_pretrained(folder)
    return folder


def test_an_adapter_of_peft_gives_its_form(place: Path, plain: Path, tmp_path: Path) -> None:
    table = flatten(config(place, **{"model.adapter": str(plain)}).to_table())
    for key in ("model.rank", "model.targets", "model.alpha", "model.layers"):
        del table[key]
    asked = absolute_paths(parse(unflatten(table)), tmp_path)
    chosen = asked.model
    assert (chosen.rank, chosen.alpha, chosen.targets, chosen.layers) == (3, 6.0, "k_proj,q_proj", 0)
    folder = tmp_path / "run"
    folder.mkdir()
    run_in_folder(asked, folder)
    told = said(folder)
    assert "the adapter 'plain'" in told["sentence"]
    assert (told["lineage"][0]["kind"], told["together"]) == ("adapter", [])
    for name, values in weights(plain).items():
        assert torch.equal(weights(folder / START_FOLDER)[name], values)
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    assert PeftModel.from_pretrained(base, folder / "adapter") is not None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model.rank": 2}, "model.rank = 2 must be 3"),
        ({"model.alpha": 8.0}, "model.alpha = 8 must be 6"),
        ({"model.targets": "q_proj,v_proj"}, "it lacks 4 of 8 tensors, such as .*v_proj.lora_A"),
        ({"model.layers": 1}, "it has beside them 4 of 8 tensors"),
        ({"model.name": "random:llama"}, "model.name is 'random:llama'"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    place: Path, plain: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    own = {"model.rank": 3, "model.alpha": 6.0, "model.targets": "q_proj,k_proj", "model.adapter": str(plain)}
    with pytest.raises(ConfigError, match=words):
        run_in_folder(config(place, **{**own, **changed}), tmp_path)
    assert not (tmp_path / LEDGER_FILE).exists()


def test_another_base_of_the_same_name_is_refused(place: Path, first: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    run.mkdir()
    shutil.copytree(place / "base", base)
    own = config(place, **{"model.adapter": str(first), "model.name": str(base)})
    assert make_start(own).shape  # the same model in another folder
    values = load_file(base / "model.safetensors")
    save_file({name: value + 0.01 for name, value in values.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"digest .* set model.name to that base model"):
        make_start(own)


def make_start(config: RunConfig) -> torch.Tensor:
    return assemble_record_level(config).start


def test_it_is_resumed_from_its_own_copy(
    place: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, run = tmp_path / "gone", tmp_path / "run"
    shutil.copytree(first, gone)
    run.mkdir()
    own = config(place, **{"model.adapter": str(gone), "rounds": 3, "site.checkpoint-every": 1})
    real = Telemetry.round

    def broken(telemetry: Telemetry, record: RoundRecord) -> None:
        real(telemetry, record)
        if record.round == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Telemetry, "round", broken)
        with pytest.raises(KeyboardInterrupt):
            run_in_folder(own, run)
    shutil.rmtree(gone)
    assert "first" in str(read_run(run).guarantee)
    values = (run / START_FOLDER / "adapter_model.safetensors").read_bytes()
    (run / START_FOLDER / "adapter_model.safetensors").write_bytes(values[:-1] + b"?")
    with pytest.raises(CorruptRun, match=r"start/adapter_model.safetensors is not as the run has written it"):
        run_in_folder(own, run, resume=True)
    (run / START_FOLDER / "adapter_model.safetensors").write_bytes(values)
    with pytest.raises(CannotResume, match=r"model\.adapter is"):
        run_in_folder(own.replace(model=own.model.replace(adapter=str(first))), run, resume=True)
    run_in_folder(own, run, resume=True)
    assert [entry["name"] for entry in said(run)["lineage"]] == ["first"]


def test_the_account_says_whether_it_paid_for_both(
    place: Path, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    account = tmp_path / "notes.account"
    Account.create(account, Terms("notes", "record", 100.0, 0.1, rule="sum"), state_folder()).close()
    paid = made(tmp_path, "paid", **of(place), **{"privacy.account": str(account)})
    later = made(tmp_path, "later", **of(place, paid), **{"privacy.account": str(account)})
    assert "the account has paid for it" in said(later)["start"]
    (unpaid,) = find_start(config(place, **{"model.adapter": str(first), "privacy.account": str(account)})).ancestors
    assert unpaid.debited is False


def test_the_command_rehearses_it(place: Path, first: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    table = config(place, output=str(tmp_path / "runs"))
    file.write_text(table.to_toml())
    done = CliRunner().invoke(app, ["run", str(file), "--from", str(first), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f'model.adapter = "{first}"' in done.output
    unfit = ["run", str(file), "--from", str(first), "--dry-run", "--set", "model.rank=1"]
    done = CliRunner().invoke(app, unfit)
    assert done.exit_code == 2
    assert "model.rank = 1 must be 2" in done.output
    done = CliRunner().invoke(app, ["run", str(file), "--from", str(place / "base"), "--dry-run"])
    assert done.exit_code == 2
    assert "a whole model is named by model.name" in done.output


@pytest.mark.parametrize("kind", ["clients", "phases", "sites"])
@pytest.mark.nightly
def test_every_kind_of_run_goes_on(kind: str, tmp_path: Path) -> None:
    asked = KINDS[kind](tmp_path / "cache")
    begin_or_resume(asked, tmp_path / "first")

    def later(run: RunConfig) -> RunConfig:
        return run.replace(name="later", model=run.model.replace(adapter=str(tmp_path / "first")))

    again = replace(asked, run=later(asked.run)) if isinstance(asked, PhasesConfig) else later(asked)
    begin_or_resume(again, tmp_path / "second")
    told, sound = read_run(tmp_path / "second").guarantee or {}, kind != "phases"
    (entry,) = told["lineage"]
    assert (entry["covered"], entry["data"]) == (sound, "this run's")
    assert told["start"] in told["sentence"]
    if sound:
        (group,) = told["together"]
        assert said(tmp_path / "first")["epsilon"] < group["epsilon"]
    for name, values in weights(tmp_path / "first" / "adapter").items():
        assert torch.equal(weights(tmp_path / "second" / START_FOLDER)[name], values)
