r"""GeoClip: rows are whitened along the eigenvectors of their covariance, estimated from releases, before clipping.

    w_k = M (Delta_k - a),   released g = a + M^+ (sum_k w_k min(1, 1/||w_k||) + z n) / (q N)
    M = (sum_i sqrt(lambda_i))^(-1/2) diag(lambda_i^(-1/4)) V        a <- b1 a + (1 - b1) g
    [V, l] <- leading singular vectors, and squared values, of [sqrt(b3 l) V^T, sqrt(1 - b3) (g - a)]

Reference: Gilani et al. 2025, "GeoClip: Geometry-Aware Clipping for Differentially Private SGD" (arXiv 2506.06549): the
optimal transformation, and the low-rank form with streaming PCA.
Guarantee: each round is one Poisson-sampled Gaussian of multiplier z; a, V and l are post-processing of releases.
Deviations:
- The low-rank form of the paper drops what lies outside span V. Then g - a lies in span V too, no direction can ever
  enter, and the first V decides. ``rest = false`` is that form, with a random first V. By default the directions
  outside keep one common eigenvalue, so nothing is lost and V can turn (``privacy/clipping/whitening.py``).
- g is a mean of q N rows that carries noise of known covariance: eigenvalues of single rows are q N times what is left
  of l after the noise along each direction, and after what chance alone lifts the first of d noisy directions to:
  tau^2 ((1 + sqrt((d - k)/n))^2 - 1), n = (1 + b3)/(1 - b3) rounds (Marchenko and Pastur 1967), tau^2 being the noise
  outside V. Without this, V fills with noise, whose directions are then given more of it. The common eigenvalue is at
  least its own standard error.
- Averages begin from the prior of flat clipping with C: all eigenvalues (C^2/d), with the weight b3^t after t rounds.
- Only ratios of eigenvalues are learnt; they sum to C^2. What is released is clipped, so its covariance is at most what
  the last M allowed: eigenvalues as they are found fall from round to round, until every row is clipped to nothing and
  g stays at a. Summing to C^2, they never give more noise than flat clipping with C.
- ``blocks = true`` gives every (A, B) pair and head directions of its own, all clipped together.
Before that, eigenvalues stay within [lowest, highest]^2 of the prior; the paper's h1 and h2 are absolute.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from privacy import checks
from privacy.clipping.whitening import GeoClip, whitening_weights
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.randomness.rng import torch_generator
from strategies.controllers.controller import Controller, PublicSignals, RunInfo


@dataclass(frozen=True)
class Leading:
    """Averages of one block over releases, in float64, with the weights of b3.

    Attributes:
        directions: V ``[k, d]``.
        values: l ``[k]``.
        noise: variance of the noise along each direction, ``[k]``, and that along any other, one more value.
        total: ||g - a||^2.
    """

    directions: Float64[Tensor, "k d"]
    values: Float64[Tensor, " k"]
    noise: Float64[Tensor, " k_and_1"]
    total: float = 0.0

    def noise_along(self, directions: Float64[Tensor, "n d"]) -> Float64[Tensor, " n_and_1"]:
        """Write the noise of these averages for other directions."""
        shares = (directions @ self.directions.T).square()
        return torch.cat([self.noise[-1] + shares @ (self.noise[:-1] - self.noise[-1]), self.noise[-1:]])


@dataclass(frozen=True)
class Shape:
    """Statistics of rounds with the same block sizes: a ``[d]`` float64, their blocks, and how many rounds they saw."""

    centre: Float64[Tensor, " d"]
    blocks: tuple[Leading, ...]
    rounds: int = 0


@dataclass(frozen=True)
class GeoclipState:
    """Statistics by the block sizes of the rounds they are of."""

    shapes: dict[str, Shape]


@dataclass(frozen=True)
class Geoclip(Controller[GeoclipState]):
    """The GeoClip controller of this page.

    Attributes:
        clip_norm: C, > 0.
        rank: directions of their own, k, per block; fewer where a block is smaller.
        blocks: directions for every (A, B) pair and head by itself.
        rest: keep what lies outside the directions.
        mean_history: b1, in [0, 1).
        history: b3, in [0, 1).
        lowest, highest: bounds of square roots of eigenvalues in units of C / sqrt(d).
        seed: of the first directions where ``rest`` is false.
    """

    clip_norm: float = 1.0
    rank: int = 8
    blocks: bool = False
    rest: bool = True
    mean_history: float = 0.99
    history: float = 0.9
    lowest: float = 1e-2
    highest: float = 100.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks.within(1e-9, 1e9, clip_norm=self.clip_norm)
        checks.integer_at_least(1, rank=self.rank, remedy="for none take the controller fixed")
        checks.within(0.0, 0.9999, mean_history=self.mean_history, history=self.history)
        checks.within(1e-6, 1.0, lowest=self.lowest)
        checks.within(1.0, 1e6, highest=self.highest)

    def init(self, info: RunInfo, public: PublicSignals) -> GeoclipState:
        blocks = self._sizes(info, 1)
        return GeoclipState({_key(blocks): self._fresh(blocks)})

    def plan(self, state: GeoclipState, info: RunInfo, round: int) -> Plan:
        sizes = self._sizes(info, round)
        shape = state.shapes.get(_key(sizes)) or self._fresh(sizes)
        return Plan(self._map(shape, sizes, info), info.noise_multiplier(round))

    def update(self, state: GeoclipState, info: RunInfo, released: Release, public: PublicSignals) -> GeoclipState:
        sizes = self._sizes(info, public.round)
        shape = state.shapes.get(_key(sizes)) or self._fresh(sizes)
        mean, clip = released.update.double(), released.plan.clip
        assert isinstance(clip, GeoClip)
        unit = (released.plan.noise_multiplier / released.expected_units) ** 2
        ranks = list(map(len, (block.values for block in shape.blocks)))
        changes = torch.split(mean - shape.centre, list(sizes))
        along = torch.split(clip.weights.double() ** -2 * unit, ranks)
        beside = clip.rest.double() ** -2 * unit if self.rest else torch.zeros(len(sizes), dtype=torch.float64)
        blocks = tuple(
            self._turned(block, change, torch.cat([noise, outside.view(1)]))
            for block, change, noise, outside in zip(shape.blocks, changes, along, beside, strict=True)
        )
        centre = torch.lerp(mean, shape.centre, self.mean_history)
        return replace(state, shapes={**state.shapes, _key(sizes): Shape(centre, blocks, shape.rounds + 1)})

    def released_values(self, state: GeoclipState, info: RunInfo) -> dict[str, float]:
        sizes = self._sizes(info, 1)
        clip = self._map(state.shapes[_key(sizes)], sizes, info)
        # Noise in all values together as flat clipping would have it, whose threshold that makes.
        return {"clip-bound": float(clip.spread().norm()) / len(clip.centre) ** 0.5}

    def _sizes(self, info: RunInfo, round: int) -> tuple[int, ...]:
        return info.blocks(round) if self.blocks else (info.dimension(round),)

    def _fresh(self, sizes: tuple[int, ...]) -> Shape:
        made = []
        for number, size in enumerate(sizes):
            rank = min(self.rank, size)
            directions = torch.eye(rank, size, dtype=torch.float64)
            if not self.rest:
                draws = torch.randn(size, rank, generator=torch_generator(self.seed, "geoclip", number))
                directions = torch.linalg.qr(draws.double()).Q.T.contiguous()
            zeros = torch.zeros(rank + 1, dtype=torch.float64)
            made.append(Leading(directions, zeros[:rank], zeros))
        return Shape(torch.zeros(sum(sizes), dtype=torch.float64), tuple(made))

    def _turned(self, block: Leading, change: Tensor, noise: Tensor) -> Leading:
        """Streaming PCA with one more release, whose noise has these variances along the old directions and beside."""
        old, new, rank = self.history, 1 - self.history, len(block.values)
        block = replace(block, noise=old * block.noise + new * noise)
        change_square = float(change.square().sum())
        least = 1e-12 * change_square + 1e-300  # a direction that has seen nothing yet stays one
        roots = (old * block.values).clamp_min(least).sqrt()
        rows = torch.cat([roots[:, None] * block.directions, new**0.5 * change[None]])
        _, values, found = torch.linalg.svd(rows, full_matrices=False)
        # Made orthonormal once more: rows of weight zero may depend on each other.
        directions = torch.linalg.qr(found[:rank].T).Q.T.contiguous()
        total = old * block.total + new * change_square
        return Leading(directions, values[:rank].square(), block.noise_along(directions), total)

    def _eigenvalues(self, block: Leading, prior: float, expected: float) -> Float64[Tensor, " k_and_1"]:
        """Of single rows: along the directions, and the one that all others share."""
        rank, size = block.directions.shape
        along, beside = block.noise[:-1], float(block.noise[-1])
        rounds = (1 + self.history) / (1 - self.history)
        edge = (1 + ((size - rank) / rounds) ** 0.5) ** 2 - 1
        own = block.values - along - edge * beside
        left = block.total - float(block.values.sum()) - (size - rank) * beside
        error = beside * (2 * (size - rank) / rounds) ** 0.5  # of what is left, if all of it is noise
        rest = own.new_tensor([max(error, left) / max(1, size - rank)])
        # Leading directions that do not stand out from the others are not set apart from them.
        own = own.maximum(rest) if rank < size and self.rest else own
        return prior + expected * torch.cat([own.clamp_min(0.0), rest])

    def _map(self, shape: Shape, sizes: tuple[int, ...], info: RunInfo) -> GeoClip:
        expected, unit = info.sampling.expected_units, self.clip_norm**2 / len(shape.centre)
        prior, least, most = self.history**shape.rounds * unit, self.lowest**2 * unit, self.highest**2 * unit
        found = [self._eigenvalues(block, prior, expected).clamp(least, most) for block in shape.blocks]
        ranks = tuple(len(block.values) for block in shape.blocks)
        counts = torch.cat(
            [
                torch.tensor([1.0] * rank + [float(size - rank) if self.rest else 0.0], dtype=torch.float64)
                for rank, size in zip(ranks, sizes, strict=True)
            ]
        )
        values = torch.cat(found)
        values *= unit * counts.sum() / (counts @ values)
        weights = torch.split(whitening_weights(values, counts).float(), list(map(len, found)))
        return GeoClip(
            shape.centre.float(),
            torch.cat([block.directions.flatten() for block in shape.blocks]).float(),
            torch.cat([part[:-1] for part in weights]),
            torch.cat([part[-1:] for part in weights]) if self.rest else torch.zeros(len(sizes)),
            sizes,
            ranks,
        )


def _key(sizes: tuple[int, ...]) -> str:
    return "+".join(map(str, sizes))
