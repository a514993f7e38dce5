r"""Canary units inside one real run: the game of ``privacy/audit/one_run.py``, played on what the run releases.

The last units of the population are canaries. A fair coin of each, known to the auditor alone, says whether it is in:
one that is in brings, whenever the run's own sampling draws it, a row of its own random direction, longer than any
threshold; one that is out brings nothing. Directions are public. The attacker sees every release and guesses the coins.

Score. In the space where a release is clipped and noised, a canary that was drawn moves the sum by its encoded row e,
|e| <= 1, under noise of standard deviation z. With g_t = <e, release_t> / (|e| z) and mu_t = |e| / z the attacker's
log-likelihood ratio of "in" against "out", who was drawn being unknown, is

    sum_t log(1 - q + q exp(mu_t g_t - mu_t^2 / 2)),

the most powerful score by Neyman and Pearson where the other units look like noise along e.

Beside the bound on epsilon stand three estimates of what the releases really are, each with a limit at level 1 - 1e-3:

- noise: root mean square of g_t of the canaries that are out, 1 if the noise is what the plan says, more where other
  units are seen; squares of independent normals add up to chi-square, so less noise than planned shows at once;
- presence: how much more canaries that are in move the releases than those that are out, over q mu_t: 1 if they join
  with the charged probability and bring one clipped row.
- repeated: correlation of g_t and g_{t-1} of the canaries that are out, 0 for fresh noise, 1 for noise used again. What
  other units bring round after round adds a little, so it is judged against 1/2.

They are sharp where the bound is blunt, and refute no epsilon by themselves: they refute that the releases are those
that the ledger was charged for. ``one_shot`` is an estimate of epsilon from the last model (one_shot.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from scipy.stats import chi2, norm
from torch import Tensor

from privacy import checks
from privacy.audit.one_run import epsilon_lower_one_run, guess
from privacy.audit.one_shot import OneShotEstimate, canary_updates, one_shot_estimate
from privacy.mechanism import Release

Floats = NDArray[np.float64]

LENGTH = 1e4
"""L2 norm of a canary's row: beyond every sensible threshold, so that it is clipped."""

SHARES = (0.5, 0.25, 0.1)
"""Shares of the canaries that are guessed "in", and as many "out"; each gets its part of the level."""

SECRET_BYTES = 32
CHECK_ALPHA = 1e-3

_AT_ONCE = 16  # canaries, whose float64 rows are in memory together


