"""No architecture is trained wrongly because hidden states are kept: where that would change anything, they are not."""

import logging

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModel,
    DebertaV2Config,
    ElectraConfig,
    FlaubertConfig,
    LongformerConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    SqueezeBertConfig,
)

from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.base import SequenceClassifier
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import SequenceClassification
from tests.cases.cohorts import CLASSES, WORDS, clients, distance, fresh

_COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # so that a layer more or less shows
}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
_FLAUBERT = {"vocab_size": WORDS, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "pad_token_id": 0, "pad_index": 0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "albert": AlbertConfig(**_COMMON, embedding_size=16),
    "electra": ElectraConfig(**_COMMON, embedding_size=16),
    "deberta-v2": DebertaV2Config(**_COMMON, **_DEBERTA),
    "mpnet": MPNetConfig(**_COMMON),
    "modernbert": ModernBertConfig(**_COMMON, global_attn_every_n_layers=2, local_attention=8),
    "flaubert": FlaubertConfig(**_FLAUBERT),
    "longformer": LongformerConfig(**_COMMON, attention_window=16),
    "squeezebert": SqueezeBertConfig(**_COMMON, embedding_size=32),
}
HEAD = ()
CASES = [
    ("albert", HEAD, None, False),  # one layer that is called three times
    ("albert", ("embedding_hidden_mapping_in",), None, False),  # trained before the layers
    ("electra", ("embeddings_project",), None, False),
    ("electra", HEAD, None, True),
    ("deberta-v2", HEAD, None, True),  # its layers return tuples
    ("deberta-v2", ("query_proj", "value_proj"), (2,), True),
    ("mpnet", HEAD, None, True),
    ("mpnet", ("attn.q", "attn.v"), (1, 2), True),
    ("modernbert", HEAD, None, True),
    ("flaubert", ("lin1",), (2,), False),  # several lists of parts of a layer
    ("longformer", HEAD, None, False),  # pads inside
    ("squeezebert", HEAD, None, False),  # its layers return dictionaries
]


@pytest.mark.parametrize(("name", "targets", "layers", "kept"), CASES)
def test_keeping_hidden_states_changes_nothing_on_any_architecture(name, targets, layers, kept, caplog):
    caplog.set_level(logging.INFO)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SequenceClassifier(AutoModel.from_config(CONFIGS[name]).eval(), CLASSES, "mean")
    spec, task = LoraSpec(2, 4.0, targets, layers=layers, heads=("classifier",)), SequenceClassification(CLASSES)
    layout = adapter_layout(model, spec)
    vector = initial_adapter(layout, model, 0) + 0.1 * torch.randn(
        layout.size, generator=torch.Generator().manual_seed(2)
    )
    cohort, local = clients((5, 3)), LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=4)
    plain, cached = (
        CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=200, prefix_memory=memory)
        for memory in (0, 2**20)
    )
    assert (cached._forward.prefix is not None) == kept
    assert kept or "are not kept" in caplog.text or targets
    for start in (vector, -vector):  # the second adapter meets what was kept under the first
        expected = plain.train_all(start, cohort, local, [1, 2])
        assert distance(cached.train_all(start, cohort, local, [1, 2]), expected) < 1e-9
        torch.testing.assert_close(cached.losses(start, cohort), plain.losses(start, cohort))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-model"])
def test_rounding_is_no_reason_to_keep_nothing(precision):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SequenceClassifier(AutoModel.from_config(CONFIGS["electra"]).eval(), CLASSES, "mean")
    spec, task = LoraSpec(2, 4.0, ("query",), layers=(2,), heads=("classifier",)), SequenceClassification(CLASSES)
    engine = CohortEngine(model, spec, task, precision=precision, prefix_memory=2**20)
    assert engine._forward.prefix is not None
