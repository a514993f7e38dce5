"""What the rehearsal passes a run does not fail on; what would fail behind the first charge is refused before it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.config.load import parse
from server.run_folder.names import RESULTS_FILE
from server.run_folder.telemetry import read_status
from server.runs.start import run_in_folder
from simulations.engines.inprocess import run_inprocess
from simulations.preflight import check_and_rehearse, check_run
from simulations.presets.asked import Asked
from strategies.aggregations.aggregation import Rewritten
from strategies.aggregations.factors import Plain
from strategies.controllers.fixed import Fixed
from strategies.optimizers.fedavg import FedAvg
from tests.cases.finished_runs import base_model, settings
from tests.cases.kinds import KINDS, in_span, over_clients
from tests.cases.moments import charges
from tests.cases.runs import tiny

LLAMA = {"model.targets": "q_proj,v_proj"}
HERE = "tests.runs.test_rehearsal"


class NanOptimizer(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: Any) -> Any:
        return state, parameters * float("nan")


class NanInRoundThree(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: Any) -> Any:
        return state, parameters * (float("nan") if step.round == 3 else 1.0)


class OneTensor(FedAvg):
    def step(self, state: Any, parameters: Tensor, step: Any) -> Any:
        return parameters


class WithoutMoments:
    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, state: Any, parameters: Tensor, step: Any) -> Any:
        return state, parameters


class WithoutPlan:
    reads_validation = False

    def init(self, info: Any, public: Any) -> None: ...


@dataclass(frozen=True)
class PlansHalf(Fixed):
    def plan(self, state: Any, info: Any, round: int) -> Any:
        return 0.5


@dataclass(frozen=True)
class Done:
    rounds: int


@dataclass(frozen=True)
class Forgetful(Fixed):
    def init(self, info: Any, public: Any) -> Any:
        return Done(0)

    def update(self, state: Any, info: Any, released: Any, public: Any) -> Any:
        return None


class Shortened(Plain):
    def rewritten(self, adapter: Tensor, layout: Any) -> Any:
        return Rewritten(adapter[1:], {})


@pytest.mark.parametrize(
    ("role", "name", "says"),
    [
        ("optimizer", "NanOptimizer", "breaks a rule: finite"),
        ("optimizer", "OneTensor", "OneTensor.step"),
        ("optimizer", "WithoutMoments", "is no Optimizer, it has no moments"),
        ("controller", "WithoutPlan", "is no Controller, it has no .*plan"),
        ("controller", "PlansHalf", r"PlansHalf.plan returned 0.5; it must return a Plan"),
        ("controller", "Forgetful", "Forgetful.update|the state"),
        ("aggregation", "Shortened", "breaks a rule: "),
    ],
)
@pytest.mark.nightly
def test_a_method_of_ones_own_that_breaks_its_contract_is_refused(
    role: str, name: str, says: str, tmp_path: Path
) -> None:
    strategy = {"controller": "fixed", role: f"{HERE}:{name}"}
    with pytest.raises(ValueError, match=says) as refused:
        check_run(Asked(tiny(tmp_path / "cache", strategy=strategy)))
    assert name in str(refused.value)


@pytest.mark.parametrize(
    ("role", "name", "says"),
    [
        ("optimizer", "NanInRoundThree", r"step returned nan \(\d+ of \d+ numbers are not finite\) in round 3"),
        ("optimizer", "OneTensor", r"OneTensor.step returned a Tensor of shape \(\d+,\); it must return a tuple"),
        ("controller", "Forgetful", "Forgetful.update returned None; it must return the state, a Done"),
        ("aggregation", "Shortened", "Shortened.rewritten returned a Tensor of shape"),
    ],
)
def test_a_wrong_answer_ends_a_run_before_the_next_charge(role: str, name: str, says: str, tmp_path: Path) -> None:
    strategy, folder = {"controller": "fixed", role: f"{HERE}:{name}"}, tmp_path
    config = tiny(tmp_path / "cache", rounds=5, strategy=strategy)
    with pytest.raises(ValueError, match=says):
        run_inprocess(config, folder)
    status = read_status(folder)
    assert status is not None
    assert status.state == "failed"
    assert f"strategy.{role} = '{HERE}:{name}'" in status.message
    assert len(charges(folder)) == {"NanInRoundThree": 3, "OneTensor": 1, "Forgetful": 1, "Shortened": 0}[name]


def llama(folder: Path, change: Any) -> Path:
    """A Llama of 260 embeddings, changed."""
    base_model(folder, "llama", "instruction")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    change(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def broken_weights(model: Any, tokenizer: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")


def without_pad_and_end(model: Any, tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token = None


def raising_template(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"


@pytest.mark.parametrize(
    ("change", "changed", "says"),
    [
        (lambda m, t: t.add_special_tokens({"pad_token": "[PAD]"}), {}, r"beyond the model's \d+ embeddings"),
        (lambda m, t: t.add_tokens(["<drug>", "<dose>"]), {}, r"2 of its tokenizer's \d+ tokens .* embeddings"),
        (broken_weights, {}, "validation loss is nan"),
        (without_pad_and_end, {}, "the chat template cannot render it: 'eos_token' is undefined"),
        (raising_template, {"model.chat-template": "own"}, "template"),
        (lambda m, t: None, {"evaluation.rouge-tokens": 500}, "evaluation.rouge-tokens = 500 must be at most"),
    ],
)
def test_what_a_model_cannot_do_is_refused(change: Any, changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    base = llama(tmp_path / "base", change)
    with pytest.raises(ValueError, match=says):
        check_run(Asked(settings(tmp_path, "instruction", str(base), **{**LLAMA, **changed})))


@pytest.mark.parametrize("task", ["causal-lm", "summarisation"])
def test_a_tokenizer_without_pad_and_end_passes_and_runs(task: str, tmp_path: Path) -> None:
    config, folder = (
        settings(tmp_path, task, str(llama(tmp_path / "base", without_pad_and_end)), **LLAMA),
        tmp_path / "run",
    )
    check_run(Asked(config))
    folder.mkdir()
    run_in_folder(config, folder)
    assert '"missing": {}' in (folder / RESULTS_FILE).read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_kind_pass(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind](tmp_path / "cache")
    asked = Asked(config) if hasattr(config, "clients") else Asked(config.run, config)
    before = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    check_run(asked)
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before, "nothing is left"


@pytest.mark.parametrize("unit", ["client", "record"])
def test_a_deployment_is_rehearsed_without_its_records(unit: str, tmp_path: Path) -> None:
    own = {"aggregation": "plain"} if unit == "record" else {"optimizer": f"{HERE}:OneTensor"}
    config = tiny(tmp_path / "cache", strategy={"controller": "fixed", **own})
    table = config.to_table()
    table["data"] |= {"held-by": "nodes"}
    table |= {"clients": 2, "sampling-rate": 1.0}
    table["privacy"] |= {"unit": unit}
    deployed = parse(table)
    if unit == "record":
        check_and_rehearse(deployed)
    else:
        with pytest.raises(ValueError, match="OneTensor"):
            check_and_rehearse(deployed)


@pytest.mark.parametrize(
    ("broken", "make", "says"),
    [
        ("simulations.engines.rehearsal.write_classifier", over_clients, "exporting"),
        ("client.record_level.synthetic_texts.Synthesiser.evolve_texts", in_span, "writing texts for site.span"),
    ],
)
def test_a_stage_that_fails_is_named(
    broken: str, make: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(ValueError, match=rf"rehearsal, {says}, .*: IndexError: index out of range in self"):
        check_run(Asked(make(tmp_path / "cache")))


@pytest.mark.parametrize(("key", "value"), [("samples", 5), ("directions", 7)])
def test_a_span_of_texts_is_refused_by_its_settings(key: str, value: int, tmp_path: Path) -> None:
    table = in_span(tmp_path / "cache").to_table()
    table["site"]["span"] |= {"method": "projection", "directions": 2, key: value}
    with pytest.raises(ValueError, match=rf"^site\.span\.{key} = {value} must be "):
        parse(table)
