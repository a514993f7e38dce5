r"""DP-Adam-AC as its paper publishes it. NOT PRIVATE: it reads raw norms and clips micro-batches; for comparison only.

    X_i: micro-batches of m records          n_i = || sum_{x in X_i} grad l(x) ||
    S = sum_i min(1, C m / n_i) sum_{x in X_i} grad l(x) + N(0, (sigma C)^2 I),       g = S / B
    rho = share of micro-batches with n_i > C m;  the last H of n_i / m go into a buffer U
    C <- clip(P_{100 (1 - rho*)}(U), C_min, C_max);    gamma <- up gamma if rho < rho_low, down gamma if rho > rho_high

Reference: R. Yang, "DP-Adam-AC", 2025, Algorithm 1. Guarantee: none. One record can turn the gradient of its whole
micro-batch, so the noise is for a sensitivity up to 2 m times too small, and C and gamma are functions of raw norms,
readable from the noise and the steps. It runs with ``privacy.non-private = true`` only,

    strategy.controller = "strategies.published.adam_ac:PublishedAdamAc"

and stamps ledger, privacy.json, the adapter's card and every record of metrics. sigma is what our accountant calibrates
for ``privacy.epsilon`` as if every record were clipped by itself, so that runs of both forms have the same sigma. The
sound form is the controller ``percentile``.
Deviations: Poisson batches for the paper's one shuffled pass; a last micro-batch with fewer records is clipped to C m.
Limits of gamma, rho_low, rho_high and H are ours, the paper's are not known.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.contribution import Plan
from strategies.controllers.controller import Controller, PublicSignals, RunInfo
from strategies.published.raw_rows import RawRule


@dataclass(frozen=True)
class AdamAcState:
    """Threshold, factor on the step, and the buffer of raw norms per record."""

    bound: float
    scale: float = 1.0
    history: tuple[float, ...] = ()


@dataclass(frozen=True)
class PublishedAdamAc(RawRule, Controller[AdamAcState]):
    """The rule of the DP-Adam-AC paper; a controller that is shown what no controller may see (:meth:`see`)."""

    unsound: ClassVar[str] = "DP-Adam-AC's published rule reads raw norms and clips micro-batches, not records"
    clip_norm: float = 3.0
    micro_batch: int = 4
    clip_rate: float = 0.2
    buffer: int = 512
    lowest: float = 0.1
    highest: float = 10.0
    low_rate: float = 0.1
    high_rate: float = 0.3
    up: float = 1.01
    down: float = 0.995
    least_scale: float = 0.5
    most_scale: float = 2.0

    def __post_init__(self) -> None:
        checks.integer_at_least(1, micro_batch=self.micro_batch, buffer=self.buffer)
        checks.positive(clip_norm=self.clip_norm, lowest=self.lowest, highest=self.highest)
        checks.within(0.001, 0.999, clip_rate=self.clip_rate)

    @property
    def noise_share(self) -> float:
        """The share of the calibrated noise multiplier that the sum of clipped micro-batches really gets."""
        return 1.0 / self.micro_batch

    def init(self, info: RunInfo, public: PublicSignals) -> AdamAcState:
        return AdamAcState(self.clip_norm)

    def plan(self, state: AdamAcState, info: RunInfo, round: int) -> Plan:
        clip = FlatClip(state.bound * self.micro_batch, info.dimension(round))
        return Plan(clip, info.noise_multiplier(round) * self.noise_share)

    def regroup_rows(self, chunks: list[Units]) -> list[Units]:
        """Sums over micro-batches of the rows of a batch, in the order in which they came."""
        if not chunks:
            return []
        rows = torch.cat([chunk.rows for chunk in chunks])
        return [Units(torch.stack([part.sum(dim=0) for part in torch.split(rows, self.micro_batch)]))]

    def see(self, state: AdamAcState, info: RunInfo, batch: list[Units]) -> AdamAcState:
        """The state after a step with these micro-batches."""
        each = [norm / self.micro_batch for units in batch for norm in units.norms.tolist()]
        if not each:
            return state
        rate = sum(norm > state.bound for norm in each) / len(each)
        history = (*state.history, *each)[-self.buffer :]
        wanted = float(np.quantile(np.array(history), 1.0 - self.clip_rate))
        scale = state.scale
        if rate < self.low_rate:
            scale = min(self.most_scale, self.up * scale)
        elif rate > self.high_rate:
            scale = max(self.least_scale, self.down * scale)
        bound = min(self.highest, max(self.lowest, wanted))
        return replace(state, bound=bound, scale=scale, history=history)

    def step_scale(self, state: AdamAcState) -> float:
        return state.scale

    def released_values(self, state: AdamAcState, info: RunInfo) -> dict[str, float]:
        return {"clip-bound": state.bound, "step-scale": state.scale}
