"""How the server puts sites together whose updates are private already."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strategies.adapter.layout import AdapterLayout, Entry
from strategies.adapter.residual import pairs, residual_size
from strategies.aggregations.individual import FedEx, FedGsa, Flora
from strategies.sites import GlobalModel, Place, SiteAnswer, add_mean, combine_of, next_model
from tests.cases.record_level import engine, vector

LAYOUT = engine().layout
SCALE = 2.0


def place(round: int = 7) -> Place:
    return Place(LAYOUT, SCALE, 3, round)


def updates(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(LAYOUT.size, generator=generator) for _ in range(count)]


def weights(model: GlobalModel) -> list[Tensor]:
    """R + s B A of every adapted layer: what is added to the loaded weight."""
    residual = torch.zeros(residual_size(LAYOUT)) if model.residual is None else model.residual
    adapter = model.adapter
    return [pair.of(residual) + SCALE * pair.b.of(adapter) @ pair.a.of(adapter) for pair in pairs(LAYOUT)]


def test_refusals_are_logged_and_the_round_goes_on(caplog):
    start = GlobalModel(torch.zeros(LAYOUT.size))
    answers = [SiteAnswer(1, None, 0, "budget is spent"), SiteAnswer(0, torch.ones(LAYOUT.size), 2, "")]
    with caplog.at_level(logging.WARNING):
        found = next_model(start, answers, add_mean, place())
    assert torch.equal(found.adapter, torch.ones(LAYOUT.size))
    assert found.residual is None
    assert "site 1 took 0 steps: budget is spent" in caplog.text
    assert next_model(start, answers[:1], add_mean, place(8)) is start


@pytest.mark.parametrize("aggregation", [FedEx(), Flora()])
def test_fedex_and_flora_take_the_mean_of_the_sites_models(aggregation):
    """Round after round the model is the mean of the sites' own, as averaging factors is not."""
    combine, model = combine_of(aggregation), GlobalModel(vector().float())
    for round in (1, 2):
        sites = [weights(GlobalModel(model.adapter + update, model.residual)) for update in updates()]
        expected = [torch.stack(layer).mean(0) for layer in zip(*sites, strict=True)]
        before = None if model.residual is None else model.residual.clone()
        after = combine(model, updates(), place(round))
        assert before is None or torch.equal(before, model.residual)  # the old model is not written into
        for found, mean in zip(weights(after), expected, strict=True):
            torch.testing.assert_close(found, mean, atol=1e-5, rtol=1e-4)
        plain = weights(add_mean(model, updates(), place(round)))
        assert max(float((a - b).norm()) for a, b in zip(plain, expected, strict=True)) > 1e-2
        model = after


def test_fedex_keeps_the_mean_factors_and_flora_starts_them_again():
    start, mean = GlobalModel(vector().float()), torch.stack(updates()).mean(0)
    assert torch.equal(combine_of(FedEx())(start, updates(), place()).adapter, start.adapter + mean)
    first, second = (combine_of(Flora())(start, updates(), place(round)).adapter for round in (1, 2))
    for pair in pairs(LAYOUT):
        assert not pair.b.of(first).any()
        limit = pair.a.shape[1] ** -0.5
        assert 0.5 * limit < float(pair.a.of(first).abs().max()) <= limit
        assert not torch.equal(pair.a.of(first), pair.a.of(second))
    again = combine_of(Flora())(start, updates(), place(1)).adapter
    assert torch.equal(first, again)
    for entry in LAYOUT.entries:
        if entry.factor == "head":
            assert torch.equal(entry.of(first), entry.of(start.adapter + mean))


@pytest.mark.parametrize("aggregation", [FedEx(), Flora()])
def test_where_heads_alone_are_trained_they_are_averaged(aggregation):
    heads = AdapterLayout((Entry("classifier.weight", (2, 3), 0, "head", "classifier"),))
    found = combine_of(aggregation)(
        GlobalModel(torch.zeros(6)), [torch.ones(6), -3 * torch.ones(6)], replace(place(), layout=heads)
    )
    assert torch.equal(found.adapter, -torch.ones(6))
    assert found.residual is None


def test_fedgsa_of_one_site_is_that_site():
    layout, start = LAYOUT.training("b"), vector().float()
    generator = torch.Generator().manual_seed(1)
    update = layout.with_trainable(torch.zeros(layout.size), 0.1 * torch.randn(layout.dim, generator=generator))
    found = combine_of(FedGsa())(GlobalModel(start), [update], place()).adapter
    for pair in pairs(layout):
        expected = pair.b.of(start + update) @ pair.a.of(start)
        torch.testing.assert_close(pair.b.of(found) @ pair.a.of(found), expected, atol=1e-5, rtol=1e-4)
