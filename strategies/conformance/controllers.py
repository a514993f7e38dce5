"""Checks of what a run relies on in a controller.

A run without clients: made-up units go through the real mechanism; an account in memory pays as a ledger would.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from privacy.accountants import renyi
from privacy.audit.contracts import adversarial_rows, check_clip_map, check_query
from privacy.clipping import clip_from_json
from privacy.clipping.norms import NoUpdate
from privacy.clipping.units import Units
from privacy.commitment import ROUNDING, Commitment
from privacy.contribution import Contribution, Plan, contribute
from privacy.errors import BudgetExceeded
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger.budget import Price, budget_of
from privacy.mechanism import Release, charged_release
from privacy.queries import OneHotVote, query_from_json
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import simulation_generator
from privacy.randomness.sampling import CohortSampler
from strategies.conformance.purity import Subject, raise_broken, reload_state, rule
from strategies.controllers.controller import Controller, InitialRelease, PublicSignals, RunInfo
from strategies.state_files import same_bits

SAMPLING = Poisson(0.1, 1000)
BLOCKS = (6, 3, 2)
DELTA = 1e-5


@dataclass
class Account:
    """A ledger in memory, as much of one as the mechanism needs; nothing is durable, for nothing here is anyone's.

    In filter mode it pays for what the info's multipliers cost, and for the initial release.
    """

    info: RunInfo
    initial: InitialRelease | None
    not_private: str | None = "made-up clients"
    rho_spent: float = 0.0
    budget: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        order = self.info.order
        if order is not None:
            self.budget = sum(renyi.rho_of(self.info.sampling, z, order) for z in self.info.noise_multipliers)
            if self.initial is not None:
                event = ReleaseEvent("histogram", 0, self.initial.sampling, self.initial.components)
                self.budget += renyi.rho_of(event.sampling, event.effective_noise_multiplier, order)
            self.budget *= 1 + 1e-9
            sampling = self.info.sampling
            commitment = Commitment(
                "client", "add_remove", sampling.population, 1.0, DELTA, "filter", order=order, rho=self.budget
            )
            self._filter = budget_of(commitment)

    def stamp_not_private(self, reason: str) -> None:
        """Do nothing: a rehearsal is stamped already."""

    def attempts(self, label: str, round: int) -> int:
        """Every release is rehearsed once."""
        return 0

    def charge(self, event: ReleaseEvent) -> Price:
        """Price the event as a filter does; ConformanceError, rule "budget", where the filter does not pay."""
        if self.info.order is None:
            return Price(step=0)
        try:
            price = self._filter.price(event)
        except BudgetExceeded as refusal:
            raise_broken(
                "budget",
                f"round {event.round} of {self.info.rounds} is not paid for: {refusal}",
                "in filter mode (info.order) spend at most what the info's multipliers cost together",
            )
        self._filter.take(price)
        self.rho_spent += price.rho or 0.0
        return price

    def note_release(self, receipt: Price) -> None:
        """Keep nothing of the release."""


def runs_of(controller_profile: tuple[float, ...], rounds: int) -> dict[str, RunInfo]:
    """Runs to rehearse: constant layout, layouts that change between rounds, and a ledger that filters."""
    multipliers = tuple(2.0 * share for share in controller_profile)
    other = tuple(size + 2 for size in BLOCKS)
    return {
        "floor mode": RunInfo(rounds, (BLOCKS,), SAMPLING, multipliers),
        "floor mode, layouts that change": RunInfo(rounds, (BLOCKS, other) * (rounds // 2), SAMPLING, multipliers),
        "filter mode": RunInfo(rounds, (BLOCKS,), SAMPLING, multipliers, order=8),
    }


def release(plan: Plan, round: int, sampling: Poisson, account: Account, seed: int) -> Release:
    """Make the release of a plan by the mechanism; every third round nobody comes."""
    label = "round" if round else "histogram"
    total = Contribution.zero(plan) if round % 3 == 2 else contribute(made_up_units(plan, round, seed), plan)
    noise = InsecureSeededNoise(1000 * seed + round)
    sampler = CohortSampler.insecure_from_seed(seed)
    drawn = sampler.draw(sampling, round, label=label)
    return charged_release(total, plan, drawn, ledger=account, noise=noise)


def made_up_units(plan: Plan, round: int, seed: int) -> Units:
    """Clients whose updates have norms over three orders of magnitude, with losses and votes."""
    generator = simulation_generator(seed, "conformance", round)
    clients, width = 90, max(plan.clip.params, 1)
    scale = np.exp(generator.uniform(-4, 3, (clients, 1)))
    rows = torch.from_numpy(generator.standard_normal((clients, width)) * scale).float()
    losses = torch.from_numpy(generator.uniform(0.1, 3.0, clients))
    votes = [query.dim for query in plan.queries if isinstance(query, OneHotVote)]
    choice = generator.integers(-1, max(votes, default=1), clients)
    assert plan.clip.params or isinstance(plan.clip, NoUpdate)
    return Units(rows, losses, torch.from_numpy(choice))


ROUNDS = 8


def check_controller(controller: Controller[Any], *, info: RunInfo | None = None, seed: int = 0) -> None:
    """Raise ConformanceError unless ``controller`` keeps its contract in rehearsed runs.

    Checked, under the names of the rules: the protocol is there ("protocol"); every answer is a function of the
    arguments alone ("deterministic", "inputs", "global randomness"); a plan has the dimension of its round, also where
    layouts change ("dimension"), and noise at least that of the info in floor mode ("noise"); the initial release is
    as announced ("initial release"); a filter is not overspent ("budget"); clip map and queries keep their sensitivity
    on adversarial units ("sensitivity"); the state comes back from a checkpoint and plans the same ("checkpoint");
    step scale and released values are numbers ("numbers"); a round where nobody comes, or whose public loss is NaN, is
    survived ("runs").

    Args:
        info: rehearse this run only, of at least 2 rounds; None rehearses three small ones.
        seed: of the made-up clients.
    """
    for member in vars(Controller):
        if not member.startswith("_") and not hasattr(controller, member):
            raise_broken(
                "protocol", f"{type(controller).__name__} has no {member}", "see strategies/controllers/controller.py"
            )
    subject = Subject(controller)
    rounds = ROUNDS if info is None else info.rounds
    profile = subject.call("profile", rounds)
    if len(profile) != rounds or not all(_positive(share) for share in profile):
        raise_broken("protocol", f"profile({rounds}) is {profile!r}", "return one finite number > 0 per round")
    runs = runs_of(profile, rounds) if info is None else {"the run": info}
    for run in runs.values():
        _rehearse(subject, run, controller.reads_validation, seed)


def _rehearse(subject: Subject, info: RunInfo, reads_validation: bool, seed: int) -> None:
    initial: InitialRelease | None = subject.call("initial", info.sampling, form=repr)
    account = Account(info, initial)
    state = start = subject.call("init", info, PublicSignals(0, 1.0 if reads_validation else None))
    for round in range(0 if initial is not None else 1, info.rounds + 1):
        plan: Plan = subject.call("plan", state, info, round, form=_sent)
        _check_plan(plan, round, info, initial)
        if round <= 2 or round == info.rounds:
            _check_sensitivity(plan, round, seed)
        back = reload_state(state, start)
        if not same_bits(_sent(subject.call("plan", back, info, round, form=_sent)), _sent(plan)):
            raise_broken(
                "checkpoint", f"the restored state plans round {round} differently", "keep all it needs in the state"
            )
        _check_numbers(subject, state, info)
        sampling = info.sampling if round or initial is None else initial.sampling
        released = release(plan, round, sampling, account, seed)
        public = PublicSignals(round, _public_loss(round) if reads_validation else None, account.rho_spent)
        state = subject.call("update", state, info, released, public)
    reload_state(state, start)


def _sent(plan: Plan) -> tuple[Any, ...]:
    """All of a plan that nodes are given."""
    return plan.to_json(), plan.clip.arrays()


def _check_plan(plan: Plan, round: int, info: RunInfo, initial: InitialRelease | None) -> None:
    if round == 0:
        assert initial is not None
        if plan.components() != initial.components:
            raise_broken(
                "initial release",
                f"plan of round 0 releases {plan.components()}, initial() announced {initial.components}",
                "calibration counts what initial() says: plan exactly that",
            )
        return
    if isinstance(plan.clip, NoUpdate) or plan.clip.params != info.dimension(round):
        raise_broken(
            "dimension",
            f"plan of round {round} clips {plan.clip.params} values, the round trains {info.dimension(round)}",
            "size the clip map by info.dimension(round) or info.blocks(round), for each round anew",
        )
    least, planned = info.noise_multiplier(round), plan.effective_noise_multiplier
    if info.order is None and planned < least * (1 - ROUNDING):
        raise_broken(
            "noise",
            f"round {round} has effective noise multiplier {planned:.6g}, the floor is {least:.6g}",
            "give the update what queries leave: strategies.controllers.controller.update_multiplier(floor, queries)",
        )


def _check_sensitivity(plan: Plan, round: int, seed: int) -> None:
    remedy = "use the maps of privacy/clipping/norms.py and the queries of privacy/queries.py, or mend yours"
    width = max(plan.clip.params, 1)
    rows = torch.cat([adversarial_rows(width), made_up_units(plan, round, seed).rows[:6]])
    losses = torch.tensor([0.0, -1.0, 1e38, math.nan, math.inf, -math.inf, *(0.1 * i for i in range(len(rows) - 6))])
    units = Units(rows, losses, torch.arange(-1, len(rows) - 1))
    with rule("sensitivity", f"the clip map of round {round} fails", remedy):
        if not isinstance(plan.clip, NoUpdate):
            check_clip_map(plan.clip, rows, clip_from_json)  # nodes are sent a plan as JSON
    for query in plan.queries:
        with rule("sensitivity", f"the query {query.name!r} of round {round} fails", remedy):
            check_query(query, units, query_from_json)


def _check_numbers(subject: Subject, state: Any, info: RunInfo) -> None:
    scale = subject.call("step_scale", state)
    if not isinstance(scale, float | int) or not math.isfinite(scale) or scale < 0:
        raise_broken(
            "numbers", f"step_scale is {scale!r}", "return a finite number >= 0; 1.0 leaves the optimizer alone"
        )
    values = subject.call("released_values", state, info)
    if not isinstance(values, dict) or not all(
        isinstance(name, str) and isinstance(value, float | int) for name, value in values.items()
    ):
        raise_broken("numbers", f"released_values is {values!r}", "return a dict of names and numbers")
    bound = values.get("clip-bound")
    if not (isinstance(bound, float | int) and math.isfinite(bound) and bound >= 0):
        remedy = 'give the threshold of the next round as "clip-bound", a number >= 0; progress and report show it'
        raise_broken("numbers", f"released_values is {values!r}", remedy)


def _public_loss(round: int) -> float:
    """Falls, with bumps; once not a number, as when a model diverged."""
    return math.nan if round == 4 else 0.96**round * (1 + 0.02 * math.sin(3 * round))


def _positive(share: object) -> bool:
    return isinstance(share, float | int) and math.isfinite(share) and share > 0
