"""Frozen weights in 8 and 4 bits: the engine computes what plain PEFT computes on the rounded model."""

import copy
from pathlib import Path

import pytest
import torch

from client.engine.cohort import CohortEngine
from client.engine.engine import build_engine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.frozen.base import FrozenBase
from client.models.frozen.linear import FrozenLinear
from client.models.frozen.quantised import NF4, Quantised, QuantisedWeight, block_linears, round_blocks, stored_bytes
from client.models.lora import LoraSpec
from client.models.tasks import make_task
from tests.cases.cohorts import build, clients, distance, fresh, start

KINDS = ("int8", "nf4")


@pytest.mark.parametrize(("kind", "steps"), [("int8", 1 / 254), ("nf4", 0.1520)])
def test_a_value_is_rounded_to_the_nearest_of_its_block(kind, steps):
    torch.manual_seed(0)
    weight = torch.randn(24, 40) * torch.logspace(-3, 3, 24)[:, None]
    wide = Quantised(weight, kind).wide()
    largest = weight.flatten().view(-1, 64).abs().amax(dim=1).repeat_interleave(64).view(24, 40)
    assert ((wide - weight).abs() <= steps * 1.001 * largest).all(), "half the widest gap between two neighbours"
    assert torch.equal(wide.flatten().view(-1, 64).abs().amax(dim=1), weight.flatten().view(-1, 64).abs().amax(dim=1))
    again = Quantised(wide, kind).wide()
    torch.testing.assert_close(again, wide, rtol=1e-6, atol=0)
    if kind == "nf4":
        shares = (wide / largest).flatten()
        assert (shares[:, None] - torch.tensor(NF4)).abs().amin(dim=1).max() < 1e-6


@pytest.mark.parametrize(("kind", "bytes_each"), [("int8", 1 + 4 / 64), ("nf4", 0.5 + 4 / 64)])
def test_what_is_stored_is_small(kind, bytes_each):
    found = Quantised(torch.randn(64, 48), kind)
    assert found.nbytes == stored_bytes(64 * 48, kind) == 64 * 48 * bytes_each


@pytest.mark.parametrize("kind", KINDS)
def test_odd_shapes_zeros_and_dtypes(kind):
    assert torch.equal(Quantised(torch.zeros(3, 5), kind).wide(), torch.zeros(3, 5))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        weight = torch.randn(7, 11, dtype=dtype)
        wide = Quantised(weight, kind).wide()
        assert (wide.dtype, wide.shape) == (dtype, weight.shape)
        assert distance(wide, weight) < 0.15


def made(name, kind, precision):
    """The engine with quantised weights, and plain PEFT on the rounded model."""
    model, spec, task = build(name)
    rounded = fresh(model)
    if precision == "fp64":
        rounded.double()
    round_blocks(rounded, kind)
    vector = start(model, spec)
    engine = CohortEngine(fresh(model), spec, task, precision=precision, quantisation=kind, token_budget=60)
    return engine, SequentialEngine(rounded, spec, task, precision=precision), vector


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral"])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-10), pytest.param("fp32", 3e-5, marks=pytest.mark.nightly)]
)
def test_updates_and_record_gradients_are_those_of_peft_on_the_rounded_model(name, kind, precision, tolerance):
    engine, oracle, vector = made(name, kind, precision)
    cohort, local = clients((5, 0, 9)), LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=4, epochs=2)
    found, expected = (one.train_all(vector, cohort, local, (1, 2, 3)) for one in (engine, oracle))
    assert distance(found, expected) < tolerance
    assert expected.norm() > 1e-3
    rows = torch.cat([chunk.rows for chunk in oracle.per_record_gradients(vector, cohort[2])])
    for chunk in engine.per_record_gradients(vector, cohort[2]):
        assert distance(chunk.rows, rows[chunk.records]) < tolerance
    plain, spec, task = build(name)
    other = CohortEngine(plain, spec, task, precision=precision).train_all(vector, cohort, local, (1, 2, 3))
    assert distance(other, expected) > 1e-4, "the weights were rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_bit_for_bit_those_of_the_rounded_weight(kind):
    model, spec, task = build("llama")
    vector, cohort, local = start(model, spec), clients((5, 9)), LocalTraining(optimizer="adamw", learning_rate=1e-3)
    rounded = fresh(model)
    round_blocks(rounded, kind)
    expected = CohortEngine(rounded, spec, task, precision="fp32").train_all(vector, cohort, local, (1, 2))
    found = CohortEngine(model, spec, task, precision="fp32", quantisation=kind).train_all(
        vector, cohort, local, (1, 2)
    )
    assert torch.equal(found, expected)


