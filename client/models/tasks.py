"""Tasks that are learnt from records: the loss, the metrics, and the correction for a client's label skew.

Everything here is a plain function of tensors, one value per record and no coupling between records, so that the
stacked engine may put the records of many clients, or one record of many gradients, into the same micro-batch.

Label-prior adjustment (``balance="prior"``): a client whose labels are skewed lowers its own loss fastest by moving the
classifier's bias towards its majority label. Under clipping that direction eats the norm the client may spend, and
over clients the moves cancel: noise is paid for nothing. Training instead on ``logits + log pi_k``, with ``pi_k`` the
label frequencies of the client, asks the model for the likelihood ratio of the labels and leaves the prior to the
offset; at test time the plain logits are used, which assumes balanced classes.
References: Menon et al., "Long-tail learning via logit adjustment", ICLR 2021, equation 10 (arXiv 2007.07314v2);
Ren et al., "Balanced Meta-Softmax", NeurIPS 2020 (arXiv 2007.10740v3). Deviation: the frequencies are those of one
client, smoothed by a pseudo-count, where the papers use the whole training set. The offset is a function of one
client's records used inside that client's own update, so the client-level guarantee is untouched. For record-level
privacy it couples the records of a client and must not be used.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from client.models.confusion import macro_f1
from client.models.lm_head import Predictions, token_losses, token_losses_and_hits, wide
from privacy import checks


@dataclass(frozen=True)
class Batch:
    """Records of one micro-batch, padded on the right.

    Attributes:
        input_ids: int64 ``[n, t]``.
        attention_mask: ``[n, t]``, 1 on tokens and 0 on padding.
        labels: int64 ``[n]`` class labels; None for a language model, whose targets are its inputs.
        token_weights: float32 ``[n, t]``, weight of the loss of predicting that token; None is 1 everywhere.
        logit_offsets: float32 ``[n, num_labels]`` added to the logits in the loss and never in the metrics.
        references: float64, one per pair of rows: its :meth:`Preference.margins` under the start model.
    """

    input_ids: Int[Tensor, "n t"]
    attention_mask: Int[Tensor, "n t"]
    labels: Int[Tensor, " n"] | None = None
    token_weights: Float[Tensor, "n t"] | None = None
    logit_offsets: Float[Tensor, "n labels"] | None = None
    references: Float[Tensor, " pairs"] | None = None


MOST_CLASSES = 300
"""Up to so many classes are confusions counted: their number grows with the square."""


@dataclass(frozen=True)
class Metrics:
    """Averages over a set of records.

    Attributes:
        loss: mean cross-entropy in nats, per record (classification) or per token (language model); of pairs theirs.
        accuracy: share of records, or of tokens, whose most probable label is right; of pairs, see :class:`Preference`.
        count: records, or tokens, averaged over.
        perplexity: ``exp(loss)`` of a language model; None for a classifier, and for pairs.
        confusion: how many records of the class of a row were taken for that of a column; None for a language model
            and beyond :data:`MOST_CLASSES` classes.
        loss_within, accuracy_within: half the width of the 95 % interval around a value that was released with noise;
            None for values on public records, which are exact.
        confusion_within: the same for every cell of a matrix that was released with noise, which counts units.
        tokens, tokens_within: how many tokens units said, with noise, that a language model predicts; and the same.
    """

    loss: float
    accuracy: float
    count: int
    perplexity: float | None = None
    confusion: tuple[tuple[int, ...], ...] | None = None
    loss_within: float | None = None
    accuracy_within: float | None = None
    confusion_within: float | None = None
    tokens: float | None = None
    tokens_within: float | None = None

    @property
    def macro_f1(self) -> float | None:
        """Mean of F1 over the classes, see :mod:`client.models.confusion`; None without a confusion matrix."""
        return None if self.confusion is None else macro_f1(self.confusion)


class Task(Protocol):
    """The interface of a task, as the engine asks it. `logits` are what :func:`client.models.lm_head.run` gave.

    Attributes:
        texts_each: texts of a record, which are rows of a batch beside each other.
        has_reference: whether the loss compares the model with the one it began as.
    """

    texts_each: ClassVar[int]

    @property
    def has_reference(self) -> bool: ...

    def per_record_loss(self, logits: Any, batch: Batch) -> Float[Tensor, " n"]:
        """Loss of every record, in nats."""
        ...

    def no_totals(self) -> Float[Tensor, " sums"]:
        """The sums over no record."""
        ...

    def totals(self, logits: Any, batch: Batch) -> Float[Tensor, " sums"]:
        """Sums over the batch, float64: loss, hits, and the count both are averaged over.

        A classifier adds the confusion matrix, row by row. Sums of batches add up.
        """
        ...

    def metrics(self, totals: Float[Tensor, " sums"]) -> Metrics:
        """Averages from summed totals."""
        ...

    def logit_offsets(self, labels: Int[Tensor, " n"] | None) -> Float[Tensor, " labels"] | None:
        """Offset of a client's logits given all its labels; None where the task or its setting has none."""
        ...


