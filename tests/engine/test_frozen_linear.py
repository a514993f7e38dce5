"""Kernels of the frozen weights, and attention of short sequences."""

import os

import pytest
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

from client.engine.attention import LONGEST, short_attention
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.frozen import batch_invariance, kernels
from client.models.frozen.batch_invariance import batch_invariance_note, choose
from client.models.frozen.kernels import BF16Weight, OneDnnWeight, PlainWeight
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import SequenceClassification
from tests.cases.cohorts import WORDS, build, clients, distance, fresh, start, threads


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")
def test_torch_still_has_the_operators_of_onednn_that_the_engine_calls():
    gone = [name for name in ("_linear_pointwise", "_reorder_linear_weight") if not hasattr(torch.ops.mkldnn, name)]
    assert not gone, (
        f"torch {torch.__version__} has no torch.ops.mkldnn.{', '.join(gone)}: float32 products on the CPU fall back "
        "to plain ones and lose their speed; find the operator that torch.compile now emits for a frozen float32 "
        "linear layer, and put it into client/models/frozen/kernels.py"
    )
    x, weight = torch.randn(32, 24), torch.randn(40, 24)
    product = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    assert distance(product, x.double() @ weight.double().t()) < 1e-6


@pytest.mark.parametrize(("kind", "tolerance"), [(PlainWeight, 1e-6), (OneDnnWeight, 1e-6), (BF16Weight, 5e-3)])
@pytest.mark.parametrize("bias", [True, False])
def test_both_products_of_a_frozen_weight(kind, tolerance, bias):
    torch.manual_seed(0)
    w, x, dy = torch.randn(40, 24), torch.randn(3, 7, 24), torch.randn(3, 7, 40)
    b = torch.randn(40) if bias else None
    weight = kind(w, b)
    assert distance(weight.forward(x), F.linear(x.double(), w.double(), None if b is None else b.double())) < tolerance
    assert distance(weight.backward(dy), dy.double() @ w.double()) < tolerance
    assert weight.forward(x).dtype == torch.float32


def test_narrow_result_is_the_wide_one_rounded_once():
    w, x = torch.randn(8, 16), torch.randn(5, 16)
    wide, narrow = BF16Weight(w, None), BF16Weight(w, None, narrow=True)
    assert narrow.forward(x).dtype == torch.bfloat16
    assert torch.equal(narrow.forward(x).float(), wide.forward(x))


def test_bfloat16_is_taken_only_where_rows_keep_their_bits(monkeypatch, caplog):
    shapes = {(384, 384), (1536, 384), (384, 1536), (2, 384)}
    cpu, fast = torch.device("cpu"), torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    with threads(1):
        monkeypatch.setattr(batch_invariance, "multiplies_bf16", lambda: True)
        assert choose("auto", cpu, shapes) == ("bf16" if fast else "fp32")
        assert all(batch_invariance.keeps_rows(shape) for shape in shapes)
        if torch.cpu._is_amx_tile_supported() and "ONEDNN_MAX_CPU_ISA" not in os.environ:  # what blocks are for
            assert kernels.block_sizes((384, 1536), torch.device("cpu"))
        assert not caplog.records
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        monkeypatch.setattr(batch_invariance, "keeps_rows", lambda shape: shape != (384, 1536))
        assert choose("auto", cpu, shapes) == "fp32"
        assert "384 x 1536" in caplog.text
        assert "float32 is taken" in caplog.text
        assert choose("bf16", cpu, shapes) == "bf16"
        assert "each other's contributions" in caplog.text
        assert choose("auto", cpu, shapes - {(384, 1536)}) == "bf16"
        monkeypatch.setattr(batch_invariance, "multiplies_bf16", lambda: False)
        assert choose("bf16", cpu, shapes) == "fp32", "torch's own bfloat16 products take ten times as long"


def test_sums_that_cancel_show_another_order():
    """The blocks are chosen, and bfloat16 is refused, by them; rounding hides another order of plain sums."""
    x, packed = kernels.cancelling_sums((64, 96))
    weight = (packed.to_dense() if packed.is_mkldnn else packed).double()
    exact = x.double() @ weight.T
    small = x.double() * (x.abs() < 2**10)
    assert distance(small @ weight.T, exact) < 1e-9, "the large ones cancel"
    turned = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    sums = [(x[:, order].float() @ weight[:, order].float().T) for order in (torch.arange(96), turned)]
    assert float((sums[0].to(torch.bfloat16) != sums[1].to(torch.bfloat16)).double().mean()) > 0.3


def test_more_rows_than_the_largest_block():
    w, x = torch.randn(40, 24), torch.randn(2 * kernels.BLOCKS[0] + 5, 24)
    for sizes in ((), (256, 64)):
        found = BF16Weight(w, None, sizes=lambda *_, sizes=sizes: sizes).forward(x)
        assert distance(found, x.double() @ w.double().T) < 5e-3


def test_blocks_of_rows_change_nothing_but_rounding():
    w, x, dy = torch.randn(300, 270), torch.randn(3, 50, 270), torch.randn(3, 50, 300)
    bias = torch.randn(300)
    whole, blocks = (BF16Weight(w, bias, sizes=lambda *_, sizes=sizes: sizes) for sizes in ((), (128, 32)))
    assert distance(blocks.forward(x), whole.forward(x)) < 1e-3
    assert distance(blocks.backward(dy), whole.backward(dy)) < 1e-2
    assert blocks.backward(dy).dtype == torch.bfloat16
    assert blocks.forward(x[:0]).shape == (0, 50, 300)


