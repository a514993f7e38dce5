"""PE-SGD over sites: they send coefficients of public gradients, and the server's step is that of one site."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from client.data.records import Records
from client.record_level.messages import SiteReply, SiteRequest
from client.record_level.participant import take_part
from client.record_level.public_subspace import PublicSpan, in_public_span
from client.record_level.settings import RecordLevelSettings, StepSchedule
from client.record_level.state import LEDGER
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureZeroNoise
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.factors import Plain
from strategies.controllers.controller import PublicSignals
from strategies.messages.records import BadMessage
from strategies.optimizers.fedadam import FedAdam
from strategies.server_update import ServerUpdate
from strategies.sites import GlobalModel, SpanUpdate
from tests.cases.record_level import EXACT, PRIVATE, engine, records, run, site_training, vector

TEXTS = records(6, seed=9)
STEPS = 3


def asked(
    texts: Records | None, site: RecordLevelSettings, round: int = 1, adapter: Tensor | None = None
) -> SiteRequest:
    values = (vector() if adapter is None else adapter).float().numpy()
    made = SiteRequest(round, values, 1, 0, site, "{}", "", texts=texts)
    return SiteRequest.from_records(made.to_records())


def swapped(texts: Records, scores: Tensor, adapter: Tensor, step: int) -> Records:
    """An evolution that shows what it was given: the texts by their scores."""
    return texts.select(np.argsort(scores.numpy()))


def server(made: object, learning_rate: float) -> SpanUpdate:
    step = ServerUpdate(FedAdam(learning_rate=learning_rate), Plain(), made.layout, 0.0, InsecureZeroNoise())
    return SpanUpdate(step, TrainedSubset(), StepSchedule(STEPS, "linear"))


def test_two_sites_step_as_one_that_holds_all_records(tmp_path: Path) -> None:
    """Without noise and with everybody in every batch: the same adapters, with texts that evolve and server Adam."""
    made, halves = engine(), [records(seed=1), records(seed=2)]
    texts_of = [np.split(half.tokens, half.offsets[1:-1]) for half in halves]
    union = Records.from_lists([tokens.tolist() for texts in texts_of for tokens in texts], None, None)
    optimizer = {"optimizer": "fedadam", "optimizer_options": {"learning-rate": 0.01}, "schedule": "linear"}
    (tmp_path / "one").mkdir()
    one = in_public_span(
        site_training(tmp_path / "one", union, made=made, **EXACT | optimizer | {"batch_size": 24}),
        PublicSpan(made, TEXTS, "coefficients", evolve=swapped),
    )
    one.begin(vector().float(), PublicSignals(0, 1.0))
    expected = run(one, STEPS)

    site, update = RecordLevelSettings(**EXACT), server(made, 0.01)
    model, texts = GlobalModel(vector().float()), TEXTS
    state = update.server.optimizer.init(model.adapter)
    span = PublicSpan(made, TEXTS, "coefficients", evolve=swapped)
    for round in range(1, STEPS + 1):
        sent = []
        for number, half in enumerate(halves):
            reply = take_part(asked(texts, site, round, model.adapter), half, made, tmp_path / str(number))
            read = SiteReply.from_records(reply.to_records(), round, len(texts), 1)
            assert read.update.shape == (len(texts),), "a number a text goes up, not one a value"
            sent.append(torch.from_numpy(read.update))
        gradients = span.basis(model.adapter, texts, TrainedSubset())
        model, state = update(model, state, gradients, sent, 0.0, round)
        texts = swapped(texts, 12 * sum(sent), model.adapter, round)
    assert texts.tokens.tolist() == one.state.subspace.texts.tokens.tolist() != TEXTS.tokens.tolist()
    torch.testing.assert_close(model.adapter, expected.float(), rtol=1e-4, atol=1e-6)
    assert float((model.adapter - vector().float()).norm()) > 0.01


def test_a_step_in_coefficients_is_charged_as_any_other(tmp_path: Path) -> None:
    site = RecordLevelSettings(**PRIVATE)
    replies = [take_part(asked(TEXTS, site, round), records(), engine(), tmp_path) for round in range(1, 6)]
    assert [reply.steps for reply in replies] == [1, 1, 1, 1, 0]
    assert "budget is spent" in replies[-1].refused
    assert len(replies[-1].update) == 0
    events = Ledger.open(tmp_path / LEDGER, read_only=True).events
    assert [event.components[0].dim for event in events] == [len(TEXTS)] * 4
    assert replies[0].noise_multiplier == pytest.approx(events[0].components[0].noise_multiplier)
    assert not np.array_equal(replies[0].update, replies[1].update)


def test_texts_that_the_model_cannot_read_cost_nothing(tmp_path: Path) -> None:
    unknown = replace(TEXTS, tokens=TEXTS.tokens + 10_000_000)
    with pytest.raises(IndexError):
        take_part(asked(unknown, RecordLevelSettings(**PRIVATE)), records(), engine(), tmp_path)
    assert not Ledger.open(tmp_path / LEDGER, read_only=True).charges


@pytest.mark.parametrize("offsets", [[0], [1, 3], [0, 2, 1, 3], [0, 2, 2, 3], [0, 2]])
def test_texts_that_are_none_are_refused(offsets: list[int]) -> None:
    texts = Records(np.arange(3, dtype=np.int32), np.array(offsets, np.int64))
    with pytest.raises(BadMessage, match="offsets must rise"):
        asked(texts, RecordLevelSettings(**PRIVATE))


def test_coefficients_are_of_one_step() -> None:
    two = replace(asked(TEXTS, RecordLevelSettings(**PRIVATE)), steps=2)
    with pytest.raises(BadMessage, match="steps must be 1"):
        SiteRequest.from_records(two.to_records())


def test_the_optimizer_is_told_the_noise_on_the_mean(tmp_path: Path) -> None:
    """Sites' noise is independent, and a value's is that of the coefficients through the texts' gradients."""
    seen = []

    class Watching(FedAdam):
        def step(self, state, parameters, step):
            seen.append(step)
            return super().step(state, parameters, step)

    made = engine()
    update = SpanUpdate(ServerUpdate(Watching(), Plain(), made.layout, 0.0), TrainedSubset(), lambda round: 0.5)
    model = GlobalModel(vector().float())
    gradients = torch.randn(6, made.layout.dim, generator=torch.Generator().manual_seed(0))
    update(model, update.server.optimizer.init(model.adapter), gradients, [torch.ones(6), torch.zeros(6)], 0.25, 1)
    torch.testing.assert_close(seen[0].noise_std.float(), 0.25 * gradients.norm(dim=0), rtol=1e-5, atol=0)
    torch.testing.assert_close(seen[0].update, 0.5 * gradients.sum(dim=0), rtol=1e-5, atol=1e-6)
    assert seen[0].scale == 0.5
