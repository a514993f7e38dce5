"""The precision on a GPU, chosen by a test on the card that will train: whether others move a bit of a gradient.

A processor's kernels are known one by one (:mod:`client.models.frozen.batch_invariance`). Of a GPU only the outcome can
be judged: cuBLAS and attention choose kernels by the number of rows, and by the card. So the first blocks of the model
are trained for a step, each client alone and beside others, by the engine itself.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from privacy.randomness.rng import simulation_generator

log = logging.getLogger(__name__)

BLOCKS = 2
"""Blocks that are tried out: all blocks of a model have the same widths."""
LENGTHS = (5, 12, 33, 70, 100)
"""Tokens of records: padded and not, short and long."""
COMPANY = (1, 6, 40)
"""Numbers of further clients that each is computed beside."""

WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Leaves cuBLAS no room to split a sum, the only thing on SM90 and SM100 that makes it depend on the number of rows.
Read once, when a process first multiplies on a GPU."""

Texts = list[list[int]]
"""A client's token ids, record by record."""


@dataclass(frozen=True)
class Trial:
    """An engine to be tried out.

    Attributes:
        update: gives every client's update after some steps and then every record's gradient, float32
            ``[clients + records, dim]``.
        words: size of the vocabulary.
        longest: positions that the model has.
    """

    update: Callable[[list[Texts]], Tensor]
    words: int
    longest: int


Build = Callable[[nn.Module, str], Trial]
"""Makes an engine of a model, which it takes over, in a precision."""


@dataclass(frozen=True)
class Outcome:
    """The precision that a card got, and how far others move a gradient in it.

    Attributes:
        precision: what is computed in.
        moved: in lengths of the gradient; 0 where all bits stay.
        refused: of bfloat16, if that was tried first and moved; else 0.
    """

    precision: str
    moved: float
    refused: float = 0.0


_outcomes: dict[object, Outcome] = {}


def tried_here() -> Outcome | None:
    """The last outcome of this process; None where it has tried no GPU."""
    return next(reversed(_outcomes.values()), None)


def choose_on_gpu(model: nn.Module, precision: str, key: object, build: Build) -> str:
    """The precision for this card: of ``"auto"`` bfloat16 if others move no bit of a gradient, else float32.

    Args:
        model: what will be trained, on the CPU still; it is left as it is.
        key: what the outcome depends on beside the precision; it is tried once in a process.
        build: called with a copy of the first blocks.
    """
    if precision == "fp64":
        return precision
    if (precision, key) not in _outcomes:
        _outcomes[precision, key] = _tried(model, precision, build)
    return _outcomes[precision, key].precision


def _tried(model: nn.Module, precision: str, build: Build) -> Outcome:
    for name, value in WORKSPACE.items():
        os.environ.setdefault(name, value)
    refused = 0.0
    for candidate in ("bf16", "fp32") if precision == "auto" else (precision,):
        try:
            moved = moved_by_others(build(first_blocks(model), candidate))
        except torch.OutOfMemoryError:
            moved = float("inf")
            torch.cuda.empty_cache()
        if not moved:
            log.info("%s on this GPU: others move no bit of a gradient", candidate)
            return Outcome(candidate, 0.0, refused)
        log.warning("%s on this GPU: others move a gradient by up to %.1g of its length", candidate, moved)
        refused = refused or moved
    return Outcome(candidate, moved, refused if precision == "auto" else 0.0)


def first_blocks(model: nn.Module) -> nn.Module:
    """A copy of the model without its further blocks, on the CPU."""
    cut = list(_lists_of_blocks(model))
    try:
        for parent, name, blocks in cut:
            setattr(parent, name, nn.ModuleList(list(blocks)[:BLOCKS]))
        return copy.deepcopy(model)
    finally:
        for parent, name, blocks in cut:
            setattr(parent, name, blocks)


def _lists_of_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """The lists of modules that lie in no other list (experts lie in a block), with their parents and names."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield model, name, child
        else:
            yield from _lists_of_blocks(child)


def moved_by_others(trial: Trial) -> float:
    """The most that other clients move one's update or a record's gradient, in lengths of it; 0 if no bit changes."""
    draws = simulation_generator(0, "self-test")

    def client(records: int) -> Texts:
        lengths = [min(LENGTHS[i % len(LENGTHS)], trial.longest) for i in range(records)]
        return [draws.integers(0, trial.words, length).tolist() for length in lengths]

    probes, most = [client(1), client(4), client(7)], 0.0
    alone = [trial.update([probe]) for probe in probes]
    for count in COMPANY:
        others = [client(1 + i % 9) for i in range(count)]
        for before in (0, count):  # the first of all, and the last
            cohort = [*others[:before], *probes, *others[before:]]
            together = trial.update(cohort)
            first = len(cohort) + sum(len(other) for other in others[:before])
            for i, (probe, expected) in enumerate(zip(probes, alone, strict=True)):
                found = torch.cat([together[before + i : before + i + 1], together[first : first + len(probe)]])
                first += len(probe)
                if not torch.equal(found, expected):
                    lengths = expected.norm(dim=1).clamp_min(torch.finfo(expected.dtype).tiny)
                    most = max(most, float(((found - expected).norm(dim=1) / lengths).nan_to_num(1.0).max()))
    return most
