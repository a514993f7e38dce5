"""What a round trains: which values, in which order, at which scale; and few ranks are plain PEFT of that rank."""

import json
from dataclasses import replace

import pytest
import torch

from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.lora import LoraSpec, adapter_layout
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.trainable import TrainedSubset
from tests.cases.cohorts import build, clients, distance, fresh, start

PARTS = [
    TrainedSubset(),
    TrainedSubset("a"),
    TrainedSubset("b"),
    TrainedSubset("both", 1),
    TrainedSubset("a", 3),
    TrainedSubset("b", 2),
    TrainedSubset("both", 4),
    TrainedSubset("both", 2, 0.25, 8.0),
    TrainedSubset("b", None, 1.0, 0.5),
    TrainedSubset("both", 2, 1.0, 0.5, heads=False),
]


def layout_of(name: str = "bert") -> AdapterLayout:
    model, spec, _ = build(name)
    return adapter_layout(model, spec)


def test_first_ranks_are_rows_of_a_and_columns_of_b() -> None:
    layout = layout_of()
    few = layout.training("both", 2)
    assert few.size == layout.size
    assert few.dim == (layout.dim - 99) // 2 + 99
    assert few.blocks() == (*[2 * 64] * 6, 99)
    full = torch.arange(float(layout.size))
    parts = [
        values for values in torch.split(few.trainable_values(full), [s for e in few.entries for s in [e.trained_size]])
    ]
    for entry, part in zip(few.entries, parts, strict=True):
        whole = layout.tensors(full)[entry.name]
        expected = {"A": whole[:2], "B": whole[..., :2], "head": whole}[entry.factor]
        assert torch.equal(part, expected.flatten())


def test_all_ranks_by_number_is_all_ranks() -> None:
    assert layout_of().training("b", 4) == layout_of().training("b")
    with pytest.raises(ValueError, match=r"ranks must be .*model\.rank"):
        layout_of().training("both", 5)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_values_go_out_and_come_back(part: TrainedSubset) -> None:
    layout = layout_of()
    few = part.layout(layout)
    full = 1 + torch.rand(3, layout.size)  # none of them 0
    assert torch.equal(few.with_trainable(full, few.trainable_values(full)), full)
    changed = few.with_trainable(full, torch.zeros(3, few.dim))
    assert int((changed == full).sum()) == 3 * (layout.size - few.dim)
    engine = layout.training(part.factors)
    sent = torch.randn(3, few.dim)
    received = part.engine_rows(engine, sent)
    assert received.shape == (3, engine.dim)
    torch.testing.assert_close(part.sent_rows(engine, received), sent)
    assert int((received != 0).sum()) == 3 * few.dim
    assert TrainedSubset.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_scales_are_on_their_factors_only() -> None:
    layout = layout_of()
    scales = TrainedSubset("both", 2, 0.25, 8.0).scales(layout)
    assert scales is not None
    few = layout.training("both", 2)
    for entry, offset in few.trainable_entries():
        expected = {"A": 0.25, "B": 8.0, "head": 1.0}[entry.factor]
        assert (scales[offset : offset + entry.trained_size] == expected).all()
    assert len(scales) == few.dim
    assert TrainedSubset("both", 2).scales(layout) is None


@pytest.mark.parametrize(
    "wrong", [{"factors": "c"}, {"ranks": 0}, {"ranks": 1.5}, {"scale_a": 0.0}, {"scale_b": float("nan")}]
)
def test_a_part_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainedSubset(**wrong)  # type: ignore[arg-type]


LOCALS = {
    "sgd": LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=4, epochs=2, weight_decay=0.01),
    "momentum": LocalTraining(optimizer="momentum", learning_rate=0.05, batch_size=4, epochs=2),
    "adamw": LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=4, epochs=2, weight_decay=0.1),
}


SUBSETS = [("bert", "both", 1), ("bert", "b", 2), ("llama", "both", 3)]


@pytest.mark.parametrize(
    ("name", "factors", "ranks", "optimizer", "kind"),
    [
        (*subset, optimizer, (CohortEngine, SequentialEngine)[(i + j) % 2])
        for i, subset in enumerate(SUBSETS)
        for j, optimizer in enumerate(LOCALS)
    ],
)
def test_training_a_truncated_adapter_is_plain_peft_of_that_rank(name, factors, ranks, optimizer, kind) -> None:
    """The oracle is PEFT with adapters of rank `ranks` and the same scale, started from the first ranks."""
    model, spec, task = build(name)
    spec = replace(spec, train=factors)
    whole, cohort, seeds = start(model, spec), clients((5, 9, 1)), (1, 2, 3)
    small = replace(spec, rank=ranks, alpha=spec.alpha * ranks / spec.rank)
    oracle = SequentialEngine(fresh(model), small, task, precision="fp64")
    part, layout = TrainedSubset(factors, ranks), adapter_layout(model, spec)
    first = layout.training("both", ranks).trainable_values(whole)
    expected = oracle.train_all(first, cohort, LOCALS[optimizer], seeds)

    engine = kind(fresh(model), spec, task, precision="fp64")
    updates = engine.train_all(engine.layout.truncate_ranks(whole, ranks), cohort, LOCALS[optimizer], seeds)
    found = part.sent_rows(engine.layout, updates)
    assert found.shape == expected.shape
    assert distance(found, expected) < 1e-10
    beyond = updates - part.engine_rows(engine.layout, found)
    assert not beyond.any(), "a rank that is not trained must not move at all"


def test_a_layout_with_ranks_round_trips_through_json() -> None:
    layout = layout_of().training("both", 2)
    assert AdapterLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_an_adapter_free_layout_has_no_rank() -> None:
    model, _, _ = build("bert")
    assert adapter_layout(model, LoraSpec(4, 8.0, (), heads=("classifier",))).rank == 0
