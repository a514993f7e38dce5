"""RL: a soft actor-critic moves one threshold per adapter and, where the ledger filters, the noise of every round.

Every k rounds the agent acts, a in (-1, 1)^(n+1):

    C_i <- clip(C_i exp(delta_C a_i), C_i0/R, R C_i0),      log z offset <- offset + delta_z a_{n+1}
    reward = clamp(4 (log v_before - log v_now), -10, 10)

with v the loss on the server's public validation set. Its state: noisy clip bits of every adapter and the squared norm
of every released block less that of its noise, both averaged over the interval; the public loss; budget and round.

Reference: the controller of Khadangi et al., "RLDP" (arXiv 2507.22565v1), in the sound form: its state, utility and
reward read raw norms, losses and Fisher moments of private batches, and its blocks carry noise sigma C_i each, which is
sqrt(n) too little. Kept from the paper: log-changes of radii and noise at intervals, SAC with twin Huber critics, fixed
temperature, Polyak targets, first-in first-out buffer, warm-up, reward per budget spent, noise left alone near the end.
Guarantee: each round is one Poisson-sampled Gaussian whose multiplier the ledger checks: the run's own in floor mode,
any that the Rényi filter pays for in filter mode (``privacy.mode = "filter"``). n bits have sensitivity sqrt(n)/2 and
are part of that Gaussian; the n blocks have the optimal joint noise of ``PerAdapterClip``.
Deviations: unit client; one policy for all adapters, whatever their number (``sac.py``); the reward is not divided
by what was spent, as the paper's is (``reward = "gain-per-spent"``), which pays an agent for hoarding budget; R = 100,
for a start may be far off; numbers of the paper that are not known to us. A run of 200 rounds gives 40 transitions,
too few to learn from, so the agent acts by the mode of a policy learnt on synthetic federations
(``simulations/benchmarks/papers/rldp_pretraining.py``, nobody's data) and learns on only if asked.

Cost: 2.6 % more noise on the update for the bits; filter mode needs 6 to 12 % more than floor mode, where only the
thresholds move. On MiniLM's 38 thousand values about 2 ms of the server in a round, 6 ms in one of an action, 25 ms
if it also learns, and about twice the clipping time of the clients (20 ms more for 50 of them);
``docs/results/rldp.md`` has the table. The public loss must be taken every round.
Worth: it was not seen to pay. On SST-2 (``docs/results/dp-lac.md``, three seeds) no gain was found on the good fixed
threshold it starts from, and from a bad one it ends 6 points of accuracy below DP-LAC's histogram. On synthetic
federations it ends somewhat below DP-LAC's loss and far below that of a threshold that is far too large, and above that
of the best fixed threshold known in hindsight. Moving the noise gained nothing there, nor did learning on, and an agent
from scratch does harm.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from privacy import checks
from privacy.clipping.norms import PerAdapterClip
from privacy.contribution import Plan
from privacy.mechanism import Release
from privacy.queries import AdapterBits
from strategies.controllers.controller import Controller, PublicSignals, RunInfo, update_multiplier
from strategies.controllers.rl import sac, spending
from strategies.controllers.rl.decisions import Acting, RlState, agent_values, begin, decide, observation, reward
from strategies.controllers.rl.features import add
from strategies.controllers.rl.sac import Learning


@dataclass(frozen=True)
class Rl(Controller[RlState]):
    """The RL controller of this page.

    Attributes:
        clip_norm: C_0, L2 norm of all starting thresholds together; each adapter starts at C_0 / sqrt(n).
        interval: k, rounds between two actions; 0 takes T/40, at least 2.
        step: delta_C, largest change of log C_i per action.
        reach: R, C_i stays within this factor of its start, > 1.
        noise_step: delta_z, largest change of the noise's log offset per action (filter mode).
        noise_range: z stays within this factor of the run's own multiplier, > 1.
        bit_share: share of 1/z^2 that pays for the clip bits, in (0, 1).
        reward: ``"gain"``, or ``"gain-per-spent"`` as RLDP has it; read only by an agent that learns.
        policy: ``"pretrained"``, ``"scratch"`` for an agent that knows nothing, or the file of another policy, such as
            ``simulations/benchmarks/papers/rldp_pretraining.py`` writes.
        learn: draw actions around the policy and learn further; an agent from scratch always does.
        warm_up: transitions before the first gradient step; an agent from scratch acts at random until then.
        updates: gradient steps per action.
        buffer: most transitions remembered.
        batch, learning_rate, temperature, discount, polyak: of SAC.
        seed: of everything random in the agent.
    """

    reads_validation: ClassVar[bool] = True
    clip_norm: float = 1.0
    interval: int = 0
    step: float = 0.7
    reach: float = 100.0
    noise_step: float = 0.1
    noise_range: float = 1.5
    bit_share: float = 0.05
    reward: str = "gain"
    policy: str = "pretrained"
    learn: bool = False
    warm_up: int = 8
    updates: int = 2
    buffer: int = 10_000
    batch: int = 64
    learning_rate: float = 1e-3
    temperature: float = 0.02
    discount: float = 0.98
    polyak: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        checks.positive(clip_norm=self.clip_norm, step=self.step, noise_step=self.noise_step)
        checks.integer_at_least(0, interval=self.interval)
        checks.integer_at_least(1, warm_up=self.warm_up, updates=self.updates, buffer=self.buffer)
        checks.within(1.001, 100.0, noise_range=self.noise_range)
        checks.within(1.001, 1e6, reach=self.reach)
        checks.within(1e-4, 0.99, bit_share=self.bit_share)
        checks.one_of(("gain", "gain-per-spent"), reward=self.reward)
        self._check_policy()
        assert self.acting  # its own checks

    def _check_policy(self) -> None:
        """Refuse what is no policy before anything is spent."""
        if self.policy not in ("pretrained", "scratch"):
            sac.policy_weights(self.policy)

    @property
    def acting(self) -> Acting:
        """The settings of how the agent acts and learns."""
        scratch = self.policy == "scratch"
        learning = Learning(self.seed, self.discount, self.temperature, self.polyak, self.learning_rate, self.batch)
        return Acting(
            learning, self.step, self.reach, self.noise_step, self.noise_range,
            per_spent=self.reward == "gain-per-spent", explores=self.learn or scratch,
            random_until=self.warm_up if scratch else 0, warm_up=self.warm_up, updates=self.updates,
        )  # fmt: skip

    def _interval(self, info: RunInfo) -> int:
        return self.interval or max(2, info.rounds // 40)

    def init(self, info: RunInfo, public: PublicSignals) -> RlState:
        adapters = len(info.blocks(1))
        for layout in info.layouts:
            if len(layout) != adapters:
                raise ValueError(
                    f"rl needs equally many adapters in every round, got {adapters} and {len(layout)}; choose an "
                    "aggregation that trains the same pairs throughout"
                )
        weights = sac.fresh_weights(self.seed) if self.policy == "scratch" else sac.policy_weights(self.policy)
        transitions = info.rounds // self._interval(info) if self.acting.explores else 1
        agent = sac.new_agent(weights, adapters, max(1, min(self.buffer, transitions)))
        return begin(info, agent, math.nan if public.validation_loss is None else public.validation_loss)

    def plan(self, state: RlState, info: RunInfo, round: int) -> Plan:
        sizes = info.blocks(round)
        z = spending.multiplier(info, state.spent, round, state.offset, self.noise_range)
        start = self.clip_norm / math.sqrt(len(sizes))
        bounds = tuple(start * math.exp(scale) for scale in state.scales)
        bits = AdapterBits(bounds, sizes, math.sqrt(len(sizes)) / 2 * z / math.sqrt(self.bit_share))
        return Plan(PerAdapterClip(bounds, sizes), update_multiplier(z, (bits,)), (bits,))

    def update(self, state: RlState, info: RunInfo, released: Release, public: PublicSignals) -> RlState:
        if public.validation_loss is None:
            raise ValueError("rl needs the validation loss of every round; set evaluation.every = 1")
        loss = public.validation_loss
        state = replace(
            state,
            heard=add(state.heard, released),
            spent=spending.after(info, state.spent, released.plan, public.rho_spent),
            first_loss=loss if math.isnan(state.first_loss) else state.first_loss,
            loss_before=loss if math.isnan(state.loss_before) else state.loss_before,
            loss=loss,
        )
        if not self._acts_after(public.round, info):
            return state
        local, whole = observation(state, info, self.acting, public.round)
        earned = reward(state, info, self.acting.per_spent)
        return decide(state, info, self.acting, public.round, local, whole, earned)

    def _acts_after(self, round: int, info: RunInfo) -> bool:
        """Whether an interval ends with ``round``."""
        return round % self._interval(info) == 0 or round == info.rounds

    def released_values(self, state: RlState, info: RunInfo) -> dict[str, float]:
        bounds = [self.clip_norm / math.sqrt(len(state.scales)) * math.exp(scale) for scale in state.scales]
        adapters = {f"clip-bound-{number}": bound for number, bound in enumerate(bounds, 1)}
        return {"clip-bound": math.hypot(*bounds), "noise-offset": state.offset} | adapters | agent_values(state)
