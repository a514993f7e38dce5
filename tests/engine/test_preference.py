"""Losses over pairs: the papers' formulas, written here on plain PEFT and autograd, and pairs of any kind."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, peft_config
from client.models.tasks import Preference, make_task
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.contribution import GRID, Plan, contribute
from tests.cases.cohorts import distance, pairs, start, threads

SPEC = LoraSpec(2, 4.0, ("q_proj", "v_proj"))
LOSSES = [{"loss": "dpo", "beta": 0.3}, {"loss": "simpo", "beta": 2.5, "gamma": 0.4}]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def model() -> Any:
    return load_base("random:llama", "preference")[0]


def answer_scores(logits: Tensor, ids: Tensor, weights: np.ndarray, mean: bool) -> Tensor:
    """Log-probability of the tokens of an answer, as TRL's trainers compute it."""
    each = F.log_softmax(logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    given = torch.from_numpy(weights[1:] > 0)
    return each[given].mean() if mean else each[given].sum()


def plain_losses(vector: Tensor, records: Records, loss: str, beta: float, gamma: float = 0.0) -> tuple[Any, Any]:
    """Loss of every pair, and its gradient, by PEFT: one text at a time, the start model without adapter."""
    adapted = get_peft_model(model().double(), peft_config(SPEC), autocast_adapter_dtype=False).double().eval()
    state = {name: p for name, p in adapted.named_parameters() if ".lora_" in name}
    layout = adapter_layout(model(), SPEC)
    named = [state[entry.name.replace(".weight", ".default.weight")] for entry in layout.entries]
    with torch.no_grad():
        for entry, parameter in zip(layout.entries, named, strict=True):
            parameter.copy_(entry.of(vector))
    losses, rows = [], []
    for i in range(len(records)):
        low, high = records.offsets[i], records.offsets[i + 1]
        middle = low + records.splits[i]
        scores, before = [], []
        for span in (slice(low, middle), slice(middle, high)):
            ids, weights = torch.tensor(records.tokens[span])[None].long(), records.token_weights[span]
            scores.append(answer_scores(adapted(input_ids=ids).logits, ids, weights, loss == "simpo"))
            with torch.no_grad(), adapted.disable_adapter():
                before.append(answer_scores(adapted(input_ids=ids).logits, ids, weights, False))
        for parameter in named:
            parameter.requires_grad_(True)
        margin = scores[0] - scores[1]
        if loss == "dpo":
            value = -F.logsigmoid(beta * (margin - (before[0] - before[1])))
        else:
            value = -F.logsigmoid(beta * margin - gamma)
        losses.append(value.item())
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, named)]))
    return torch.tensor(losses, dtype=torch.float64), torch.stack(rows)


@pytest.mark.parametrize("settings", LOSSES)
def test_losses_and_gradients_of_pairs_are_those_of_plain_peft(settings: dict[str, Any]) -> None:
    records, base = pairs(7), model()
    vector = start(base, SPEC)
    expected, gradients = plain_losses(vector, records, **settings)
    for precision, tolerance in (("fp64", 1e-11), ("fp32", 1e-5)):
        task = make_task("preference", **settings)
        engine = CohortEngine(copy.deepcopy(base), SPEC, task, precision=precision, token_budget=60)
        for chunk in engine.per_record_gradients(vector, records):
            assert distance(chunk.rows.double(), gradients[chunk.records]) < tolerance
            assert distance(chunk.losses.double(), expected[chunk.records]) < tolerance
        assert float(engine.losses(vector, [records])[0]) == pytest.approx(float(expected.mean()), rel=tolerance)
        assert engine.evaluate(vector, records).loss == pytest.approx(float(expected.mean()), rel=tolerance)


