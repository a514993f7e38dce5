"""DP-LAC: a first threshold from one private histogram, then C follows the validation loss down.

    C_0 = mode of the noisy histogram of votes,   C_1 = C_0,   C_t = min(1, v_{t-1} / v_{t-2}) C_{t-1}   for t >= 2

v_t is the loss of the model after round t on the server's public validation set. In the initial round every
participating client trains locally, takes {1/4, 1/2, 1} of its own update norm as candidate thresholds, simulates for
each the clipping and the noise its update would meet, and votes for the candidate whose local loss stays closest to
the loss without clipping and noise (``client/votes.py``). Votes live on the public grid 2^(j/2), j = -12..12, because
candidates are each client's own.

Reference: Mehmood, Xu, Saravanan, van Dalen, Ozay, "DP-LAC" (arXiv 2605.10272); grid and simulated noise scale are
ours, the paper does not give them (its reported thresholds 8.0, 5.7 and 1.5 lie on or near such a grid).
Guarantee: the histogram is one Poisson-sampled Gaussian of sensitivity 1 (charged), every round one of multiplier z;
the rest is post-processing of releases and of public data. It is NOT post-processing if the validation set is the
clients' own: then use a method that pays for its loss.
Deviations, all guards of public numbers: one ratio is at least 1/2; a loss that is not finite or not positive leaves C
alone; C never falls below ``floor`` times C_0. ``smooth`` replaces the rule by C_t = C_0 min_{s<t} (e_s / e_0) with e
the exponential moving average (0.9) of v, which does not ratchet down on noise in v: the paper's rule, fed a loss with
2 % of relative noise that falls by e, ends at 0.06 C_0 where 0.37 C_0 is meant.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard

from privacy import checks
from privacy.clipping import FlatClip, NoUpdate
from privacy.events import Component, Poisson
from privacy.mechanism import Plan, Release
from privacy.queries import OneHotVote
from strategies.controller import InitialRelease, PublicSignals, Setting, constant_profile

GRID = tuple(2.0 ** (j / 2) for j in range(-12, 13))
SMOOTHING = 0.9
LEAST_RATIO = 0.5


@dataclass(frozen=True)
class LacState:
    """Threshold of the next round, the first one, and what is remembered of the validation loss."""

    setting: Setting
    bound: float
    first_bound: float
    loss: float
    first_loss: float


@dataclass(frozen=True)
class DpLac:
    """DP-LAC.

    Attributes:
        clip_norm: C_0 where > 0: the histogram is then neither taken nor paid for; 0 takes it.
        histogram_noise: std of the noise on each count of the histogram, > 0.
        histogram_rate: rate at which clients join the initial round; 0 takes the run's sampling rate.
        smooth: use the running minimum of a smoothed loss instead of the paper's rule.
        floor: C never falls below this share of C_0.
    """

    reads_validation: ClassVar[bool] = True
    clip_norm: float = 0.0
    histogram_noise: float = 2.0
    histogram_rate: float = 0.0
    smooth: bool = False
    floor: float = 1 / 64

    def __post_init__(self) -> None:
        checks.non_negative(clip_norm=self.clip_norm)
        checks.positive(histogram_noise=self.histogram_noise)
        checks.probability(floor=self.floor)
        checks.fraction(histogram_rate=self.histogram_rate)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        if self.clip_norm > 0:
            return None
        rate = self.histogram_rate or sampling.rate
        component = Component("vote", 1.0, self.histogram_noise, len(GRID))
        return InitialRelease(replace(sampling, rate=rate), (component,))

    def profile(self, rounds: int) -> tuple[float, ...]:
        return constant_profile(rounds)

    def init(self, setting: Setting, public: PublicSignals) -> LacState:
        loss = public.validation_loss if _usable(public.validation_loss) else math.nan
        return LacState(setting, self.clip_norm, self.clip_norm, loss, loss)

    def plan(self, state: LacState, round: int) -> Plan:
        noise_multiplier = state.setting.noise_multiplier(round)
        if round > 0:
            return Plan(FlatClip(state.bound, state.setting.dimension(round)), noise_multiplier)
        vote = OneHotVote(
            GRID,
            self.histogram_noise,
            simulated_noise_std_per_bound=noise_multiplier / state.setting.sampling.expected_units,
        )
        return Plan(NoUpdate(), noise_multiplier, (vote,))

    def update(self, state: LacState, released: Release, public: PublicSignals) -> LacState:
        if public.round == 0:
            bound = GRID[int(released.answers[0].argmax())]
            return replace(state, bound=bound, first_bound=bound)
        if public.validation_loss is None:
            raise ValueError("dp-lac needs the validation loss of every round; set evaluation.every = 1")
        loss = public.validation_loss
        if not _usable(loss):
            return state
        if math.isnan(state.loss):  # the first loss worth remembering
            return replace(state, loss=loss, first_loss=loss)
        return self._smooth(state, loss) if self.smooth else self._ratio(state, loss)

    def _ratio(self, state: LacState, loss: float) -> LacState:
        ratio = min(1.0, max(LEAST_RATIO, loss / state.loss))
        return replace(state, bound=max(ratio * state.bound, self.floor * state.first_bound), loss=loss)

    def _smooth(self, state: LacState, loss: float) -> LacState:
        average = SMOOTHING * state.loss + (1 - SMOOTHING) * loss
        share = max(average / state.first_loss, self.floor)
        return replace(state, bound=min(state.bound, state.first_bound * share), loss=average)

    def step_scale(self, state: LacState) -> float:
        return 1.0

    def released_values(self, state: LacState) -> dict[str, float]:
        return {"clip-bound": state.bound}


def _usable(loss: float | None) -> TypeGuard[float]:
    """Whether a ratio of losses may be taken with it."""
    return loss is not None and math.isfinite(loss) and loss > 0
