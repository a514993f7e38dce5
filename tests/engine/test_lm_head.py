"""The put-off head of a language model: same losses, hits and gradients as its logits, in pieces of any size."""

import pytest
import torch

from client.models import lm_head
from client.models.base import load_base
from client.models.tasks import Batch, CausalLM
from client.models.toy import ARCHITECTURES, ENCODERS_ALONE


def _batch(generator):
    mask = (torch.arange(9) < torch.tensor([9, 1, 4, 6])[:, None]).long()
    ids = torch.randint(3, 200, (4, 9), generator=generator) * mask
    weights = torch.rand(4, 9, generator=generator) * (torch.rand(4, 9, generator=generator) > 0.3) * mask
    return Batch(ids, mask, token_weights=weights)


@pytest.mark.parametrize("chunk", [1, 1000, 2**24])
@pytest.mark.parametrize("weighted_only", [False, True])
def test_loss_metrics_and_gradients_equal_those_of_the_logits(monkeypatch, chunk, weighted_only):
    monkeypatch.setattr(lm_head, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    model, _ = load_base("random:llama-tied", "causal-lm", dtype=torch.float64)
    batch, task = _batch(generator), CausalLM(weighted_only)
    output = lm_head.run(model, batch.input_ids, batch.attention_mask)
    assert isinstance(output, lm_head.Predictions)
    hidden = output.hidden.detach().requires_grad_()
    split, logits = lm_head.Predictions(hidden, output.head, output.vocabulary), model.lm_head(hidden)
    given = [task.per_record_loss(kind, batch) for kind in (split, logits)]
    torch.testing.assert_close(*given, rtol=1e-12, atol=1e-13)
    upstream = torch.rand(4, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad(losses @ upstream, hidden)[0] for losses in given]
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)
    totals = [task.totals(kind, batch) for kind in (split, logits)]
    torch.testing.assert_close(*totals, rtol=1e-12, atol=0)
    counted = batch.attention_mask[:, 1:].bool() & ((batch.token_weights[:, 1:] > 0) | (not weighted_only))
    assert totals[0][2] == counted.sum()


def test_nothing_to_predict_is_loss_and_gradient_zero():
    model, _ = load_base("random:llama", "causal-lm")
    ids = torch.tensor([[5], [6]])
    output = lm_head.run(model, ids, None)
    hidden = output.hidden.detach().requires_grad_()
    split = lm_head.Predictions(hidden, output.head, output.vocabulary)
    losses = CausalLM().per_record_loss(split, Batch(ids, torch.ones_like(ids)))
    assert losses.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(losses.sum(), hidden)[0].abs().sum() == 0


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - set(ENCODERS_ALONE)))
def test_only_a_plain_last_head_is_put_off(architecture):
    model, _ = load_base(f"random:{architecture}", "causal-lm")
    ids = torch.tensor([[5, 6, 7]])
    # The heads of BERT and RoBERTa begin with a transformation, Gemma 2 caps its logits.
    plain = architecture not in ("bert", "roberta", "gemma2")
    assert isinstance(lm_head.run(model, ids, None), lm_head.Predictions) == plain
    model.get_output_embeddings().requires_grad_(True)
    assert torch.equal(lm_head.run(model, ids, None), model(input_ids=ids).logits)


def test_a_head_that_scales_its_logits_is_not_put_off():
    model, _ = load_base("random:llama", "causal-lm")
    plain = model.forward

    def scaled(**given):
        output = plain(**given)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    lm_head.mark(model)
    assert isinstance(lm_head.run(model, torch.tensor([[5, 6]]), None), torch.Tensor)