@pytest.mark.parametrize("targets", [("query", "value"), ("intermediate.dense", "output.dense")])
@pytest.mark.parametrize("precision", ["bf16", "bf16-model"])
def test_bfloat16_updates_are_close_to_float32(precision, targets, monkeypatch):
    monkeypatch.setattr(batch_invariance, "multiplies_bf16", lambda: True)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=64,
            num_labels=3,
        )
        model = BertForSequenceClassification(config).eval()
    spec, task = LoraSpec(4, 8.0, targets, heads=("classifier",)), SequenceClassification(3)
    vector = initial_adapter(adapter_layout(model, spec), model, 0)
    cohort, local = clients((4, 6)), LocalTraining(optimizer="sgd", learning_rate=0.1, batch_size=4)
    exact = CohortEngine(fresh(model), spec, task, precision="fp32").train_all(vector, cohort, local, (1, 2))
    rough = CohortEngine(fresh(model), spec, task, precision=precision).train_all(vector, cohort, local, (1, 2))
    assert rough.dtype == torch.float32
    assert 1e-5 < distance(rough, exact) < 0.03


def test_bfloat16_is_told_of_where_somebody_asks_for_it():
    assert choose("auto", torch.device("cuda")) == "fp32"
    assert choose("fp64", torch.device("cpu")) == "fp64"
    with threads(2):
        assert choose("auto", torch.device("cpu")) == "fp32"
    for precision in ("auto", "fp32", "fp64"):
        assert batch_invariance_note(precision) == ()
        assert "on a GPU" in batch_invariance_note(precision, gpu=True)[0]
    for precision in ("bf16", "bf16-model"):
        assert f"engine.precision = {precision!r}" in batch_invariance_note(precision)[0]
    with pytest.raises(ValueError, match="precision must be one of"):
        batch_invariance_note("fp16")


@pytest.mark.parametrize("tokens", [1, 5, 16, 40, LONGEST + 1])
@pytest.mark.parametrize("mask", ["none", "keys", "causal", "both"])
def test_short_attention_equals_the_fused_kernel(tokens, mask):
    torch.manual_seed(1)
    shape = (3, 2, tokens, 8)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    allowed = None
    if mask in ("keys", "both"):
        lengths = torch.tensor([tokens, max(1, tokens - 2), 1])
        allowed = (torch.arange(tokens) < lengths[:, None])[:, None, None].expand(3, 1, tokens, tokens)
        if mask == "both":
            allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    causal = mask == "causal"
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=allowed, is_causal=causal).transpose(1, 2)
    weights = torch.randn(expected.shape)
    reference = torch.autograd.grad((expected * weights).sum(), inputs)
    found, _ = short_attention(torch.nn.Module(), *inputs, allowed, is_causal=causal)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for gradient, truth in zip(gradients, reference, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-4, atol=1e-5)


def test_short_attention_is_what_the_engine_uses(monkeypatch):
    model, spec, task = build("bert")
    vector, records = start(model, spec), clients((5,))[0]
    engine = CohortEngine(model, spec, task, precision="fp32")
    reference = engine.evaluate(vector, records).loss
    import client.engine.attention as attention

    calls = []
    original = attention._ShortAttention.apply
    monkeypatch.setattr(attention._ShortAttention, "apply", lambda *a: calls.append(1) or original(*a))
    assert engine.evaluate(vector, records).loss == reference
    assert len(calls) >= 3


def on_a_small_device(engine, tokens, monkeypatch):
    """Let every micro-batch of more tokens than that run out of memory."""
    run = engine._forward.outputs

    def logits(pool, rows, placement):
        result = run(pool, rows, placement)
        if result[1].input_ids.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return result

    monkeypatch.setattr(engine._forward, "outputs", logits)
    return engine


def test_running_out_of_memory_halves_the_token_budget_and_changes_nothing(monkeypatch):
    model, spec, task = build("bert")
    vector, cohort = start(model, spec), clients((5, 9, 3))
    local = LocalTraining(optimizer="adamw", learning_rate=1e-3, batch_size=4, epochs=2)
    engine = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=256)
    expected = engine.train_all(vector, cohort, local, (1, 2, 3))
    small = on_a_small_device(
        CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=256), 70, monkeypatch
    )
    assert distance(small.train_all(vector, cohort, local, (1, 2, 3)), expected) < 1e-10
    assert small.token_budget == 64
    on_a_small_device(small, 0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        small.train_all(vector, cohort, local, (1, 2, 3))


def record_rows(engine, vector, cohort):
    rows = {}
    for chunk in engine.cohort_record_gradients(vector, cohort):
        for client, record, row in zip(chunk.clients, chunk.records, chunk.rows, strict=True):
            assert (int(client), int(record)) not in rows
            rows[int(client), int(record)] = row
    return torch.stack([rows[key] for key in sorted(rows)])


def metrics(engine, vector, cohort):
    found = engine.evaluate(vector, cohort[1])
    return torch.tensor([found.loss, found.accuracy, found.count])


WHAT = {"losses": CohortEngine.losses, "metrics": metrics, "record gradients": record_rows}


@pytest.mark.parametrize("what", WHAT)
def test_running_out_of_memory_elsewhere_changes_nothing_either(what, monkeypatch):
    model, spec, task = build("bert")
    vector, cohort = start(model, spec), clients((5, 9, 3))
    engine = CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=256)
    small = on_a_small_device(
        CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=256), 70, monkeypatch
    )
    assert distance(WHAT[what](small, vector, cohort), WHAT[what](engine, vector, cohort)) < 1e-6
    assert small.token_budget == 64
    assert engine.token_budget == 256