@dataclass(frozen=True)
class SequenceClassification:
    """One label per record; the loss is cross-entropy.

    Attributes:
        balance: ``"none"``, or ``"prior"``: add the log of the client's own smoothed label frequencies to the logits in
            the loss.
        smoothing: pseudo-count per class in those frequencies; larger means a weaker adjustment.
    """

    num_labels: int
    balance: str = "none"
    smoothing: float = 1.0
    texts_each: ClassVar[int] = 1
    has_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.integer_at_least(2, num_labels=self.num_labels)
        checks.one_of(("none", "prior"), balance=self.balance)
        checks.positive(smoothing=self.smoothing, remedy="an absent class would get log 0")

    def per_record_loss(self, logits: Float[Tensor, "n labels"], batch: Batch) -> Float[Tensor, " n"]:
        """Cross-entropy of every record, with the batch's logit offsets where it has them."""
        adjusted = logits if batch.logit_offsets is None else logits + batch.logit_offsets
        return F.cross_entropy(wide(adjusted), _labels(batch), reduction="none")

    def no_totals(self) -> Float[Tensor, " sums"]:
        """Zeros in the form of :meth:`totals`."""
        return torch.zeros(3 + self._confusions, dtype=torch.float64)

    def totals(self, logits: Float[Tensor, "n labels"], batch: Batch) -> Float[Tensor, " sums"]:
        """Summed loss on the plain logits, right answers, records, confusions."""
        labels = _labels(batch)
        loss = F.cross_entropy(wide(logits), labels, reduction="none").double().sum()
        answers = logits.argmax(dim=-1)
        hits = (answers == labels).double().sum()
        count = torch.tensor(float(len(labels)), dtype=torch.float64, device=loss.device)
        sums = torch.stack([loss, hits, count])
        if not self._confusions:
            return sums
        pairs = torch.bincount(labels.long() * self.num_labels + answers, minlength=self._confusions)
        return torch.cat([sums, pairs.double()])

    def metrics(self, totals: Float[Tensor, " sums"]) -> Metrics:
        """Mean loss, accuracy and the confusion matrix."""
        loss, accuracy, count = _averages(totals)
        if not self._confusions:
            return Metrics(loss=loss, accuracy=accuracy, count=count)
        pairs = totals[3:].long().reshape(self.num_labels, self.num_labels).tolist()
        return Metrics(loss=loss, accuracy=accuracy, count=count, confusion=tuple(map(tuple, pairs)))

    @property
    def _confusions(self) -> int:
        return self.num_labels**2 if self.num_labels <= MOST_CLASSES else 0

    def logit_offsets(self, labels: Int[Tensor, " n"] | None) -> Float[Tensor, " labels"] | None:
        """``log((n_c + smoothing) / (n + smoothing * num_labels)) + log(num_labels)``, float32.

        The constant makes the offset of a balanced client zero; it does not change the loss.
        """
        if self.balance == "none" or labels is None:
            return None
        counts = torch.bincount(labels.long(), minlength=self.num_labels).double() + self.smoothing
        return (counts / counts.mean()).log().float()


