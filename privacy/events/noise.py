"""The makers of a release's noise: the server, or the clients together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from privacy import checks

MOST_PARTIES: Final = 1024
"""Every party holds a share of every other's keys; beyond this the square of the number is too much."""

LEAST_SHARE: Final = 64
"""Least parameter of a share: the divergence of a sum of shares from one discrete Gaussian vanishes from here on."""

MODULUS_BITS: Final = (16, 24, 32)

_TAILS = 12.0  # standard deviations of the total noise that must fit into the modulus; exp(-72) lies beyond


@dataclass(frozen=True)
class NoiseShares:
    r"""Noise made by the clients: every party adds a share, and the sum of enough shares is the noise of the release.

    With n parties of which at least m hand in a share, c of them perhaps in league with the server, every party adds
    to each coordinate of its own vector, on an integer grid of 2^g points per unit of sensitivity, a discrete Gaussian
    of

        s_j = ceil( z_j 2^g / sqrt(m - c) )        for a part j of the release with noise multiplier z_j.

    Whoever knows the shares of c parties still faces the sum of at least m - c others, whose variance parameter is at
    least (z_j 2^g)^2. All of it is in the sum that secure aggregation reveals, so the guarantee is against the server
    too: at every Rényi order a, one release costs at most a / (2 z_eff^2) under replacing one party's contribution by
    zero, with no amplification by sampling, for the server knows who takes part.

    Reference: Kairouz, Liu and Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure
    aggregation" (arXiv 2102.06387). Their bound on sums: that of k discrete Gaussians of parameter s is within a factor
    exp(+-tau) of one discrete Gaussian of variance k s^2, point by point (:func:`divergence_of_sum`), with

        tau <= 5 sum_{i=1}^{k-1} exp(-2 pi^2 s^2 i / (i + 1)) <= 5 k exp(-pi^2 s^2),

    which for the least share allowed here, s = 64, is below 10^-17000: it is zero in every digit of every accountant,
    for any number of coordinates, so it does not appear in the account. The discrete Gaussian itself satisfies
    concentrated differential privacy with exactly the parameter of the continuous one (Canonne, Kamath and Steinke,
    arXiv 2004.00010v5, for integer shifts, coordinate by coordinate), so parts of different noise add up like those of
    a joint Gaussian.

    Deviations from the paper: no random rotation and no stochastic rounding. Rows are clipped on a grid of 2^40 (see
    ``contribution.py``) and brought to the coarser one by rounding TOWARD ZERO, which never raises a norm, so that the
    sensitivity is exactly 2^g and no rounding enters the account. The price is a shrinkage of at most one grid step a
    coordinate and party, far below the noise for the moduli allowed here. (Skellam noise, arXiv 2110.04995, is closed
    under addition but needs the L1 norm in its account and an exact Poisson sampler for means near 2^40.)

    Attributes:
        parties: n, everyone who may take part; all are asked in every round. Public, agreed on before a run.
        survivors: m, the least number of parties whose vectors may be summed; fewer end the round with nothing.
        colluding: c, how many parties may tell the server all they know without weakening the guarantee.
        modulus_bits: sums are taken modulo 2^b.
    """

    parties: int
    survivors: int
    colluding: int = 0
    modulus_bits: int = 32

    def __post_init__(self) -> None:
        checks.integer_at_least(2, parties=self.parties, remedy="a sum of one vector hides nothing")
        checks.integer_at_least(0, colluding=self.colluding)
        checks.one_of(MODULUS_BITS, modulus_bits=self.modulus_bits)
        if self.parties > MOST_PARTIES:
            raise ValueError(
                f"parties must be <= {MOST_PARTIES}, got {self.parties}: the keys of every party are shared among all; "
                "take trust = 'server' for large cohorts"
            )
        if not self.threshold <= self.survivors <= self.parties:
            raise ValueError(
                f"survivors must be in {self.threshold}..{self.parties} for {self.parties} parties of which "
                f"{self.colluding} may collude, got {self.survivors}; more than half of the honest ones must be left "
                "to open a sum"
            )
        if self.survivors - self.colluding < 2:
            raise ValueError(
                f"survivors - colluding must be >= 2, got {self.survivors} - {self.colluding}; "
                "one honest party alone is not hidden in a sum"
            )

    @property
    def threshold(self) -> int:
        """The number t of parties that open a sum: the least with 2t > n + c.

        Then c colluding parties hold too few shares of a key (t > c), and no server, whatever it tells whom, can open
        two sets of survivors or both secrets of one party: that takes 2t answers, the honest parties give n - c at
        most and the colluding ones 2c.
        """
        return (self.parties + self.colluding) // 2 + 1

    @property
    def honest(self) -> int:
        """The least number of shares of noise that the adversary does not know."""
        return self.survivors - self.colluding

    def grid_bits(self, noise_multipliers: Sequence[float]) -> int:
        """The exponent g of the grid, as fine as the modulus allows: n vectors and their noise do not wrap around.

        Args:
            noise_multipliers: z_j of every part of the release.

        Raises:
            ValueError: the modulus is too small for this many parties and this much noise.
        """
        largest = max(noise_multipliers)
        room = self.parties + _TAILS * largest * math.sqrt(self.parties / self.honest)
        bits = math.floor(self.modulus_bits - 1 - math.log2(room))
        least = min(noise_multipliers)
        if bits < 1 or self.share(least, bits) < LEAST_SHARE:
            raise ValueError(
                f"modulus_bits must be larger for {self.parties} parties and noise multipliers from {least:g} to "
                f"{largest:g}, got {self.modulus_bits}; the grid would be too coarse for shares of noise"
            )
        return bits

    def share(self, noise_multiplier: float, grid_bits: int) -> int:
        """The parameter s of the discrete Gaussian that one party adds, in steps of the grid."""
        return math.ceil(self.scale(grid_bits) * noise_multiplier)

    def scale(self, grid_bits: int) -> float:
        """Grid steps in one party's share of noise, per unit of noise multiplier."""
        return 2.0**grid_bits / math.sqrt(self.honest)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "discrete-gaussian-shares",
            "parties": int(self.parties),
            "survivors": int(self.survivors),
            "colluding": int(self.colluding),
            "modulus_bits": int(self.modulus_bits),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "NoiseShares":
        if data["kind"] != "discrete-gaussian-shares":
            raise ValueError(f"kind of shared noise must be 'discrete-gaussian-shares', got {data['kind']!r}")
        return cls(int(data["parties"]), int(data["survivors"]), int(data["colluding"]), int(data["modulus_bits"]))


def divergence_of_sum(share: float, count: int) -> float:
    """The bound tau on |log| of the ratio of a sum of ``count`` shares to one discrete Gaussian of the same variance.

    Per coordinate (arXiv 2102.06387). ``share`` >= sqrt(1/2) is their common parameter.
    """
    checks.within(math.sqrt(0.5), float(1 << 56), share=share)
    checks.integer_at_least(1, count=count)
    return 5.0 * sum(math.exp(-2.0 * math.pi**2 * share**2 * i / (i + 1)) for i in range(1, count))
