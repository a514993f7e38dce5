"""Where adapter values lie, and the vector training starts from."""

import json
import math

import pytest
import torch

from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, initial_adapter, layer_index, target_modules
from strategies.adapter.layout import AdapterLayout
from tests.cases.cohorts import build


def layout_of(name, **changes):
    model, spec, _ = build(name)
    spec = LoraSpec(**{**vars(spec), **changes})
    return model, adapter_layout(model, spec)


def test_entries_follow_the_model_and_heads_come_last():
    _, layout = layout_of("bert", layers=(1,))
    path = "base_model.model.bert.encoder.layer.1.attention.self"
    assert [entry.name for entry in layout.entries] == [
        f"{path}.query.lora_A.weight",
        f"{path}.query.lora_B.weight",
        f"{path}.value.lora_A.weight",
        f"{path}.value.lora_B.weight",
        "base_model.model.classifier.weight",
        "base_model.model.classifier.bias",
    ]
    assert layout.blocks() == (256, 256, 3 * 32 + 3)
    assert layout.dim == layout.size == sum(layout.blocks())


def test_one_factor_shortens_the_trainable_vector_only():
    _, layout = layout_of("bert")
    half = layout.training("b")
    assert half.size == layout.size
    assert half.blocks() == (*[128] * 6, 99)
    full = torch.arange(float(half.size))
    part = half.trainable_values(full)
    assert part.shape == (half.dim,)
    changed = half.with_trainable(full, -part)
    for entry in half.entries:
        values = changed[entry.offset : entry.offset + entry.size]
        expected = full[entry.offset : entry.offset + entry.size]
        assert torch.equal(values, -expected if entry.trainable else expected)
    assert torch.equal(half.with_trainable(changed, part), full)


def test_layout_round_trips_through_json():
    _, layout = layout_of("gpt2-classifier", train="a")
    assert AdapterLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_tensors_and_vector_are_inverse():
    _, layout = layout_of("roberta")
    full = torch.randn(layout.size)
    assert torch.equal(layout.vector(layout.tensors(full)), full)
    broken = layout.tensors(full)
    del broken[layout.entries[0].name]
    with pytest.raises(ValueError, match="adapter has no tensor"):
        layout.vector(broken)


def test_start_is_seeded_and_changes_nothing_at_first():
    model, layout = layout_of("llama")
    first, again, other = (initial_adapter(layout, model, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    for entry in layout.entries:
        values = first[entry.offset : entry.offset + entry.size]
        if entry.factor == "B":
            assert not values.any()
        else:
            limit = 1 / math.sqrt(entry.shape[1])
            assert 0.9 * limit < values.abs().max() <= limit


def test_heads_start_from_the_model():
    model, layout = layout_of("bert")
    start = layout.tensors(initial_adapter(layout, model, 0))
    assert torch.equal(start["base_model.model.classifier.weight"], model.classifier.weight.detach())


def test_targets_are_whole_dotted_suffixes():
    model, spec, _ = build("mistral")
    assert len(target_modules(model, spec)) == 2 * 5
    with pytest.raises(ValueError, match=r"targets \['proj'\] name no module.*'q_proj'"):
        target_modules(model, LoraSpec(4, 8.0, ("proj",)))
    with pytest.raises(ValueError, match="hold none of the targets"):
        target_modules(model, LoraSpec(4, 8.0, ("q_proj",), layers=(7,)))
    assert layer_index("model.layers.11.mlp.up_proj") == 11
    assert layer_index("lm_head") is None


def test_a_rank_beyond_the_layer_is_refused():
    model, _ = load_base("random:bert", "classification", 2)
    side = model.config.hidden_size
    adapter_layout(model, LoraSpec(side, 8.0, ("query",)))
    with pytest.raises(ValueError, match=rf"model\.rank .*{side}\b.* {side + 1}"):
        adapter_layout(model, LoraSpec(side + 1, 8.0, ("query",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank must be an integer >= 1"),
        ({"alpha": 0.0}, "alpha must be > 0"),
        ({"train": "c"}, "train must be one of"),
        ({"bias": "some"}, "bias must be one of"),
        ({"targets": ()}, "nothing to train"),
    ],
)
def test_bad_specs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LoraSpec(**{"rank": 4, "alpha": 8.0, "targets": ("query",), **change})
