r"""Whether a batch of one site should draw units or records: the noise of both, at the site's own counts.

Under a cap of G records a unit, n units have R_G = sum_u min(n_u, G) records. At B gradients expected in a step, both
cost the same work, and the released mean has in every coordinate, in clip thresholds C, noise of

    user level      q = B / R_G of the units,     B n / R_G of them expected:   z_user(q) R_G / (B n)
    example level   q = B / R_G of the records,   B of them expected:           z_example(q, G) / B

with each z calibrated for the same epsilon, delta and steps, and C taken to be the same. It need not be: a row of user
level is the mean of up to G gradients, and where these have little in common it is up to sqrt(G) times shorter than
one, so that a smaller C does. Charles et al. (arXiv 2407.07737) find user level better where units' records are
diverse, epsilon is small or many gradients can be paid for.

The counts are private: whoever reads the comparison learns how many records units have. It is for the site's operator,
on the site's own machine, and no file keeps it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from privacy import checks
from privacy.accountants.calibration import calibrate
from privacy.events import MOST_RECORDS_PER_UNIT, ExampleLevelPoisson, Poisson


@dataclass(frozen=True)
class Levels:
    """A comparison of both ways to draw a batch, under one cap.

    Attributes:
        cap: G.
        records: R_G.
        rate: q, of units or of records.
        user_multiplier, example_multiplier: z.
        user_noise, example_noise: standard deviation of a coordinate of the released mean, in clip thresholds.
    """

    cap: int
    records: int
    rate: float
    user_multiplier: float
    example_multiplier: float
    user_noise: float
    example_noise: float

    @property
    def better(self) -> str:
        """The level with less noise at the same threshold; empty where the difference is below a hundredth."""
        if abs(self.example_noise / self.user_noise - 1.0) < 0.01:
            return ""
        return "example" if self.example_noise < self.user_noise else "user"


def compare(
    sizes: Int64[np.ndarray, " units"],
    unit: str,
    *,
    gradients: int,
    steps: int,
    epsilon: float,
    delta: float,
    caps: Sequence[int] | None = None,
) -> list[Levels]:
    """Compare both levels under every cap, for equally many gradients in a step.

    Args:
        sizes: how many records every unit has.
        unit: ``"group:NAME"``.
        gradients: B, expected in a step.
        caps: G; None takes powers of two up to the largest unit.

    Raises:
        ValueError: more gradients than there are records under every cap, or no noise keeps the target.
    """
    checks.integer_at_least(1, gradients=gradients, steps=steps)
    largest = min(int(sizes.max()), MOST_RECORDS_PER_UNIT)
    asked = caps or sorted({*(2**power for power in range(largest.bit_length())), largest})
    found, units = [], len(sizes)
    for cap in asked:
        records = int(np.minimum(sizes, cap).sum())
        if gradients > records:
            continue
        rate = gradients / records
        user = calibrate(epsilon, delta, Poisson(rate, units, unit), steps)
        example = calibrate(epsilon, delta, ExampleLevelPoisson(rate, units, unit, cap, records), steps)
        found.append(Levels(cap, records, rate, user, example, user / (rate * units), example / gradients))
    if not found:
        raise ValueError(
            f"gradients must be at most the {int(np.minimum(sizes, max(asked)).sum())} records there are under the "
            f"largest cap, got {gradients}; lower site.batch-size"
        )
    return found
