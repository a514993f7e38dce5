"""Clients whose update norms follow a law, and the real mechanism between them and a controller.

Every round a cohort is drawn by the real sampler, its updates go through ``contribute``, and ``charged_release``
charges a ledger and adds noise. Nothing of a method is written down here a second time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.mechanism import Release, charged_release
from privacy.randomness.noise import InsecureSeededNoise, Noise
from privacy.randomness.rng import simulation_generator
from strategies.controllers.controller import PublicSignals, RunInfo
from tests.cases.drawn import repeatable

DIM = 4


def lognormal(median: float, sigma: float) -> Callable[[np.random.Generator, int, int], np.ndarray]:
    """A law of norms that stays the same in all rounds."""
    return lambda generator, round, units: median * np.exp(sigma * generator.standard_normal(units))


def constant(value: float) -> Callable[[np.random.Generator, int, int], np.ndarray]:
    return lambda generator, round, units: np.full(units, value)


@dataclass
class Population:
    """Clients of a run; ``norms``, ``losses`` and ``votes`` say what a cohort brings in a round.

    Attributes:
        ledger: charged for every release.
        sampling: draws the cohorts.
        norms, losses: (generator, round, units) -> one number per unit.
        vote: the bin everyone votes for.
        noise: of the mechanism.
        validation: public loss after a round.
    """

    ledger: Ledger
    sampling: Poisson = field(default_factory=lambda: Poisson(0.1, 1000))
    norms: Callable[[np.random.Generator, int, int], np.ndarray] = field(default_factory=lambda: lognormal(3.0, 0.5))
    losses: Callable[[np.random.Generator, int, int], np.ndarray] = field(default_factory=lambda: constant(0.7))
    vote: int = 14
    noise: Noise = field(default_factory=lambda: InsecureSeededNoise(0))
    validation: Callable[[int], float] = lambda round: math.exp(-round / 200)
    seed: int = 0
    width: int = DIM

    def release(self, plan: Plan, round: int, sampling: Poisson | None = None) -> Release:
        """One charged release of a fresh cohort under ``plan``."""
        sampling, label = sampling or self.sampling, "round" if round else "histogram"
        cohort = repeatable(self.seed).draw(sampling, round, self.ledger.attempts(label, round), label=label)
        generator = simulation_generator(self.seed, "population", round)
        directions = generator.standard_normal((len(cohort), self.width))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        rows = torch.from_numpy(directions * self.norms(generator, round, len(cohort))[:, None])
        losses = torch.from_numpy(self.losses(generator, round, len(cohort)))
        units = Units(rows, losses, torch.full((len(cohort),), self.vote, dtype=torch.int64))
        total = contribute(units, plan) if len(cohort) else Contribution.zero(plan)
        return charged_release(total, plan, cohort, ledger=self.ledger, noise=self.noise)

    def follow(self, controller: Any, setting: RunInfo, rounds: int | None = None, state: Any = None) -> list[Any]:
        """States before round 1 (or ``state``) and after each of ``rounds`` rounds (all by default)."""
        first = 1
        if state is None:
            state = controller.init(setting, PublicSignals(0, self.validation(0)))
            if (initial := controller.initial(self.sampling)) is not None:
                released = self.release(controller.plan(state, setting, 0), 0, initial.sampling)
                state = controller.update(state, setting, released, PublicSignals(0, self.validation(0)))
        else:
            first = sum(event.label == "round" for event in self.ledger.events) + 1
        states = [state]
        for round in range(first, first + (setting.rounds if rounds is None else rounds)):
            released = self.release(controller.plan(states[-1], setting, round), round)
            public = PublicSignals(round, self.validation(round), self.ledger.rho_spent)
            states.append(controller.update(states[-1], setting, released, public))
        return states


def setting_of(rounds: int, noise_multiplier: float = 1.76, sampling: Poisson | None = None) -> RunInfo:
    """Constant noise, updates of ``DIM`` values."""
    return RunInfo(rounds, ((DIM - 1, 1),), sampling or Poisson(0.1, 1000), (noise_multiplier,) * rounds)
