r"""DP-Adam-AC as its paper publishes it, over clients. NOT PRIVATE: it counts their norms; for comparison only.

    U: norms of the last H updates        rho: share of the cohort with a norm above C
    C <- clip(P_{100 (1 - rho*)}(U), C_min, C_max);    gamma <- up gamma if rho < rho_low, down gamma if rho > rho_high

A client is the paper's micro-batch, with m = 1, so that what remains of its rule is what it reads.

Reference: R. Yang, "DP-Adam-AC", 2025, Algorithm 1. Guarantee: none. C and gamma are functions of exact counts,
readable from the noise and the steps. It runs with ``privacy.non-private = true`` only,

    strategy.controller = "strategies.published.client_adam_ac:ClientAdamAc"

and stamps ledger, privacy.json, the adapter's card and every record of metrics. The noise of the update is what our
accountant calibrates for ``privacy.epsilon`` as if nothing else were read, and so that of ``percentile`` or more.
Deviations: norms are read on a grid of 1/16 octave, interpolated; U is the fewest last rounds with H norms.
Limits of gamma, rho_low, rho_high and H are ours, the paper's are not known.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.queries import NormHistogram
from strategies.controllers import released_norms
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.percentile import Percentile, PercentileState
from strategies.published.raw_rows import ExactCounts


@dataclass(frozen=True)
class ClientAdamAcState(PercentileState):
    """The state of ``percentile``, and the exact histogram of every round that is still in the buffer."""

    buffer: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ClientAdamAc(ExactCounts, Percentile):
    """The rule of the DP-Adam-AC paper over clients.

    Attributes:
        buffer: H, how many norms are remembered at least, once there were so many.
        lowest, highest: limits of C.
    """

    unsound: ClassVar[str] = "DP-Adam-AC's published rule reads the norms of the clients' updates"
    source: str = "histogram"
    buffer: int = 512
    lowest: float = 0.1
    highest: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(("histogram",), source=self.source)
        checks.integer_at_least(1, buffer=self.buffer)

    def init(self, info: RunInfo, public: PublicSignals) -> ClientAdamAcState:
        return ClientAdamAcState(self.clip_norm)

    def plan(self, state: PercentileState, info: RunInfo, round: int) -> Plan:
        clip = FlatClip(state.bound, info.dimension(round))
        return Plan(clip, info.noise_multiplier(round), (NormHistogram(self._edges(), self.noise_on_counts),))

    def update(
        self, state: PercentileState, info: RunInfo, released: Release, public: PublicSignals
    ) -> ClientAdamAcState:
        assert isinstance(state, ClientAdamAcState)
        counts = tuple(max(0, round(count)) for count in released.answer("norm-histogram").tolist())
        if not sum(counts):
            return state
        buffer = _last((*state.buffer, counts), self.buffer)
        norms = _parts([sum(column) for column in zip(*buffer, strict=True)])
        wanted = released_norms.quantile(self._edges(), norms, 1.0 - self.clip_rate)
        rate = released_norms.share_above(self._edges(), _parts(counts), state.bound)
        bound = min(self.highest, max(self.lowest, wanted))
        scale = self.nudge_scale(state.scale, rate)
        return replace(state, bound=bound, clip_rate=rate, scale=scale, buffer=buffer)

    def _edges(self) -> tuple[float, ...]:
        coarse = released_norms.norm_edges(self.lowest, self.highest)
        return (*(edge * 2.0 ** (part / 16) for edge in coarse[:-1] for part in range(8)), coarse[-1])


def _last(rounds: tuple[tuple[int, ...], ...], least: int) -> tuple[tuple[int, ...], ...]:
    """The fewest last rounds that hold ``least`` norms; all of them until they do."""
    held = 0
    for place in range(len(rounds) - 1, -1, -1):
        held += sum(rounds[place])
        if held >= least:
            return rounds[place:]
    return rounds


def _parts(counts: Iterable[int]) -> tuple[float, ...]:
    counted = tuple(counts)
    return tuple(count / sum(counted) for count in counted)
