"""The private rows of one chunk of units, and their norms: what a clip map and a query may look at.

A unit is whatever the run protects: a client (row = its model update) or a record (row = its gradient).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float64, Int, Real
from torch import Tensor

# Rows are read in slabs of this many float64 numbers (4 MiB), so that the passes over a slab stay in the cache.
_SLAB = 1 << 19


def slabs(units: int, width: int) -> list[slice]:
    """Consecutive slices of units whose rows of ``width`` float64 numbers fit the cache."""
    step = max(1, _SLAB // max(1, width))
    return [slice(start, min(start + step, units)) for start in range(0, units, step)]


def squared_norms(rows: Float64[Tensor, "units width"]) -> Float64[Tensor, " units"]:
    """Sum of squares of every row, in float64.

    A row's value depends on that row alone, to the last bit: each is summed by itself, in one fixed order, by one
    thread. (torch splits long sums over however many threads there are, and einsum over a matrix sums long rows in
    another order than over a vector.) So a unit's contribution does not depend on who is computed beside it.
    """
    if rows.device.type != "cpu":
        return torch.stack([torch.dot(row, row) for row in rows]) if len(rows) else rows.new_zeros(0)
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.tensor([np.einsum("i,i->", row, row) for row in rows.numpy()], dtype=torch.float64)


def float64_copy(rows: Real[Tensor, "units width"]) -> Float64[Tensor, "units width"]:
    """A fresh float64 copy, whatever the type of number; ValueError for anything that is not a matrix of reals."""
    if rows.dim() != 2 or rows.is_complex():
        raise ValueError(
            f"rows must be a real matrix [units, params], got {rows.dtype} of shape {tuple(rows.shape)}; "
            "stack one row per unit"
        )
    return rows.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False, repr=False)
class Units:
    """One chunk of units and what they bring to a round. Private: it never leaves the process that made it.

    Attributes:
        rows: one row per unit; any real dtype. A row with a NaN or an infinity counts as absent everywhere.
        losses: one loss per unit, for queries about losses.
        votes: one index per unit, -1 for no vote, for queries that ask for a vote.
        accuracies: one share of right answers per unit, for queries about accuracy.
    """

    rows: Real[Tensor, "units params"]
    losses: Real[Tensor, " units"] | None = None
    votes: Int[Tensor, " units"] | None = None
    accuracies: Real[Tensor, " units"] | None = None

    def __post_init__(self) -> None:
        if self.rows.dim() != 2 or self.rows.is_complex():
            raise ValueError(
                f"rows must be a real matrix [units, params], got {self.rows.dtype} of shape {tuple(self.rows.shape)}; "
                "stack one row per unit"
            )
        for name, values in (("losses", self.losses), ("votes", self.votes), ("accuracies", self.accuracies)):
            if values is not None and tuple(values.shape) != (len(self),):
                raise ValueError(
                    f"{name} must have shape ({len(self)},), one per row, got {tuple(values.shape)}; "
                    "give every unit one, -1 or NaN where it has none"
                )
        if self.votes is not None and (self.votes.is_floating_point() or self.votes.is_complex()):
            raise ValueError(f"votes must be integers, got {self.votes.dtype}; send the index of the bin, -1 for none")

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __repr__(self) -> str:
        return f"Units({len(self)} private rows of {self.rows.shape[1]})"

    @cached_property
    def norms(self) -> Float64[Tensor, " units"]:
        """L2 norm of every row in float64; NaN where the row is not finite, so that any comparison with it is false."""
        parts = slabs(len(self), self.rows.shape[1])
        squares = [squared_norms(float64_copy(self.rows[part])).cpu() for part in parts]
        norms = torch.cat(squares).sqrt_() if squares else torch.zeros(0, dtype=torch.float64)
        return norms.masked_fill_(norms.isinf(), torch.nan)


def losses_of(units: Units, name: str, what: str = "losses") -> Float64[Tensor, " units"]:
    """The losses (or ``accuracies``) in float64 on the CPU; ValueError naming the query ``name`` if there are none."""
    values = getattr(units, what)
    if values is None:
        raise ValueError(f"{what} must be given for the query {name!r}, got None; one per unit, NaN where it diverged")
    return torch.as_tensor(values).detach().to("cpu", torch.float64)
