r"""The clip map's interface: every unit's row into the unit ball, and the noisy sum back into parameters.

``encode`` sends each row x into the unit ball of R^k, so that the sum over units has L2 sensitivity 1 under adding or
removing one unit, whatever the rows are. ``decode`` turns the noisy sum into the mean update: it divides by the
EXPECTED number of units, a public constant, and never sees how many there were. One isotropic Gaussian of standard
deviation z in encoded space is therefore a Gaussian mechanism of noise multiplier z.

What happens at the edges (``test_norms.py`` holds every map against this table):

==================================  ==================================================================================
edge                                every map
==================================  ==================================================================================
row with a NaN or an infinity       0, BEFORE clipping: min(1, C/NaN) is 1 in Python, so such a row would pass unclipped
row whose norm overflows float64    0, for the same reason (values beyond about 1e154)
row of zeros                        0; AdaClip and GeoClip: the clipped M(0 - a), for such a row lies off the centre a
encoded row that is not finite      0 (a basis or a whitening of absurd size)
row of any length                   norm at most 1 up to rounding; ``contribute`` enforces it exactly once more
no rows                             ``[0, k]``; the decoded update is then noise alone (plus a centre)
rows of another width or kind       ValueError
bound outside [1e-30, 1e30]         ValueError when the map is made: 0, negative, infinite and NaN bounds among them
scale outside [1e-18, 1e18]         ValueError when the map is made
basis or gradients not finite       ValueError when the map is made
map of no parameters                ValueError, but for NoUpdate: k = 0, rows of any width, nothing is released
==================================  ==================================================================================
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Real
from torch import Tensor

from privacy import checks
from privacy.clipping.units import float64_copy, squared_norms

# Thresholds beyond these have no meaning for model updates; within them no quotient of a clip map over- or underflows.
SMALLEST_BOUND, LARGEST_BOUND = 1e-30, 1e30

# The same for scales of single coordinates; within them float32 holds every scale and its inverse.
SMALLEST_SCALE, LARGEST_SCALE = 1e-18, 1e18


@runtime_checkable
class ClipMap(Protocol):
    """A frozen, serialisable pair of maps; ``privacy/audit/contracts.py`` checks an implementation."""

    @property
    def params(self) -> int:
        """Number of parameters of a row, and of the decoded update."""

    @property
    def dim(self) -> int:
        """The number k of coordinates of encoded space."""

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units k"]:
        """Every row into the unit ball, each by itself; rows that are not finite become 0. Returns a fresh tensor."""

    def decode(self, total: Float64[Tensor, " k"], expected_units: float) -> Float64[Tensor, " params"]:
        """The noisy sum as a mean update over ``expected_units``. Deterministic: post-processing."""

    def spread(self) -> Float64[Tensor, "*params"]:
        """Std of each decoded value for noise of std 1 on the encoded sum, times the expected units: 0-d if all alike.

        The constants that ``decode`` adds, such as a centre, are no noise.
        """

    def to_json(self) -> dict[str, Any]:
        """Describe the map in plain values; :func:`privacy.clipping.clip_from_json` rebuilds the map from them and
        :meth:`arrays`.
        """

    def arrays(self) -> dict[str, Tensor]:
        """Arrays too large for JSON that travel beside it: float32 vectors by name, {} for most maps."""


def finite_rows(
    rows: Real[Tensor, "units params"], params: int
) -> tuple[Float64[Tensor, "units params"], Float64[Tensor, " units"]]:
    """A float64 copy in which rows that are not finite are zero, and the norm of every row.

    ValueError unless the rows have ``params`` columns.
    """
    copy = float64_copy(rows)
    if copy.shape[1] != params:
        raise ValueError(
            f"rows must have {params} columns, got {copy.shape[1]}; the plan and the model's adapter layout must agree"
        )
    norms = squared_norms(copy).sqrt_()
    lost = ~norms.isfinite()
    if bool(lost.any()):
        copy[lost] = 0.0
        norms[lost] = 0.0
    return copy, norms


def in_unit_ball(encoded: Float64[Tensor, "units k"]) -> Float64[Tensor, "units k"]:
    """Clip every row to norm 1, in place; a row whose norm is not finite becomes 0. The last step of an ``encode``."""
    norms = squared_norms(encoded).sqrt_()
    lost = ~norms.isfinite()
    if bool(lost.any()):
        encoded[lost] = 0.0
        norms[lost] = 0.0
    return encoded.div_(norms.clamp_min_(1.0).unsqueeze(1))


def same_arrays(one: ClipMap, other: object) -> bool:
    """Whether two maps are of one class and have equal JSON and equal arrays."""
    if type(other) is not type(one) or not isinstance(other, ClipMap):
        return False
    mine, theirs = one.arrays(), other.arrays()
    return one.to_json() == other.to_json() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def check_bound(bound: float) -> None:
    """Raise ValueError unless ``bound`` can be a clipping threshold."""
    checks.within(SMALLEST_BOUND, LARGEST_BOUND, bound=bound, remedy="a clipping threshold is an L2 norm of an update")


def check_vector(name: str, values: Tensor) -> None:
    """Raise ValueError unless ``values`` is a finite float32 vector."""
    if values.dtype != torch.float32 or values.dim() != 1 or not bool(values.isfinite().all()):
        raise ValueError(
            f"{name} must be a finite float32 vector, got {values.dtype} of shape {tuple(values.shape)}, "
            f"{int((~values.isfinite()).sum())} of its values not finite"
        )


def check_length(name: str, values: Tensor, wanted: int) -> None:
    """Raise ValueError unless ``values`` has ``wanted`` entries."""
    if len(values) != wanted:
        raise ValueError(f"{name} must have {wanted} values, got {len(values)}")


def check_scales(name: str, values: Tensor) -> None:
    """Raise ValueError unless ``values`` is a float32 vector of positive numbers that can be scales."""
    check_vector(name, values)
    least, most = (float(values.min()), float(values.max())) if len(values) else (1.0, 1.0)
    if not SMALLEST_SCALE <= least <= most <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must lie in [{SMALLEST_SCALE:g}, {LARGEST_SCALE:g}], got {least:g}..{most:g}; "
            "bound the statistics they are made of"
        )
