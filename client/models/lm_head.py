"""The last product of a language model, put off until the loss knows which rows of it are needed.

Logits are the largest tensor of a language model: at a vocabulary of 150,000 words, 1.2 GB for 2,048 tokens in float32,
and as much again for their gradient. So where the head is one frozen Linear on the last hidden state, and nothing
comes after it, the model is run without its head, and :func:`token_losses` multiplies the rows whose next token
counts, some at a time, keeping of each its loss and the gradient of that loss in the hidden state. Same numbers.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from client.models.frozen.kernels import FrozenWeight, PlainWeight, enough_rows
from client.models.frozen.linear import FrozenLinear

CHUNK = 2**24
"""Logits computed at a time: 64 MB in float32; four times that on a GPU, where starting a kernel costs as much."""

_MARK = "head_is_last"


@dataclass(frozen=True)
class Predictions:
    """Hidden states and the frozen head, of so many words, that would make logits of them."""

    hidden: Float[Tensor, "n t width"]
    head: FrozenWeight
    vocabulary: int

    def __getitem__(self, positions: tuple[slice, slice]) -> "Predictions":
        """Those of some records and positions, as of a tensor of logits."""
        return replace(self, hidden=self.hidden[positions])


def mark(model: Any) -> None:
    """Find out whether the model's logits are its output embedding times its last hidden state, and remember it.

    Compared on four tokens, so whatever an architecture does after its head (scaling, capping) is noticed.
    """
    head, body = model.get_output_embeddings(), model.base_model
    capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # small logits would not show it
    same = isinstance(head, nn.Linear) and body is not model and capped is None
    if same:
        with torch.no_grad():
            tokens = torch.arange(4)[None] % head.out_features
            logits = model(input_ids=tokens).logits
            product = head(body(input_ids=tokens).last_hidden_state)
        same = logits.shape == product.shape and torch.allclose(logits, product, rtol=1e-4, atol=1e-5)
    setattr(model, _MARK, same)


def run(model: Any, input_ids: Int[Tensor, "n t"], attention_mask: Tensor | None) -> Tensor | Predictions:
    """Logits of a model, or its :class:`Predictions` where it is marked and its head is frozen and plain."""
    head = _frozen_head(model)
    if head is not None:
        output = model.base_model(input_ids=input_ids, attention_mask=attention_mask)
        return Predictions(output.last_hidden_state, head, model.config.get_text_config().vocab_size)
    output = model(input_ids=input_ids, attention_mask=attention_mask)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def token_losses(
    outputs: Tensor | Predictions, targets: Int[Tensor, "n t"], needed: Bool[Tensor, "n t"]
) -> Float[Tensor, " m"]:
    """Cross-entropy at the m needed positions, row by row; float32, float64 where the model is."""
    if isinstance(outputs, Predictions):
        losses, _ = _HeadLoss.apply(outputs.hidden[needed], targets[needed], outputs, False)  # type: ignore[no-untyped-call]
        return losses  # type: ignore[no-any-return]
    return F.cross_entropy(wide(outputs[needed]), targets[needed], reduction="none")


def token_losses_and_hits(
    outputs: Tensor | Predictions, targets: Int[Tensor, "n t"], needed: Bool[Tensor, "n t"]
) -> tuple[Float[Tensor, " m"], Bool[Tensor, " m"]]:
    """The values of :func:`token_losses`, and whether the most probable token is the target: as slow as the softmax
    itself.
    """
    if isinstance(outputs, Predictions):
        return _HeadLoss.apply(outputs.hidden[needed], targets[needed], outputs, True)  # type: ignore[no-untyped-call,no-any-return]
    logits, wanted = wide(outputs[needed]), targets[needed]
    return F.cross_entropy(logits, wanted, reduction="none"), logits.argmax(dim=-1) == wanted


def _frozen_head(model: Any) -> FrozenWeight | None:
    if not getattr(model, _MARK, False):
        return None
    head = model.get_output_embeddings()
    if isinstance(head, FrozenLinear):
        return head.weight_
    if type(head) is nn.Linear and not head.weight.requires_grad:
        return PlainWeight(head.weight, head.bias)
    return None  # adapted or trained: its gradient goes through the logits


def wide(logits: Tensor) -> Tensor:
    """Losses are computed in float32 at least: bfloat16 logits are widened, float64 ones stay exact."""
    return logits.to(_wide(logits.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy of `hidden W^T` at the targets; keeps each row's gradient, `(softmax_i - onehot_i) W`, at once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, predictions: Predictions, with_hits: bool
    ) -> tuple[Tensor, Tensor]:
        head, chunk = predictions.head, CHUNK if hidden.device.type == "cpu" else 4 * CHUNK
        rows = max(1, chunk // predictions.vocabulary)
        losses, hits, gradients = [], [], []
        for low in range(0, len(hidden), rows):
            part, wanted = hidden[low : low + rows], targets[low : low + rows]
            logits = head.forward(enough_rows(part))[: len(part)]
            log_probabilities = F.log_softmax(logits, dim=-1, dtype=_wide(logits.dtype))
            losses.append(-log_probabilities.gather(1, wanted[:, None])[:, 0])
            if with_hits:
                hits.append(logits.argmax(dim=-1) == wanted)
            if ctx.needs_input_grad[0]:
                slope = log_probabilities.exp_()
                slope[torch.arange(len(slope), device=slope.device), wanted] -= 1.0
                gradients.append(head.backward(enough_rows(slope.to(part.dtype)))[: len(part)].to(part.dtype))
        ctx.save_for_backward(torch.cat(gradients) if gradients else torch.zeros_like(hidden))
        empty = hidden.new_empty(0)
        result = torch.cat(losses) if losses else wide(empty), torch.cat(hits) if hits else empty.bool()
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: None) -> tuple[Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[:, None].to(gradients.dtype), None, None, None