@dataclass(frozen=True)
class CanaryUnits:
    """The last units of a population.

    Attributes:
        first: number of the first canary among the units.
        count: canaries.
        secret: decides the coins; whoever has it knows who is in.
        seed: of the public directions.
    """

    first: int
    count: int
    secret: bytes
    seed: int

    def __post_init__(self) -> None:
        checks.integer_at_least(0, first=self.first)
        checks.integer_at_least(1, canaries=self.count)
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"secret must have {SECRET_BYTES} bytes, got {len(self.secret)}")

    @property
    def included(self) -> NDArray[np.bool_]:
        """The coins: ``[count]`` bool."""
        bits = hashlib.shake_256(b"canary coins" + self.secret).digest(-(-self.count // 8))
        return np.unpackbits(np.frombuffer(bits, dtype=np.uint8))[: self.count].astype(np.bool_)

    def split(self, units: Int64[np.ndarray, " n"]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Separate these units into those that are no canaries and the numbers of those canaries that are in."""
        honest = (units < self.first) | (units >= self.first + self.count)
        canaries = units[~honest] - self.first
        return honest, canaries[self.included[canaries]]

    def rows(self, canaries: Sequence[int] | NDArray[np.int64], dim: int) -> Float[Tensor, "n dim"]:
        """Rows of these canaries: float32, of norm LENGTH."""
        made = [canary_updates(1, dim, LENGTH, self.seed, start=int(number)) for number in canaries]
        return torch.from_numpy(np.concatenate(made)) if made else torch.zeros(0, dim)


@dataclass(frozen=True)
class Observation:
    """Everything that one release shows of every canary; post-processing of the release and of public directions.

    Attributes:
        rate: q, with which the release's cohort was drawn.
        noise_multiplier: z of the update.
        dim: of encoded space.
        lengths: |e| of every canary; a clip map may shorten it below 1.
        scores: g_t of every canary.
    """

    round: int
    rate: float
    noise_multiplier: float
    dim: int
    lengths: tuple[float, ...]
    scores: tuple[float, ...]


def observe(canaries: CanaryUnits, release: Release, round: int, population: int) -> Observation | None:
    """Observe every canary in a fresh release; None where it holds no update."""
    clip, z = release.plan.clip, release.plan.noise_multiplier
    if not clip.dim or release.encoded is None:
        return None
    lengths, scores = np.zeros(canaries.count), np.zeros(canaries.count)
    for low in range(0, canaries.count, _AT_ONCE):
        some = range(low, min(low + _AT_ONCE, canaries.count))
        encoded = clip.encode(canaries.rows(list(some), clip.params))
        norms = encoded.norm(dim=1)
        lengths[some.start : some.stop] = norms.clamp_max(1.0).numpy()  # what is longer is not what was charged
        scores[some.start : some.stop] = ((encoded @ release.encoded) / (norms.clamp_min(1e-12) * z)).numpy()
    rate = release.expected_units / population
    return Observation(round, rate, z, clip.dim, tuple(map(float, lengths)), tuple(map(float, scores)))


@dataclass(frozen=True)
class Limited:
    """An estimate with one-sided limits at level 1 - CHECK_ALPHA."""

    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True)
class CanaryAudit:
    """Outcome of the game, and what the releases look like.

    Attributes:
        scores: log-likelihood ratio of every canary.
        included: their coins.
        guesses, correct: at the share that gave the bound.
        epsilon_lower: for one unit added or removed, at ``delta``, any mechanism.
        ceiling: what it would be if every guess were right.
        noise, presence, repeated, one_shot: see the module's text; the last is None for fewer than two canaries that
            are in, or out.
    """

    scores: tuple[float, ...]
    included: tuple[bool, ...]
    guesses: int
    correct: int
    delta: float
    alpha: float
    epsilon_lower: float
    ceiling: float
    noise: Limited
    presence: Limited
    repeated: Limited
    one_shot: OneShotEstimate | None

    @property
    def wrong(self) -> list[str]:
        """Sentences on what the releases cannot be if the ledger was charged for them."""
        found = []
        if self.noise.upper < 1:
            found.append(f"the noise in the releases is at most {self.noise.upper:.3f} times what was charged")
        if self.presence.lower > 1:
            found.append(f"one unit moves the releases at least {self.presence.lower:.2f} times as far as was charged")
        if self.repeated.lower > 0.5:
            found.append(f"successive releases share noise: its correlation is at least {self.repeated.lower:.2f}")
        return found


def log_likelihood_ratios(observations: Sequence[Observation]) -> Floats:
    """The attacker's score of every canary: ``[count]``."""
    checks.not_empty(observations=observations)
    total = np.zeros(len(observations[0].scores))
    for seen in observations:
        mu = np.array(seen.lengths) / seen.noise_multiplier
        shift = mu * np.array(seen.scores) - mu**2 / 2
        rest = -np.inf if seen.rate >= 1 else np.log1p(-seen.rate)
        total += np.logaddexp(rest, np.log(seen.rate) + shift)
    return total


def audit_canaries(
    canaries: CanaryUnits, observations: Sequence[Observation], *, delta: float, alpha: float = 0.05
) -> CanaryAudit:
    """Guess the coins by the log-likelihood ratio, and bound epsilon; estimate noise and presence.

    Raises:
        ValueError: no release was observed, or all coins fell alike.
    """
    scores, coins = log_likelihood_ratios(observations), canaries.included
    if coins.all() or not coins.any():
        raise ValueError(f"all {canaries.count} canaries have the same coin; plant more of them")

    def played(share: float) -> tuple[float, float, int, int]:
        each = int(share * len(coins))
        if not each:
            return 0.0, 0.0, 0, 0
        marks = guess(scores, each, each)
        correct, made = int(((marks == 1) & coins).sum() + ((marks == -1) & ~coins).sum()), 2 * each
        level = alpha / len(SHARES)
        lower, ceiling = (
            epsilon_lower_one_run(right, made, len(coins), delta=delta, alpha=level) for right in (correct, made)
        )
        return lower, ceiling, made, correct

    games = [played(share) for share in SHARES]
    lower, _, made, correct = max(games)
    ceiling = max(game[1] for game in games)
    return CanaryAudit(
        tuple(map(float, scores)),
        tuple(map(bool, coins)),
        made,
        correct,
        delta,
        alpha,
        lower,
        ceiling,
        _noise(observations, coins),
        _presence(observations, coins),
        _repeated(observations, coins),
        _one_shot(observations, coins, delta),
    )


def _noise(observations: Sequence[Observation], coins: NDArray[np.bool_]) -> Limited:
    outside = np.array([np.array(seen.scores)[~coins] for seen in observations])
    # In few dimensions many directions depend on one another, and so do their squares.
    terms = sum(min(outside.shape[1], seen.dim) for seen in observations)
    total = float((outside**2).mean()) * terms
    low, high = (total / chi2.ppf(level, terms) for level in (1 - CHECK_ALPHA, CHECK_ALPHA))
    return Limited(float(np.sqrt(total / terms)), float(np.sqrt(low)), float(np.sqrt(high)))


def _presence(observations: Sequence[Observation], coins: NDArray[np.bool_]) -> Limited:
    """Mean of sum_t mu_t g_t of those in less those out, over its expectation q sum_t mu_t^2; Welch's error."""
    weights = np.array([np.array(seen.lengths) / seen.noise_multiplier for seen in observations])
    moved = (weights * np.array([seen.scores for seen in observations])).sum(axis=0)
    expected = (weights**2 * np.array([[seen.rate] for seen in observations])).sum(axis=0)
    share = moved / np.maximum(expected, 1e-300)
    inside, outside = share[coins], share[~coins]
    error = np.sqrt(sum(part.var(ddof=1) / len(part) if len(part) > 1 else np.inf for part in (inside, outside)))
    estimate, half = float(inside.mean() - outside.mean()), float(norm.isf(CHECK_ALPHA) * error)
    return Limited(estimate, estimate - half, estimate + half)


def _repeated(observations: Sequence[Observation], coins: NDArray[np.bool_]) -> Limited:
    outside = np.array([np.array(seen.scores)[~coins] for seen in observations])
    if len(outside) < 2:
        return Limited(0.0, -1.0, 1.0)
    before, after = outside[:-1], outside[1:]
    estimate = float((before * after).sum() / np.sqrt((before**2).sum() * (after**2).sum()))
    terms = sum(min(outside.shape[1], seen.dim) for seen in observations[1:])
    half = float(norm.isf(CHECK_ALPHA) / np.sqrt(terms))
    return Limited(estimate, estimate - half, estimate + half)


def _one_shot(observations: Sequence[Observation], coins: NDArray[np.bool_], delta: float) -> OneShotEstimate | None:
    """From the inner product of every canary's direction with the sum of the releases."""
    if min(coins.sum(), (~coins).sum()) < 2:
        return None
    total = np.sum([np.array(seen.scores) * seen.noise_multiplier for seen in observations], axis=0)
    return one_shot_estimate(total[coins], total[~coins], delta)
