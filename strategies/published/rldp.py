r"""RLDP with the state and the reward of the paper. NOT PRIVATE: it reads raw gradients; for comparison only.

    n_{s,i} = || (grad A_i, grad B_i) of record s ||
    state of the run: quartiles, largest, std/mean, skewness and excess kurtosis of the n_{s,i}, utility U = -log
        perplexity of the batches of the interval, loss of the last one, share of the budget that is spent
    state of pair i: mean and variance over its values of E_s[g^2] (Fisher moments), log(C_i / C_i0)
    reward = max(log(1 + dU / (share of the budget spent on it)), -5)

All but the last of each are z-scores over the run so far; the numbers of an interval's steps are averaged.

Reference: Khadangi et al., "RLDP" (arXiv 2507.22565v1). Guarantee: none. Thresholds and noise are functions of raw
norms, losses and moments of the private batches; the paper's corollary that they cost nothing covers released values
only. It runs at one site with ``privacy.non-private = true`` only,

    strategy.controller = "strategies.published.rldp:PublishedRldp"

and stamps ledger, privacy.json, the adapter's card and every record of metrics.
Deviations: the release is that of ``rl`` without its bits, with the joint noise of ``PerAdapterClip``, so that both
forms differ by what they see; the paper's sigma C_i on each of n blocks, sqrt(n) too little (docs/results/rldp.md has
what it costs), is had with ``blocks = n``, split over the blocks as ``PerAdapterClip`` does. One policy for all pairs,
and numbers not known to us, as in the controller ``rl``. As in the paper the agent starts from nothing and
learns during the run.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privacy import checks
from privacy.clipping.norms import PerAdapterClip
from privacy.clipping.units import Units
from privacy.contribution import Plan
from privacy.mechanism import Release
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.rl import sac, spending
from strategies.controllers.rl.controller import Rl
from strategies.controllers.rl.decisions import RlState, begin, decide
from strategies.published.raw_rows import RawRule

OF_PAIR, OF_RUN = 2, 9
"""Statistics of a batch: of one pair, of all."""

_UTILITY, _LOSS = 7, 8
_LEAST_REWARD = -5.0


@dataclass(frozen=True)
class RawState(RlState):
    """The controller's state between two steps; it holds functions of raw gradients, so nothing that holds it is
    private.

    Attributes:
        round: just done.
        steps: with a record in the batch, since the last action.
        sums: over these steps, the statistics of every pair and then of the run.
        utility_before: at the last action.
        seen, mean, deviation: how many observations there were, their means and sums of squared deviations.
    """

    round: int
    steps: int
    sums: Tensor
    utility_before: float
    seen: int
    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class PublishedRldp(RawRule, Rl):
    """The rule of the RLDP paper; a controller that is shown what no controller may see (:meth:`see`).

    Attributes:
        blocks: n, the number of adapters, for the paper's noise of sigma C_i on each; 0 for the joint noise.
    """

    unsound: ClassVar[str] = "RLDP's published state reads raw norms, losses and Fisher moments"
    reads_validation: ClassVar[bool] = False
    policy: str = "scratch"
    blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer_at_least(0, blocks=self.blocks)

    def _check_policy(self) -> None:
        checks.one_of(("scratch",), policy=self.policy)  # the shipped policy has learnt to read another state

    @property
    def noise_share(self) -> float:
        """The share of the calibrated noise multiplier that n blocks with noise sigma C_i each have together."""
        return 1.0 / math.sqrt(self.blocks) if self.blocks else 1.0

    def init(self, info: RunInfo, public: PublicSignals) -> RawState:
        adapters = len(info.blocks(1))
        if self.blocks not in (0, adapters):
            raise ValueError(f"blocks must be 0 or the number of adapters, {adapters}, got {self.blocks}")
        if self.blocks and info.order is not None:
            raise ValueError('blocks, the noise of the paper, needs privacy.mode = "floor": a filter would refuse it')
        weights = sac.fresh_weights(self.seed, OF_PAIR + 1, OF_RUN + 1)
        agent = sac.new_agent(weights, len(info.blocks(1)), info.rounds // self._interval(info))
        state, size = begin(info, agent, math.nan), len(info.blocks(1)) * OF_PAIR + OF_RUN
        nothing = torch.zeros(size, dtype=torch.float64)
        inherited = {field.name: getattr(state, field.name) for field in fields(state)}
        return RawState(
            **inherited,
            round=0,
            steps=0,
            sums=nothing,
            utility_before=math.nan,
            seen=0,
            mean=nothing,
            deviation=nothing,
        )

    def plan(self, state: RlState, info: RunInfo, round: int) -> Plan:
        sizes = info.blocks(round)
        z = spending.multiplier(info, state.spent, round, state.offset, self.noise_range)
        start = self.clip_norm / math.sqrt(len(sizes))
        bounds = tuple(start * math.exp(scale) for scale in state.scales)
        return Plan(PerAdapterClip(bounds, sizes), z * self.noise_share)

    def update(self, state: RlState, info: RunInfo, released: Release, public: PublicSignals) -> RawState:
        assert isinstance(state, RawState)
        spent = spending.after(info, state.spent, released.plan, public.rho_spent)
        return replace(state, spent=spent, round=public.round)

    def see(self, state: RawState, info: RunInfo, batch: list[Units]) -> RawState:
        """The state after a step on this batch."""
        if batch:
            found = statistics(batch, info.blocks(state.round))
            state = replace(state, steps=state.steps + 1, sums=state.sums + found)
        if state.steps == 0 or not self._acts_after(state.round, info):
            return state
        average = state.sums / state.steps
        if batch:
            average[_LOSS - OF_RUN] = found[_LOSS - OF_RUN]
        utility = float(average[_UTILITY - OF_RUN])
        share = (state.spent - state.spent_before) / spending.budget(info)
        earned = 0.0 if math.isnan(state.utility_before) else reward(utility - state.utility_before, share)
        state = _remembered(replace(state, steps=0, sums=torch.zeros_like(state.sums), utility_before=utility), average)
        local, whole = self._observation(state, info, average)
        return decide(state, info, self.acting, state.round, local, whole, earned)

    def _observation(
        self, state: RawState, info: RunInfo, average: Tensor
    ) -> tuple[Float[Tensor, "n l"], Float[Tensor, " g"]]:
        """z-scores, with the positions of the thresholds and the share of the budget that is spent."""
        spread = (state.deviation / max(state.seen - 1, 1)).sqrt()
        scores = ((average - state.mean) / spread.clamp_min(1e-12)).clamp(-5.0, 5.0).float()
        places = torch.tensor(state.scales)[:, None] / math.log(self.reach)
        local = torch.cat([scores[:-OF_RUN].view(-1, OF_PAIR), places], dim=1)
        spent = torch.tensor([state.spent / spending.budget(info)])
        return local, torch.cat([scores[-OF_RUN:], spent])


def statistics(batch: list[Units], sizes: tuple[int, ...]) -> Float[Tensor, " size"]:
    """Raw numbers of a batch of at least one record: Fisher moments pair by pair, then those of all; float64."""
    rows = torch.cat([units.rows for units in batch]).double()
    losses = torch.cat([units.losses for units in batch if units.losses is not None]).double()
    blocks = torch.split(rows, list(sizes), dim=1)
    norms = torch.stack([block.norm(dim=1) for block in blocks]).flatten()
    fisher = [block.square().mean(dim=0) for block in blocks]
    quartiles = torch.quantile(norms, torch.tensor([0.25, 0.5, 0.75], dtype=norms.dtype))
    mean, deviation = norms.mean(), norms.std(correction=0)
    scores = (norms - mean) / deviation.clamp_min(1e-300)
    shape = [deviation / mean.clamp_min(1e-300), scores.pow(3).mean(), scores.pow(4).mean() - 3.0]
    of_run = torch.stack([*quartiles, norms.max(), *shape, -losses.mean(), losses.mean()])
    return torch.cat([torch.stack([torch.stack([f.mean(), f.var(correction=0)]) for f in fisher]).flatten(), of_run])


def reward(gain: float, share: float) -> float:
    """The reward of an interval whose utility rose by `gain` while `share` of the budget was spent."""
    return max(math.log1p(max(gain / (share + 1e-6), -1.0 + 1e-3)), _LEAST_REWARD)


def _remembered(state: RawState, values: Tensor) -> RawState:
    """Welford's running mean and sum of squared deviations."""
    seen, away = state.seen + 1, values - state.mean
    mean = state.mean + away / seen
    return replace(state, seen=seen, mean=mean, deviation=state.deviation + away * (values - mean))