def test_only_the_blocks_are_quantised():
    model, spec, task = build("llama")
    names = set(block_linears(model))
    assert len(names) == 2 * 7
    assert all(name.startswith("model.layers.") for name in names)
    engine = CohortEngine(model, spec, task, precision="fp32", quantisation="nf4")
    kinds = {path: type(module.weight_) for path, module in model.named_modules() if hasattr(module, "weight_")}
    assert {path for path, kind in kinds.items() if kind is QuantisedWeight} == names
    assert isinstance(model.lm_head, FrozenLinear)
    assert kinds["lm_head"] is not QuantisedWeight
    assert not any("layers" in name and "norm" not in name for name, _ in engine._stacked.model.named_parameters())


def test_nothing_holds_the_file_that_weights_came_from():
    model, _ = load_base("smollm2", "causal-lm", dtype=torch.bfloat16)
    in_the_file = {weight.data_ptr() for weight in model.parameters()}
    CohortEngine(
        model, LoraSpec(2, 4.0, ("q_proj",)), make_task("causal-lm"), precision="bf16-model", quantisation="nf4"
    )
    assert model.lm_head.weight_.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(), "tied, so held once"
    assert not in_the_file & {weight.data_ptr() for weight in model.parameters()}


def test_ternary_weights_are_refused():
    model, _ = load_base("random:bitnet-ternary", "causal-lm")
    with pytest.raises(ValueError, match="ternary already"):
        FrozenBase(quantisation="int8").refuse_unfit(model, "cpu", 0)
    with pytest.raises(ValueError, match="ternary already"):
        CohortEngine(model, LoraSpec(2, 4.0, ("q_proj",)), make_task("causal-lm"), quantisation="int8")


def test_an_adapter_that_cannot_be_stacked_is_trained_on_the_rounded_model_too():
    model, spec, task = build("llama")
    rounded, vector = fresh(model), start(model, spec)
    round_blocks(rounded, "nf4")
    records = clients((6,))[0]
    expected = SequentialEngine(rounded, spec, task).evaluate(vector, records).loss
    for sequential in (True, False):
        engine = build_engine(fresh(model), spec, task, sequential=sequential, precision="fp32", quantisation="nf4")
        assert engine.evaluate(vector, records).loss == pytest.approx(expected, rel=1e-6)


def test_generation_and_scores_see_the_rounded_model():
    base = FrozenBase(quantisation="nf4")
    plain, rounded = (load("random:llama", "causal-lm")[0] for load in (base.load, base.load_rounded))
    expected = copy.deepcopy(plain)
    round_blocks(expected, "nf4")
    for (name, one), two, three in zip(
        rounded.named_parameters(), expected.parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(one, two)
        assert torch.equal(one, three) != (".layers." in name and "norm" not in name)


def test_bfloat16_weights_are_never_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is loaded is what the files hold: no float32 copy is made on the way."""
    from transformers import PreTrainedModel

    asked = []
    original = PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(
        PreTrainedModel,
        "from_pretrained",
        classmethod(lambda kind, *a, **options: asked.append(options["dtype"]) or original(kind, *a, **options)),
    )
    for precision, dtype in (("bf16-model", torch.bfloat16), ("fp32", torch.float32)):
        for load in (FrozenBase(precision=precision).load, FrozenBase(precision=precision).load_rounded):
            model, _ = load("lacquer-small", "causal-lm")
            assert asked.pop() == dtype
            assert {values.dtype for values in model.parameters()} == {dtype}
            assert model.head_is_last, "the loss computes the logits it needs only"