@dataclass(frozen=True)
class CausalLM:
    """The task of next-token prediction. A record's loss is the weighted mean over its predicted tokens.

    Attributes:
        weighted_only: tokens of weight 0 count in no metric either; prompts are marked so. Otherwise
            weights, such as those of sensitive tokens, are a matter of training alone.
    """

    weighted_only: bool = False
    texts_each: ClassVar[int] = 1
    has_reference: ClassVar[bool] = False

    def per_record_loss(self, logits: Tensor | Predictions, batch: Batch) -> Float[Tensor, " n"]:
        """``sum_t w_t CE_t / sum_t w_t`` over the predicted tokens; 0 for a record with nothing to predict."""
        needed = _predicted(batch, batch.token_weights is not None)
        losses = token_losses(logits[:, :-1], batch.input_ids[:, 1:], needed)
        dense = losses.new_zeros(needed.shape).masked_scatter(needed, losses)
        weights = needed.to(losses.dtype)
        if batch.token_weights is not None:
            weights = weights * batch.token_weights[:, 1:].to(losses.dtype)
        return (dense * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(torch.finfo(weights.dtype).tiny)

    def no_totals(self) -> Float[Tensor, " sums"]:
        """Zeros in the form of :meth:`totals`."""
        return torch.zeros(3, dtype=torch.float64)

    def totals(self, logits: Tensor | Predictions, batch: Batch) -> Float[Tensor, " sums"]:
        """Summed unweighted loss, right next tokens, predicted tokens."""
        needed = _predicted(batch, self.weighted_only)
        losses, hits = token_losses_and_hits(logits[:, :-1], batch.input_ids[:, 1:], needed)
        return torch.stack([losses.double().sum(), hits.double().sum(), needed.double().sum()])

    def metrics(self, totals: Float[Tensor, " sums"]) -> Metrics:
        """Mean loss per token, next-token accuracy, perplexity."""
        loss, accuracy, count = _averages(totals)
        return Metrics(loss=loss, accuracy=accuracy, count=count, perplexity=float(torch.tensor(loss).double().exp()))

    def logit_offsets(self, labels: Int[Tensor, " n"] | None) -> None:
        """A language model has no label prior."""
        return None


@dataclass(frozen=True)
class Preference:
    """The task of preferring, to the same prompt, one answer to another. A record is a pair of texts, chosen first.

    A text's score is the log-probability of its answer: the tokens of weight above 0. The margin m of a pair is the
    score of the chosen text minus that of the rejected one, and the losses are

        dpo:    -log sigmoid(beta (m - m_start))       m_start of the model before training
        simpo:  -log sigmoid(beta m - gamma)           scores divided by the tokens of their answers

    References: Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, equation 7 (arXiv 2305.18290v3); Meng
    et al., "SimPO", NeurIPS 2024, equation 6 (arXiv 2405.14734v3). The loss of a pair depends on that pair alone.

    Attributes:
        loss: one of :data:`PREFERENCE_BETAS`.
        beta: scale of the margin; 0 takes the paper's.
        gamma: margin that SimPO asks for.
    """

    loss: str = "dpo"
    beta: float = 0.0
    gamma: float = 1.0
    texts_each: ClassVar[int] = 2

    def __post_init__(self) -> None:
        checks.one_of(PREFERENCE_BETAS, loss=self.loss)
        checks.non_negative(beta=self.beta, gamma=self.gamma)

    @property
    def has_reference(self) -> bool:
        """Whether the loss is DPO's."""
        return self.loss == "dpo"

    def margins(self, logits: Tensor | Predictions, batch: Batch) -> Float[Tensor, " pairs"]:
        """Score of the chosen text minus that of the rejected one, float64; that of an empty answer is 0."""
        needed = _predicted(batch, weighted=True)
        losses = token_losses(logits[:, :-1], batch.input_ids[:, 1:], needed).double()
        scores = -losses.new_zeros(needed.shape).masked_scatter(needed, losses).sum(dim=1)
        if self.loss == "simpo":
            scores = scores / needed.sum(dim=1).clamp_min(1)
        return scores[0::2] - scores[1::2]

    def per_record_loss(self, logits: Tensor | Predictions, batch: Batch) -> Float[Tensor, " pairs"]:
        """The loss of every pair."""
        return self._losses(self._rewards(logits, batch))

    def no_totals(self) -> Float[Tensor, " sums"]:
        """Zeros in the form of :meth:`totals`."""
        return torch.zeros(3, dtype=torch.float64)

    def totals(self, logits: Tensor | Predictions, batch: Batch) -> Float[Tensor, " sums"]:
        """Summed loss, pairs whose chosen text has the higher reward (one with equal rewards counts half), pairs."""
        rewards = self._rewards(logits, batch)
        hits = (rewards > 0).double() + 0.5 * (rewards == 0).double()
        return torch.stack([self._losses(rewards).sum(), hits.sum(), torch.ones_like(hits).sum()])

    def metrics(self, totals: Float[Tensor, " sums"]) -> Metrics:
        """Mean loss per pair, share of pairs in which the chosen text is preferred."""
        return Metrics(*_averages(totals))

    def logit_offsets(self, labels: Int[Tensor, " n"] | None) -> None:
        """A language model has no label prior."""
        return None

    def _rewards(self, logits: Tensor | Predictions, batch: Batch) -> Float[Tensor, " pairs"]:
        """Reward of the chosen text minus that of the rejected one."""
        margins = self.margins(logits, batch)
        if self.has_reference:
            if batch.references is None:
                raise ValueError("DPO compares with the start model, whose margins this batch does not have")
            margins = margins - batch.references
        return (self.beta or PREFERENCE_BETAS[self.loss]) * margins

    def _losses(self, rewards: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        return -F.logsigmoid(rewards - (0.0 if self.has_reference else self.gamma))


PREFERENCE_BETAS = {"dpo": 0.1, "simpo": 2.0}
"""Losses over pairs, and the scale that their papers train with."""

TASKS = ("classification", "causal-lm", "summarisation", "instruction", "preference")
"""Names a run may give its task."""


def make_task(
    name: str, num_labels: int = 0, balance: str = "none", *, loss: str = "dpo", beta: float = 0.0, gamma: float = 1.0
) -> Task:
    """The task of a run; `loss`, `beta` and `gamma` are those of :class:`Preference`.

    Raises:
        ValueError: unknown name, fewer than two classes, or balancing where there are no labels.
    """
    checks.one_of(TASKS, task=name)
    if name == "classification":
        return SequenceClassification(num_labels, balance)
    if balance != "none":
        raise ValueError(f"balance must be 'none' for task {name!r}, which has no labels, got {balance!r}")
    if name == "preference":
        return Preference(loss, beta, gamma)
    return CausalLM(weighted_only=name != "causal-lm")


def _labels(batch: Batch) -> Tensor:
    if batch.labels is None:
        raise ValueError("classification needs labels; this batch has none (is the label column set?)")
    return batch.labels


def _predicted(batch: Batch, weighted: bool) -> Tensor:
    """Which of the tokens 1..t-1 are predicted, bool ``[n, t - 1]``; with `weighted`, only those of weight above 0."""
    real = batch.attention_mask[:, 1:].bool()
    return real & (batch.token_weights[:, 1:] > 0) if weighted and batch.token_weights is not None else real


def _averages(totals: Tensor) -> tuple[float, float, int]:
    loss, hits, count = (float(value) for value in totals[:3])
    if count < 1:
        raise ValueError("metrics need at least one record (or predicted token), got none")
    return loss / count, hits / count, round(count)
