"""Whether going on from kept hidden states gives what the whole model gives: tried before it is relied on.

What `client.prefix` supposes of a model (its layers are called one after the other, each once; nothing that is trained
comes before them; no layer looks at padding) holds for most architectures, and no name tells for which. So two short
texts of different lengths are run through the model once with one adapter, which fills a cache, and once with another,
from that cache; the outcome must be that of the whole model with the other adapter.
"""

import logging
import math

import numpy as np
import torch
from torch import Tensor

from client.batch import Pool
from client.passes import Passes, hidden_size
from client.prefix import Prefix
from client.prefix_cache import PrefixCache
from client.records import Records
from client.stacked import Rows
from client.stacked_model import StackedModel
from privacy.rng import simulation_generator

log = logging.getLogger(__name__)

LENGTHS = (7, 4)
"""Tokens of the two texts; both are padded, as short texts are in training."""


def confirmed(prefix: Prefix, passes: Passes, kept: torch.dtype) -> Prefix | None:
    """`prefix` if it changes nothing on `passes`, whose own prefix is None; else None, and the model as it was."""
    stacked = passes.stacked
    scratch = PrefixCache(hidden_size(stacked.model), kept, 2**24)
    trial = Passes(stacked, passes.task, passes.token_budget, prefix)
    reason = "the result is another one"
    try:
        with torch.no_grad(), prefix.keeping_in(scratch):
            pool = Pool([_texts(stacked.model)], passes.longest)
            first, second = (_adapter(stacked, seed) for seed in (1, 2))
            stacked.bind(first)
            _outputs(trial, pool)
            stacked.bind(second)
            expected, found = _outputs(passes, pool), _outputs(trial, pool)
        tolerance = 0.05 if kept == torch.bfloat16 else 1e-3
        if torch.allclose(found, expected, rtol=0.0, atol=tolerance * float(expected.abs().max())):
            return prefix
    except Exception as error:  # whatever a foreign model does when a layer of it is left out
        reason = f"{type(error).__name__}: {error}"
    prefix.remove()
    log.info("hidden states of %s are not kept: %s", type(stacked.model).__name__, reason)
    return None


def _texts(model: torch.nn.Module) -> Records:
    """Two records of tokens drawn by a fixed seed, none of them padding."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    generator = simulation_generator(0, "prefix-check-texts")
    tokens = [generator.integers(0, config.vocab_size, length) for length in LENGTHS]
    pad = getattr(config, "pad_token_id", None) or 0
    return Records.from_lists(
        [np.where(row == pad, (pad + 1) % config.vocab_size, row).tolist() for row in tokens], None
    )


def _adapter(stacked: StackedModel, seed: int) -> Tensor:
    """A full vector in which every factor and head, not the factor B alone, moves what the model says."""
    generator = simulation_generator(seed, "prefix-check-adapter")
    vector = torch.from_numpy(generator.uniform(-2.0, 2.0, stacked.layout.size).astype(np.float32))
    for entry in stacked.layout.entries:
        entry.of(vector).div_(math.sqrt(max(entry.shape)))
    return stacked.inward(vector, full=True)


def _outputs(passes: Passes, pool: Pool) -> Tensor:
    """Logits, or the last hidden states, of every text; where there is one per token, of its own tokens only."""
    outputs, batch = passes.outputs(pool, np.arange(len(LENGTHS)), Rows.shared(len(LENGTHS)))
    values = outputs if isinstance(outputs, Tensor) else outputs.hidden
    return (values[batch.attention_mask.bool()] if values.dim() == 3 else values).double()
