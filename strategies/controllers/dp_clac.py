"""DP-CLAC: DP-LAC without public data; the loss that C follows is the clients' own, released with noise.

    v_t = (sum_k min(l_k, L_t) + N(0, (z_l L_t)^2)) / m,   L_{t+1} = max(v_t, L_min),   C follows v as in DP-LAC

l_k is client k's mean loss under the broadcast model, before it trains. Loss and update of a round are one joint
Gaussian, 1/z^2 = 1/z_D^2 + 1/z_l^2, of which the loss takes a third: z_D = 1.225 z, z_l = 1.732 z. Until there is a
threshold for losses (in round 1) the loss's share pays for a histogram of losses on the public grid 2^(j/2), j = -8..8,
instead; the upper edge of its fullest bin becomes the first L. C_0 comes from a vote, as in DP-LAC, unless it is given.

Reference: Mehmood, Xu, Saravanan, van Dalen, Ozay, "DP-LAC" (arXiv 2605.10272); equations, grid and the split of 1/z^2
are our reconstruction of its words (it splits epsilon 2/3 : 1/3 instead, which basic composition of two releases from
one sampled cohort does not bound).
Guarantee: each round is one Poisson-sampled Gaussian of multiplier z, loss included, and the vote one of its own; C and
L are post-processing of releases.
Deviations: guards as in DP-LAC, and L is at most 16. As published, v ratchets C down for two reasons that have nothing
to do with learning: v_t is a mean of losses cut at the last mean, so v and L fall although the losses stay what they
are; and a sum divided by the expected cohort m carries the relative fluctuation 1/sqrt(m) of the cohort's size (10 % at
m = 100, where 5 % leave 0.002 of C after 200 rounds). ``centred`` mends both at the same noise on v: losses are cut at
L_{t+1} = 2 v_t and L/2 is taken off each before they are summed (``BoundedMean``); ``smooth`` helps against the noise.
"""

import math
from dataclasses import dataclass, replace

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.mechanism import Release
from privacy.queries import BoundedMean, LossHistogram
from strategies.controllers.controller import Controller, InitialRelease, PublicSignals, RunInfo
from strategies.controllers.loss_following import elect_bound, follow_loss, vote_plan, vote_release

LOSS_EDGES = tuple(2.0 ** (j / 2) for j in range(-8, 9))
MOST_LOSS = 16.0


@dataclass(frozen=True)
class ClacState:
    """The state of DP-LAC with the noisy loss in place of the validation loss, and the threshold L of the next round.

    ``loss_bound`` is 0 until the histogram of losses was released, ``mean_loss`` (v_t) -1 until a loss was.
    """

    bound: float
    first_bound: float
    loss: float
    first_loss: float
    loss_bound: float = 0.0
    mean_loss: float = -1.0


@dataclass(frozen=True)
class DpClac(Controller[ClacState]):
    """The DP-CLAC controller of this page.

    Attributes:
        clip_norm: C_0 where > 0: the vote is then neither taken nor paid for; 0 takes it.
        histogram_noise: std of the noise on each count of the vote, > 0.
        histogram_rate: rate at which clients join the vote; 0 takes the run's sampling rate.
        smooth: use the running minimum of a smoothed loss instead of the paper's rule.
        floor: C never falls below this share of C_0.
        loss_share: share of a round's 1/z^2 that the loss takes, in [0.01, 0.99].
        centred: cut losses at 2 v_t and sum their distances from v_t, in place of the paper's sum of losses cut at v_t.
        least_loss: L_min, in (0, 16].
    """

    clip_norm: float = 0.0
    histogram_noise: float = 2.0
    histogram_rate: float = 0.0
    smooth: bool = False
    floor: float = 1 / 64
    loss_share: float = 1 / 3
    centred: bool = False
    least_loss: float = 0.01

    def __post_init__(self) -> None:
        checks.non_negative(clip_norm=self.clip_norm)
        checks.positive(histogram_noise=self.histogram_noise, least_loss=self.least_loss)
        checks.probability(floor=self.floor)
        checks.fraction(histogram_rate=self.histogram_rate)
        checks.within(0.01, 0.99, loss_share=self.loss_share)
        checks.within(0.0, MOST_LOSS, least_loss=self.least_loss)

    def initial(self, sampling: Poisson) -> InitialRelease | None:
        if self.clip_norm > 0:
            return None
        return vote_release(sampling, self.histogram_rate, self.histogram_noise)

    def init(self, info: RunInfo, public: PublicSignals) -> ClacState:
        return ClacState(self.clip_norm, self.clip_norm, math.nan, math.nan)

    def plan(self, state: ClacState, info: RunInfo, round: int) -> Plan:
        z = info.noise_multiplier(round)
        z_update, z_loss = z / math.sqrt(1.0 - self.loss_share), z / math.sqrt(self.loss_share)
        if round == 0:
            return vote_plan(info, self.histogram_noise, z_update)
        clip = FlatClip(state.bound, info.dimension(round))
        if state.loss_bound > 0:
            return Plan(clip, z_update, (self._mean(state.loss_bound, z_loss),))
        return Plan(clip, z_update, (LossHistogram(LOSS_EDGES, z_loss),))

    def update(self, state: ClacState, info: RunInfo, released: Release, public: PublicSignals) -> ClacState:
        if public.round == 0:
            return elect_bound(state, released)
        if state.loss_bound == 0:
            fullest = int(released.answer("loss-histogram").argmax())
            return replace(state, loss_bound=self._loss_bound((*LOSS_EDGES, MOST_LOSS)[fullest]))
        (query,) = released.plan.queries
        assert isinstance(query, BoundedMean)
        loss = query.mean(released.answer(query.name), released.expected_units)
        state = replace(state, loss_bound=self._loss_bound(loss), mean_loss=max(0.0, loss))
        return follow_loss(state, loss, smooth=self.smooth, floor=self.floor)

    def released_values(self, state: ClacState, info: RunInfo) -> dict[str, float]:
        values = {"clip-bound": state.bound}
        if state.loss_bound > 0:
            values["loss-bound"] = state.loss_bound
        return values if state.mean_loss < 0 else values | {"mean-loss": state.mean_loss}

    def _mean(self, loss_bound: float, z_loss: float) -> BoundedMean:
        sensitivity = loss_bound / 2 if self.centred else loss_bound
        return BoundedMean(loss_bound, z_loss * sensitivity, centred=self.centred)

    def _loss_bound(self, loss: float) -> float:
        return min(MOST_LOSS, max(self.least_loss, 2 * loss if self.centred else loss))
