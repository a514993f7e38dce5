"""Root-mean-square norms: the numbers of the model's own, bit by bit alone and in company, and none that differs."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from client.engine.cohort import CohortEngine
from client.engine.norms import RootMeanSquareNorm, use_fused_norms
from client.models.base import load_base
from client.models.lora import LoraSpec
from client.models.tasks import CausalLM
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
    return y.detach(), x.grad


@pytest.mark.parametrize("norm", [LlamaRMSNorm, T5LayerNorm, nn.RMSNorm])
def test_values_and_gradients_are_those_of_the_models_own_norm(norm):
    model = _model(norm(WIDTH, eps=1e-5))
    own = copy.deepcopy(model["norm"])
    use_fused_norms(model)
    assert isinstance(model["norm"], RootMeanSquareNorm)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, WIDTH, generator=draws) * torch.logspace(-3, 3, 7)[:, None]
    upstream = torch.randn(3, 7, WIDTH, generator=draws)
    for found, expected in zip(_gradient(model["norm"], x, upstream), _gradient(own, x, upstream), strict=True):
        assert distance(found, expected) < 1e-6


def test_a_row_has_its_bits_whatever_rows_are_beside_it():
    model = _model(LlamaRMSNorm(576))
    use_fused_norms(model)
    draws = torch.Generator().manual_seed(2)
    x, upstream = (torch.randn(300, 576, generator=draws) for _ in range(2))
    together = _gradient(model["norm"], x, upstream)
    for rows in (1, 2, 17, 299):
        for alone, all_of_them in zip(_gradient(model["norm"], x[:rows], upstream[:rows]), together, strict=True):
            assert torch.equal(alone, all_of_them[:rows])


def test_norms_of_another_formula_stay():
    gemma = _model(GemmaRMSNorm(WIDTH))
    layer = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH, bias=False)}).requires_grad_(False)
    for model in (gemma, layer):
        before = model["norm"]
        use_fused_norms(model)
        assert model["norm"] is before


def test_bfloat16_on_a_cpu_goes_through_the_models_own_norm():
    model = _model(LlamaRMSNorm(WIDTH), torch.bfloat16)
    own, x = copy.deepcopy(model["norm"]), torch.randn(5, WIDTH, dtype=torch.bfloat16)
    use_fused_norms(model)
    assert torch.equal(model["norm"](x), own(x))


@pytest.mark.parametrize(("precision", "replaced"), [("fp32", True), ("bf16", True), ("fp64", False)])
def test_the_engine_replaces_every_norm_of_a_language_model(precision, replaced):
    model, _ = load_base("random:llama", "causal-lm")
    count = sum(isinstance(module, LlamaRMSNorm) for module in model.modules())
    CohortEngine(model, LoraSpec(2, 4.0, ("q_proj",)), CausalLM(), precision=precision)
    assert count == 5
    assert sum(isinstance(module, RootMeanSquareNorm) for module in model.modules()) == (count if replaced else 0)
