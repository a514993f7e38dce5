"""What a clip map is: every unit's row into the unit ball, and the noisy sum back into parameters.

``encode`` sends each row x into the unit ball of R^k, so that the sum over units has L2 sensitivity 1 under adding or
removing one unit, whatever the rows are. ``decode`` turns the noisy sum into the mean update: it divides by the
EXPECTED number of units, a public constant, and never sees how many there were. One isotropic Gaussian of standard
deviation z in encoded space is therefore a Gaussian mechanism of noise multiplier z.

A row that holds a NaN or an infinity, or whose norm overflows float64, becomes zero BEFORE clipping: min(1, C/NaN) is 1
in Python, so such a row would pass unclipped.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float64, Real
from torch import Tensor

from privacy import checks
from privacy.units import float64_copy, squared_norms

# Thresholds beyond these have no meaning for model updates; within them no quotient of a clip map over- or underflows.
SMALLEST_BOUND, LARGEST_BOUND = 1e-30, 1e30


@runtime_checkable
class ClipMap(Protocol):
    """A frozen, serialisable pair of maps; ``privacy/conformance.py`` checks an implementation."""

    @property
    def params(self) -> int:
        """Number of parameters of a row, and of the decoded update."""

    @property
    def dim(self) -> int:
        """k, the number of coordinates of encoded space."""

    def encode(self, rows: Real[Tensor, "units params"]) -> Float64[Tensor, "units k"]:
        """Every row into the unit ball, each by itself; rows that are not finite become 0. Returns a fresh tensor."""

    def decode(self, total: Float64[Tensor, " k"], expected_units: float) -> Float64[Tensor, " params"]:
        """The noisy sum as a mean update over ``expected_units``. Deterministic: post-processing."""

    def to_json(self) -> dict[str, Any]:
        """Plain values from which :func:`clip_from_json` rebuilds the map."""


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


def check_bound(bound: float) -> None:
    """ValueError unless ``bound`` can be a clipping threshold."""
    checks.within(SMALLEST_BOUND, LARGEST_BOUND, bound=bound, remedy="a clipping threshold is an L2 norm of an update")
