"""The arithmetic of a model, and whether a unit's rounding depends on the units beside it.

- `"fp32"`: oneDNN in float32 where the CPU has AVX2 or AVX-512, torch's default elsewhere;
- `"bf16"`: products of frozen weights in bfloat16 (inputs and result rounded to 8 bits of mantissa, sums in float32);
  attention, norms, residuals, adapters and heads stay float32. What a frozen layer passes to a fused activation stays
  bfloat16: it is rounded already, and the next product rounds it anyway. Float32 on a CPU without such products;
- `"bf16-model"`: the whole frozen model in bfloat16, for GPUs; the adapters' parameters, gradients and moments, and
  the loss, stay float32.
- `"fp64"`: everything in float64, for tests of equality.

In one thread of a CPU with AVX2, `"fp32"` and `"bf16"` give a unit bit by bit the same contribution whatever others it
is computed with (client/engine/batching.py; docs/engine.md, "Batch invariance"), as the accountant takes it to be.
Several threads, and a GPU, choose kernels by the number of rows: float32 then moves a contribution by about 1e-5 of its
size, bfloat16 by some 1e-2. So `"auto"` is `"bf16"` in one thread of a CPU that multiplies it in hardware and whose
products of the model's shapes pass :func:`keeps_rows`, and on a GPU that passes a test of the whole engine
(:mod:`client.models.frozen.gpu_trial`); `"fp32"` elsewhere. What else is taken, and what others then move, is said in
privacy.json (:func:`batch_invariance_note`).
"""

import functools
import logging
from collections.abc import Iterable

import torch

from client.models.frozen.gpu_trial import Outcome
from client.models.frozen.kernels import (
    PROBED,
    BF16Weight,
    cancelling_sums,
    has_fast_onednn,
    in_bf16,
    multiplies_bf16,
)
from privacy import checks

log = logging.getLogger(__name__)

PRECISIONS = ("auto", "fp32", "bf16", "bf16-model", "fp64")


def choose(precision: str, device: torch.device, shapes: Iterable[tuple[int, int]] = ()) -> str:
    """`"auto"` becomes the fastest arithmetic in which units do not round one another.

    `"bf16"` becomes float32 on a processor that has no bfloat16 products: there torch's own take ten times as long.

    Args:
        shapes: `(out, in)` of the frozen weights, which are tried out before bfloat16 is taken.
    """
    checks.one_of(PRECISIONS, precision=precision)
    if precision not in ("auto", "bf16"):
        return precision
    if precision == "bf16" and device.type == "cpu" and not multiplies_bf16():
        log.info(
            "engine.precision = 'bf16': this processor has no bfloat16 products; float32 is taken, which is faster"
        )
        return "fp32"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    if precision == "auto" and not (alone and fast):
        return "fp32"
    failed = [shape for shape in sorted(set(shapes)) if alone and in_bf16(shape) and not keeps_rows(shape)]
    if not failed:
        return "bf16"
    log.warning(
        "bfloat16 products of %s x %s round a row by the number of rows beside it on this processor: %s",
        *failed[0],
        "float32 is taken"
        if precision == "auto"
        else "units move each other's contributions; engine.precision = 'auto' takes float32 here",
    )
    return "bf16" if precision == "bf16" else "fp32"


@functools.cache
def keeps_rows(shape: tuple[int, int]) -> bool:
    """Whether a row of both bfloat16 products with a weight `(out, in)` has the same bits in few rows and in many.

    Tried out on the first and on the last of the rows, as :func:`block_sizes` does, which chose how to multiply.
    """
    for wanted in (shape, shape[::-1]):
        x, packed = cancelling_sums(wanted)
        weight = BF16Weight(packed.to_dense() if packed.is_mkldnn else packed, None, narrow=True)
        many = weight.forward(x)
        for rows in (rows for rows in PROBED if rows < len(x)):
            first, last = weight.forward(x[:rows]), weight.forward(x[-rows:])
            if not (torch.equal(first, many[:rows]) and torch.equal(last, many[-rows:])):
                return False
    return True


def batch_invariance_note(precision: str, *, gpu: bool = False, tried: Outcome | None = None) -> tuple[str, ...]:
    """The part that a guarantee under this setting does not cover, for ``privacy.json``.

    Args:
        gpu: whether one trains, or may.
        tried: the outcome of the test on this host's GPU; None where others' cards train, or none was tried yet.
    """
    checks.one_of(PRECISIONS, precision=precision)
    if gpu and tried is not None:
        return _note_of(tried)
    if not precision.startswith("bf16"):
        if gpu:
            return (
                "rounding of gradients on a GPU: engine.precision = 'auto' takes bfloat16 only where a test on the "
                "card finds at the start that other units move no bit of a contribution; in float32 they moved it by "
                "about 1e-5 of its size where it was measured",
            )
        if precision == "fp64" or has_fast_onednn():
            return ()
        return (
            "rounding of gradients to float32: this processor has no kernels that are known to round a record alike "
            "whatever records are computed with it, so one unit may move the contributions of others by their rounding",
        )
    return (
        f"rounding of gradients to bfloat16 (engine.precision = {precision!r}) on a GPU or in several threads: it "
        "depends on which units are computed together, so one unit moves the contributions of others by some percent "
        "of their size where it was measured; the default ('auto') takes bfloat16 only where that does not happen",
    )


def _note_of(tried: Outcome) -> tuple[str, ...]:
    if not tried.moved:
        return ()
    before = f"; in bfloat16, which was tried first, by {tried.refused:.1g}" if tried.refused else ""
    return (
        f"rounding of gradients on a GPU ({tried.precision}): it depends on which units are computed together, so one "
        f"unit moves the contributions of others, by up to {tried.moved:.1g} of their size in a test on this "
        f"card{before}",
    )
