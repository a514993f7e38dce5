"""DP-LAC: a first threshold from one private histogram, then C follows the validation loss down.

    C_0 = mode of the noisy histogram of votes,   C_1 = C_0,   C_t = min(1, v_{t-1} / v_{t-2}) C_{t-1}   for t >= 2

v_t is the loss of the model after round t on the server's public validation set. In the initial round every
participating client trains locally, takes {1/4, 1/2, 1} of its own update norm as candidate thresholds, simulates for
each the clipping and the noise its update would meet, and votes for the candidate whose local loss stays closest to
the loss without clipping and noise (``client/votes.py``). Votes live on the public grid 2^(j/2), j = -12..12, because
candidates are each client's own.

Reference: Mehmood, Xu, Saravanan, van Dalen, Ozay, "DP-LAC" (arXiv 2605.10272), by a summary of third parties that was
not checked against it. Grid and simulated noise scale are ours, the summary does not give them (the reported thresholds
8.0, 5.7 and 1.5 lie on or near such a grid). The noisy counts are ``vote-1`` to ``vote-25`` in ``metrics.jsonl``.
Guarantee: the histogram is one Poisson-sampled Gaussian of sensitivity 1 (charged), every round one of multiplier z;
the rest is post-processing of releases and of public data. It is NOT post-processing if the validation set is the
clients' own, unless held-out clients answer with noise that is paid for (``evaluation.data = "private"``). Under that
noise every dip of the estimate lowers C, and no rise brings it back: 5 % of relative noise on a constant loss takes C
to about C_0 / 3 in 40 rounds. ``smooth`` hardly moves.
Deviations, all guards of public numbers: one ratio is at least 1/2; a loss that is not finite or not positive leaves C
alone; C never falls below ``floor`` times C_0. ``smooth`` replaces the rule by C_t = C_0 min_{s<t} (e_s / e_0) with e
the exponential moving average (0.9) of v, which does not ratchet down on noise in v: the paper's rule, fed a loss with
2 % of relative noise that falls by e, ends at 0.06 C_0 where 0.37 C_0 is meant.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from strategies.controllers.controller import Controller, InitialRelease, PublicSignals, RunInfo
from strategies.controllers.loss_following import elect_bound, follow_loss, is_usable, vote_plan, vote_release


@dataclass(frozen=True)
class LacState:
    """Threshold of the next round, the first one, and what is remembered of the validation loss."""

    bound: float
    first_bound: float
    loss: float
    first_loss: float


@dataclass(frozen=True)
class DpLac(Controller[LacState]):
    """The DP-LAC controller of this page.

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
        return vote_release(sampling, self.histogram_rate, self.histogram_noise)

    def init(self, info: RunInfo, public: PublicSignals) -> LacState:
        loss = public.validation_loss if is_usable(public.validation_loss) else math.nan
        return LacState(self.clip_norm, self.clip_norm, loss, loss)

    def plan(self, state: LacState, info: RunInfo, round: int) -> Plan:
        noise_multiplier = info.noise_multiplier(round)
        if round > 0:
            return Plan(FlatClip(state.bound, info.dimension(round)), noise_multiplier)
        return vote_plan(info, self.histogram_noise, noise_multiplier)

    def update(self, state: LacState, info: RunInfo, released: Release, public: PublicSignals) -> LacState:
        if public.round == 0:
            return elect_bound(state, released)
        if public.validation_loss is None:
            raise ValueError("dp-lac needs the validation loss of every round; set evaluation.every = 1")
        return follow_loss(state, public.validation_loss, smooth=self.smooth, floor=self.floor)

    def released_values(self, state: LacState, info: RunInfo) -> dict[str, float]:
        return {"clip-bound": state.bound}
