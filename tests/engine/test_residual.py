"""A residual beside the frozen weights is what adding it to them would be, in every engine, and can be saved."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.frozen.bitnet import is_ternary
from client.models.lora import LoraSpec, adapter_layout, as_one_adapter, save_peft
from client.models.tasks import Batch, make_task
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.residual import pairs, residual_size
from strategies.messages.client_update import EvaluateRequest
from strategies.messages.records import BadMessage
from tests.cases.cohorts import ARCHITECTURES, build, clients, fresh, start

LOCAL = LocalTraining(learning_rate=0.1, batch_size=4)


def drawn(layout: AdapterLayout, rank: int | None = None) -> Tensor:
    """A random residual, of so many ranks in every layer if given."""
    generator = torch.Generator().manual_seed(2)
    residual = torch.zeros(residual_size(layout))
    for pair in pairs(layout):
        rows, columns = pair.shape
        inner = rank or min(rows, columns)
        left, right = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
        pair.of(residual).copy_(0.02 * left @ right)
    return residual


def moved(model: nn.Module, residual: Tensor, layout: AdapterLayout) -> nn.Module:
    """A copy of the model with the residual in its weights."""
    copy = fresh(model)
    for pair in pairs(layout):
        module = copy.get_submodule(pair.a.pair)
        added = pair.of(residual)
        with torch.no_grad():
            module.weight += added if isinstance(module, nn.Linear) else added.T
    return copy


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_engines_compute_as_if_the_weights_had_moved(name):
    model, spec, task = build(name)
    layout, vector, people = adapter_layout(model, spec), start(model, spec), clients((6, 3))
    residual = drawn(layout)
    oracle = CohortEngine(moved(model, residual, layout), spec, task, precision="fp64")
    for engine in (
        CohortEngine(fresh(model), spec, task, precision="fp64"),
        SequentialEngine(fresh(model), spec, task, precision="fp64"),
    ):
        before = engine.evaluate(vector, people[0]).loss
        for _ in range(2):  # adding it again does not add it twice
            engine.set_residual(residual)
        loss = oracle.evaluate(vector, people[0]).loss
        assert engine.evaluate(vector, people[0]).loss == pytest.approx(loss, rel=1e-6)
        assert abs(loss - before) > 1e-3
        expected = oracle.train_all(vector, people, LOCAL, [1, 2])
        torch.testing.assert_close(engine.train_all(vector, people, LOCAL, [1, 2]), expected, atol=1e-6, rtol=1e-4)
        engine.set_residual(None)
        assert engine.evaluate(vector, people[0]).loss == before


def test_a_ternary_weight_takes_one_in_the_stacked_engine_alone():
    model, _ = load_base("random:bitnet-ternary", "causal-lm")
    spec, task = LoraSpec(2, 4.0, ("q_proj",)), make_task("causal-lm", 0)
    assert is_ternary(next(m for path, m in model.named_modules() if path.endswith("q_proj")))
    layout, vector = adapter_layout(model, spec), start(model, spec)
    sequential = SequentialEngine(fresh(model), spec, task)
    with pytest.raises(ValueError, match="takes no residual"):
        sequential.set_residual(drawn(layout))
    sequential.set_residual(None)  # as every evaluation does
    assert not sequential._loaded
    engine = CohortEngine(fresh(model), spec, task, precision="fp32")
    # a residual of s B' A' and the adapter without it are the adapter with twice B
    residual = torch.zeros(residual_size(layout))
    for pair in pairs(layout):
        pair.of(residual).copy_(spec.scale * pair.b.of(vector) @ pair.a.of(vector))
    people, doubled = clients((5,)), vector.clone()
    for pair in pairs(layout):
        pair.b.of(doubled).mul_(2)
    expected = engine.evaluate(doubled, people[0]).loss
    engine.set_residual(residual)
    assert engine.evaluate(vector, people[0]).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("rank", [3, None])
def test_peft_computes_the_same_from_one_adapter(name, rank, tmp_path):
    model, spec, task = build(name)
    layout, vector, records = adapter_layout(model, spec), start(model, spec), clients((5,))[0]
    residual = drawn(layout, rank)
    engine = CohortEngine(fresh(model), spec, task, precision="fp32")
    engine.set_residual(residual)
    one, wider, its = as_one_adapter(vector, residual, layout, spec)
    if rank:
        assert its.rank == rank + spec.rank
    assert its.scale == 1.0
    save_peft(tmp_path, one, wider, its)
    loaded = PeftModel.from_pretrained(fresh(model), str(tmp_path)).eval()
    totals = task.no_totals()
    for row in range(len(records)):
        ids = torch.from_numpy(records.select([row]).tokens.astype("int64"))[None]
        batch = Batch(ids, torch.ones_like(ids), torch.from_numpy(records.labels[row : row + 1]))
        with torch.no_grad():
            totals += task.totals(loaded(input_ids=ids).logits, batch)
    assert engine.evaluate(vector, records).loss == pytest.approx(task.metrics(totals).loss, rel=1e-5)


def test_one_of_another_size_is_refused():
    model, spec, task = build("bert")
    layout, vector = adapter_layout(model, spec), start(model, spec)
    wrong = torch.zeros(residual_size(layout) - 1)
    for engine in (CohortEngine(fresh(model), spec, task), SequentialEngine(fresh(model), spec, task)):
        with pytest.raises(ValueError, match=f"must have {residual_size(layout)} values"):
            engine.set_residual(wrong)
    with pytest.raises(ValueError, match="residual must have"):
        as_one_adapter(vector, wrong, layout, spec)


def test_it_travels_with_the_adapter():
    sent = EvaluateRequest(np.ones(3, np.float32), "test", 0, 4, "{}", np.arange(5, dtype=np.float32))
    found = EvaluateRequest.from_records(sent.to_records()).residual
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]
    sent = EvaluateRequest(np.ones(3, np.float32), "test", 0, 4, "{}")
    assert EvaluateRequest.from_records(sent.to_records()).residual is None
    records = sent.to_records()
    records["arrays"]["residual"] = EvaluateRequest(np.ones(3, np.float64), "test", 0, 4, "{}").to_records()["arrays"][
        "adapter"
    ]
    records["arrays"]["residual"].dtype = "float64"
    with pytest.raises(BadMessage, match=r"'residual' .*float32"):
        EvaluateRequest.from_records(records)
