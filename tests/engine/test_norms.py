"""Root-mean-square norms: the numbers of the model's own, and none replaced that computes something else."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from client.engine.norms import RootMeanSquareNorm, use_fused_norms
from client.models.base import load_base
from tests.cases.cohorts import distance

WIDTH = 48


def _model(norm, dtype=torch.float32):
    """A model with one norm, whose weight is not what it begins with."""
    model = nn.ModuleDict({"norm": norm}).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return model.requires_grad_(False)


def _gradient(norm, x, upstream):
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(upstream)
    return y.detach().double(), x.grad.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("norm", [LlamaRMSNorm, T5LayerNorm, nn.RMSNorm])
def test_values_and_gradients_are_those_of_the_models_own_norm(norm, dtype, tolerance):
    model = _model(norm(WIDTH, eps=1e-5), dtype)
    own = copy.deepcopy(model["norm"])
    use_fused_norms(model)
    assert isinstance(model["norm"], RootMeanSquareNorm)
    draws = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 7, WIDTH, generator=draws) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    upstream = torch.randn(3, 7, WIDTH, generator=draws).to(dtype)
    for found, expected in zip(_gradient(model["norm"], x, upstream), _gradient(own, x, upstream), strict=True):
        assert distance(found, expected) < tolerance


def test_norms_of_another_formula_stay():
    gemma = _model(GemmaRMSNorm(WIDTH))
    layer = _model(nn.LayerNorm(WIDTH, bias=False))
    for model in (gemma, layer):
        before = model["norm"]
        use_fused_norms(model)
        assert model["norm"] is before


def test_every_norm_of_a_language_model_is_replaced():
    model, _ = load_base("random:llama", "causal-lm")
    ids = torch.arange(5, 17)[None]
    expected = model(input_ids=ids).logits
    use_fused_norms(model)
    assert not any(isinstance(module, LlamaRMSNorm) for module in model.modules())
    assert sum(isinstance(module, RootMeanSquareNorm) for module in model.modules()) == 5
    assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-6)
