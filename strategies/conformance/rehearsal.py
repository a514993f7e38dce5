"""A run without clients: made-up units go through the real mechanism; an account in memory pays as a ledger would."""

from dataclasses import dataclass, field

import numpy as np
import torch

from privacy import renyi
from privacy.budget import Price, budget_of
from privacy.clipping import NoUpdate
from privacy.commitment import Commitment
from privacy.errors import BudgetExceeded
from privacy.events import Poisson, ReleaseEvent
from privacy.mechanism import Contribution, InsecureSeededNoise, Plan, Release, Units, charged_release, contribute
from privacy.queries import OneHotVote
from privacy.rng import simulation_generator
from strategies.conformance.errors import broken
from strategies.controller import InitialRelease, Setting

SAMPLING = Poisson(0.1, 1000)
BLOCKS = (6, 3, 2)
DELTA = 1e-5


@dataclass
class Account:
    """What the mechanism needs of a ledger; nothing is durable, for nothing here is anyone's.

    In filter mode it pays for what the setting's multipliers cost, and for the initial release.
    """

    setting: Setting
    initial: InitialRelease | None
    not_private: str | None = "made-up clients"
    rho_spent: float = 0.0
    budget: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        order = self.setting.order
        if order is not None:
            self.budget = sum(renyi.rho_of(self.setting.sampling, z, order) for z in self.setting.noise_multipliers)
            if self.initial is not None:
                event = ReleaseEvent("histogram", 0, self.initial.sampling, self.initial.components)
                self.budget += renyi.rho_of(event.sampling, event.effective_noise_multiplier, order)
            self.budget *= 1 + 1e-9
            sampling = self.setting.sampling
            commitment = Commitment(
                "client", "add_remove", sampling.population, 1.0, DELTA, "filter", order=order, rho=self.budget
            )
            self._filter = budget_of(commitment)

    def stamp_not_private(self, reason: str) -> None:
        """It is already."""

    def charge(self, event: ReleaseEvent) -> Price:
        """ConformanceError, rule "budget", where the filter does not pay."""
        if self.setting.order is None:
            return Price(step=0)
        try:
            price = self._filter.price(event)
        except BudgetExceeded as refusal:
            broken(
                "budget",
                f"round {event.round} of {self.setting.rounds} is not paid for: {refusal}",
                "in filter mode (setting.order) spend at most what the setting's multipliers cost together",
            )
        self._filter.take(price)
        self.rho_spent += price.rho or 0.0
        return price

    def released(self, receipt: Price) -> None:
        """Nothing is kept."""


def settings(controller_profile: tuple[float, ...], rounds: int) -> dict[str, Setting]:
    """Runs to rehearse: constant layout, layouts that change between rounds, and a ledger that filters."""
    multipliers = tuple(2.0 * share for share in controller_profile)
    other = tuple(size + 2 for size in BLOCKS)
    return {
        "floor mode": Setting(rounds, (BLOCKS,), SAMPLING, multipliers),
        "floor mode, layouts that change": Setting(rounds, (BLOCKS, other) * (rounds // 2), SAMPLING, multipliers),
        "filter mode": Setting(rounds, (BLOCKS,), SAMPLING, multipliers, order=8),
    }


def release(plan: Plan, round: int, sampling: Poisson, account: Account, seed: int) -> Release:
    """What the mechanism releases under a plan; every third round nobody comes."""
    label = "round" if round else "histogram"
    total = Contribution.zero(plan) if round % 3 == 2 else contribute(made_up_units(plan, round, seed), plan)
    noise = InsecureSeededNoise(1000 * seed + round)
    return charged_release(total, plan, label=label, round=round, sampling=sampling, ledger=account, noise=noise)


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