@pytest.mark.parametrize("settings", LOSSES)
def test_cohort_updates_over_pairs_equal_sequential_peft(settings: dict[str, Any]) -> None:
    base, task = model(), make_task("preference", **settings)
    vector, clients = start(base, SPEC), [pairs(3, seed=3), pairs(1).span(0, 0), pairs(5, seed=5)]
    oracle = SequentialEngine(copy.deepcopy(base), SPEC, task, precision="fp64")
    engine = CohortEngine(base, SPEC, task, precision="fp64", token_budget=90)
    local = LocalTraining(learning_rate=0.5, batch_size=2, epochs=2)
    found, expected = (one.train_all(vector, clients, local, [1, 2, 3]) for one in (engine, oracle))
    assert distance(found, expected) < 1e-11
    assert found[0].norm() > 0
    assert not found[1].any()
    metrics, reference = (one.evaluate(vector, clients[2]) for one in (engine, oracle))
    assert metrics.loss == pytest.approx(reference.loss, rel=1e-11)
    assert (metrics.accuracy, metrics.count, metrics.perplexity) == (reference.accuracy, 5, None)


def test_at_its_start_a_model_prefers_nothing_and_learns_to() -> None:
    base, records = model(), pairs(12)
    layout = adapter_layout(base, SPEC)
    origin = torch.zeros(layout.size)
    for entry in layout.entries:
        if entry.factor == "A":
            entry.of(origin).normal_(generator=torch.Generator().manual_seed(3))
    engine = CohortEngine(base, SPEC, Preference())
    first = engine.evaluate(origin, records)
    assert (first.accuracy, first.count) == (0.5, 12)
    assert first.loss == pytest.approx(np.log(2), rel=1e-12)
    local = LocalTraining(optimizer="adamw", learning_rate=0.1, batch_size=4, epochs=10)
    (update,) = engine.train_all(origin, [records], local, [0])
    found = engine.evaluate(origin + engine.layout.with_trainable(torch.zeros_like(origin), update), records)
    assert found.accuracy > 0.9
    assert found.loss < first.loss


def test_the_start_model_is_asked_once_for_a_pair_whatever_residual_moves_the_base() -> None:
    from strategies.adapter.residual import residual_size

    base, records = model(), pairs(5)
    vector, engine = start(base, SPEC), CohortEngine(base, SPEC, Preference(), precision="fp64")
    fresh = CohortEngine(model(), SPEC, Preference(), precision="fp64")
    list(engine.per_record_gradients(vector, records))
    run = engine.tokens_run
    once = [chunk.losses for chunk in engine.per_record_gradients(vector, records)]
    assert engine.tokens_run < 2 * run  # the first time took a pass more
    residual = 0.1 * torch.randn(residual_size(engine.layout), generator=torch.Generator().manual_seed(0))
    for one in (engine, fresh):
        one.set_residual(residual)
    moved, of_fresh = ([chunk.losses for chunk in one.per_record_gradients(vector, records)] for one in (engine, fresh))
    assert torch.equal(torch.cat(moved), torch.cat(of_fresh))
    assert not torch.allclose(torch.cat(once), torch.cat(moved))


EXTREMES = {
    "equal": [([5, 6, 7], [5, 6, 7])],
    "no answer": [([5], [5])],
    "one without an answer": [([5], [5, 6, 7])],
    "as long as it gets": [(list(range(3, 95)), [3, 4])],
    "one token over and over": [([9] * 90, [8] * 90)],
    "many": [([5, 6, 7, 8 + i % 50], [5, 6, 9 + i % 40]) for i in range(200)],
}


@pytest.mark.parametrize("settings", LOSSES)
@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.nightly
def test_no_pairs_contribute_more_than_the_threshold(kind: str, settings: dict[str, Any]) -> None:
    """The guarantee's only premise, whatever a client's pairs and however far its training runs away."""
    records = pairs(0, made=EXTREMES[kind])
    base = model()
    vector, engine = start(base, SPEC), CohortEngine(base, SPEC, make_task("preference", **settings))
    for rate in (0.1, 1e30):
        local = LocalTraining(learning_rate=rate, batch_size=4, epochs=2)
        rows = engine.train_all(vector, [records], local, [0])
        plan = Plan(FlatClip(0.5, engine.layout.dim), 1.0, ())
        total = contribute(Units(rows), plan)
        assert sum(int(value) ** 2 for value in total.encoded) <= GRID**2
    if kind in ("equal", "no answer"):
        assert engine.train_all(vector, [records], LocalTraining(), [0]).norm() < 1e-6
