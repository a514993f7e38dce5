"""Losses and metrics of the tasks against their definitions, one record at a time."""

import math

import pytest
import torch

from client.models.tasks import MOST_CLASSES, Batch, CausalLM, SequenceClassification


def _batch(generator, n=5, t=7, labels=3, **extra):
    lengths = torch.tensor([7, 1, 4, 2, 6])
    mask = (torch.arange(t) < lengths[:, None]).long()
    ids = torch.randint(0, 11, (n, t), generator=generator) * mask
    return Batch(ids, mask, torch.randint(0, labels, (n,), generator=generator), **extra)


def test_classification_loss_and_metrics():
    generator = torch.Generator().manual_seed(0)
    task, batch = SequenceClassification(3), _batch(generator)
    logits = torch.randn(5, 3, generator=generator)
    expected = torch.stack([-logits[i].softmax(0)[batch.labels[i]].log() for i in range(5)])
    torch.testing.assert_close(task.per_record_loss(logits, batch), expected)
    halves = [slice(0, 2), slice(2, 5)]
    parts = [
        task.totals(logits[s], Batch(batch.input_ids[s], batch.attention_mask[s], batch.labels[s])) for s in halves
    ]
    metrics = task.metrics(parts[0] + parts[1])
    assert metrics.count == 5
    assert metrics.loss == pytest.approx(expected.mean().item(), rel=1e-6)
    assert metrics.accuracy == sum(int(logits[i].argmax() == batch.labels[i]) for i in range(5)) / 5
    for label, row in enumerate(metrics.confusion):
        answers = [int(logits[i].argmax()) for i in range(5) if batch.labels[i] == label]
        assert list(row) == [answers.count(answer) for answer in range(3)]


def test_confusions_of_very_many_classes_are_not_counted():
    task = SequenceClassification(MOST_CLASSES + 1)
    ids = torch.ones(2, 3, dtype=torch.long)
    totals = task.totals(torch.randn(2, MOST_CLASSES + 1), Batch(ids, ids, torch.tensor([0, MOST_CLASSES])))
    assert len(totals) == len(task.no_totals()) == 3
    assert task.metrics(totals).macro_f1 is None


def test_prior_offset_is_the_clients_smoothed_frequencies_and_leaves_metrics_alone():
    task = SequenceClassification(3, balance="prior", smoothing=0.5)
    own = torch.tensor([0, 0, 0, 2])
    offset = task.logit_offsets(own)
    frequencies = torch.tensor([3.5, 0.5, 1.5]) / 5.5
    torch.testing.assert_close(offset.softmax(0), frequencies)
    torch.testing.assert_close(task.logit_offsets(torch.tensor([2, 1, 0])), torch.zeros(3))
    generator = torch.Generator().manual_seed(1)
    logits, plain = torch.randn(5, 3, generator=generator), _batch(generator)
    shifted = Batch(plain.input_ids, plain.attention_mask, plain.labels, None, offset.expand(5, 3))
    torch.testing.assert_close(task.per_record_loss(logits, shifted), task.per_record_loss(logits + offset, plain))
    torch.testing.assert_close(task.totals(logits, shifted), task.totals(logits, plain))
    assert SequenceClassification(3).logit_offsets(own) is None


def test_prior_offset_removes_the_bias_gradient_of_a_skewed_client():
    """At zero logits a client of 9 zeros and 1 one pulls the bias to its majority, and the adjusted loss does not."""
    labels = torch.tensor([0] * 9 + [1])
    ids = torch.ones(10, 2, dtype=torch.long)
    gradients = {}
    for balance in ("none", "prior"):
        task = SequenceClassification(2, balance=balance, smoothing=1e-6)
        offset = task.logit_offsets(labels)
        bias = torch.zeros(2, requires_grad=True)
        batch = Batch(ids, ids, labels, None, None if offset is None else offset.expand(10, 2))
        task.per_record_loss(bias.expand(10, 2), batch).mean().backward()
        gradients[balance] = bias.grad.norm().item()
    assert gradients["none"] == pytest.approx(0.4 * math.sqrt(2), rel=1e-5)
    assert gradients["prior"] < 1e-5


def test_causal_loss_is_the_weighted_mean_over_predicted_tokens():
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(5, 7, generator=generator)
    batch = _batch(generator, token_weights=weights)
    logits = torch.randn(5, 7, 11, generator=generator)
    expected, token_losses, hits = [], [], 0
    for i in range(5):
        length = int(batch.attention_mask[i].sum())
        losses = [-logits[i, t].log_softmax(0)[batch.input_ids[i, t + 1]] for t in range(length - 1)]
        token_losses += losses
        hits += sum(int(logits[i, t].argmax() == batch.input_ids[i, t + 1]) for t in range(length - 1))
        total = sum(loss * weights[i, t + 1] for t, loss in enumerate(losses))
        expected.append(total / weights[i, 1:length].sum() if losses else torch.tensor(0.0))
    torch.testing.assert_close(CausalLM().per_record_loss(logits, batch), torch.stack(expected))
    metrics = CausalLM().metrics(CausalLM().totals(logits, batch))
    assert metrics.count == len(token_losses) == 15
    assert metrics.loss == pytest.approx(torch.stack(token_losses).mean().item(), rel=1e-6)
    assert metrics.perplexity == pytest.approx(math.exp(metrics.loss))
    assert metrics.accuracy == hits / 15


def test_causal_loss_gradients_stay_inside_their_record():
    generator = torch.Generator().manual_seed(3)
    batch = _batch(generator)
    logits = torch.randn(5, 7, 11, generator=generator, requires_grad=True)
    CausalLM().per_record_loss(logits, batch)[2].backward()
    touched = logits.grad.abs().sum(-1) > 0
    assert touched[2].tolist() == [True] * 3 + [False] * 4
    assert not touched[[0, 1, 3, 4]].any()
    assert torch.isfinite(CausalLM().per_record_loss(logits, batch)).all()


def test_bad_settings_and_missing_labels_are_refused():
    with pytest.raises(ValueError, match=r"num_labels .*>= 2"):
        SequenceClassification(1)
    with pytest.raises(ValueError, match="balance must be"):
        SequenceClassification(2, balance="weights")
    with pytest.raises(ValueError, match="smoothing must be > 0"):
        SequenceClassification(2, smoothing=0.0)
    ids = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="needs labels"):
        SequenceClassification(2).per_record_loss(torch.zeros(1, 2), Batch(ids, ids))
    with pytest.raises(ValueError, match="at least one record"):
        SequenceClassification(2).metrics(torch.zeros(3, dtype=torch.float64))
