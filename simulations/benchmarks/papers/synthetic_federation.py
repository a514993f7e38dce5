"""Federations that exist only as random numbers: what the policy of the ``rl`` controller is trained and judged on.

Two families, drawn from a seed, with n blocks of parameters in the place of LoRA pairs. Nothing here is anyone's data.

- quadratic: client k's loss is 1/2 sum_j lambda_j (x_j - x*_j - h_kj)^2. E steps of gradient descent move it by
  Delta_k = (1 - (1 - eta lambda)^E) (x* + h_k - x). Public loss: a floor plus 1/2 sum_j lambda_j (x_j - x*_j)^2.
- logistic: clients with skewed labels hold records of a logistic model whose blocks of features have unlike scales, and
  take E full-batch gradient steps. Public loss: cross-entropy on 400 records of the mixture.

Rounds go through the real mechanism (clip maps, queries, filter), with seeded noise and an account in memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from privacy.accountants.calibration import filter_commitment
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import contribute
from privacy.events import Poisson, ReleaseEvent
from privacy.ledger.budget import FilterBudget, Price, budget_of
from privacy.mechanism import charged_release
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import simulation_generator
from privacy.randomness.sampling import CohortSampler
from strategies.controllers.controller import PublicSignals, RunInfo

BLOCKS = 8
BUDGETS = ((2.0, 0.04, 1000), (4.0, 0.03, 1000), (8.0, 0.02, 1000), (4.0, 0.01, 3000))
"""(epsilon, rate, population): cohorts of 20 to 40."""

Rows = Callable[[Tensor, int, np.random.Generator], Tensor]


@dataclass(frozen=True)
class Problem:
    """One federation.

    Attributes:
        start: parameters before round 1.
        sizes: of the blocks.
        rows: updates of a cohort of that many clients at given parameters, from a generator.
        loss: public loss of given parameters.
        setting: what the controller is told.
        commitment: what the budget is.
        clip_norm: the threshold a user would start with; off by a factor between 1/4 and 40.
        bit_share: share of the budget the clip bits get.
    """

    start: Float[Tensor, " d"]
    sizes: tuple[int, ...]
    rows: Rows
    loss: Callable[[Tensor], float]
    setting: RunInfo
    commitment: Commitment
    clip_norm: float
    bit_share: float


class Account:
    """The ledger's filter without its file: the same budget object, nothing durable, never private."""

    def __init__(self, commitment: Commitment) -> None:
        self.budget = budget_of(commitment)
        self.not_private: str | None = "synthetic clients"

    def stamp_not_private(self, reason: str) -> None:
        """It is already."""

    def attempts(self, label: str, round: int) -> int:
        """Every round is held once."""
        return 0

    def charge(self, event: ReleaseEvent) -> Price:
        price = self.budget.price(event)
        self.budget.take(price)
        return price

    def note_release(self, receipt: Price) -> None:
        """Nothing is kept."""

    @property
    def rho_spent(self) -> float:
        """Rényi divergence spent."""
        assert isinstance(self.budget, FilterBudget)
        return self.budget.rho_spent


@cache
def committed(epsilon: float, rate: float, population: int, rounds: int) -> tuple[Commitment, float]:
    """The filter of a run."""
    return filter_commitment(epsilon, 1e-5, Poisson(rate, population), rounds)


def draw_problem(seed: int, rounds: int | None = None) -> Problem:
    """The federation of a seed."""
    g = simulation_generator(seed, "synthetic federation")
    sizes = tuple(round(10 ** g.uniform(1.0, 2.2)) for _ in range(BLOCKS))
    rounds = rounds or int(g.choice([40, 60, 80]))
    epsilon, rate, population = BUDGETS[g.integers(len(BUDGETS))]
    commitment, z = committed(epsilon, rate, population, rounds)
    order = commitment.order if g.uniform() < 0.5 else None  # a ledger that filters, or a floor of the same noise
    setting = RunInfo(rounds, (sizes,), Poisson(rate, population), (z,) * rounds, order)
    make = _quadratic if g.uniform() < 0.6 else _logistic
    start, rows, loss = make(sizes, g)
    typical = float(rows(start, 200, g).double().norm(dim=1).median())
    clip_norm = typical * math.exp(g.uniform(math.log(0.25), math.log(40.0)))
    bit_share = math.exp(g.uniform(math.log(0.05), math.log(0.3)))
    return Problem(start, sizes, rows, loss, setting, commitment, clip_norm, bit_share)


def _quadratic(sizes: tuple[int, ...], g: np.random.Generator) -> tuple[Tensor, Rows, Callable[[Tensor], float]]:
    scale = _per_block(sizes, np.exp(g.uniform(math.log(0.1), math.log(3.0), len(sizes))))
    curvature = _per_block(sizes, np.exp(g.uniform(math.log(0.05), 0.0, len(sizes))))
    curvature = curvature * torch.tensor(np.exp(g.uniform(-1.0, 1.0, sum(sizes))))
    optimum = scale * _normal(g, sum(sizes))
    spread = float(np.exp(g.uniform(math.log(0.3), math.log(3.0))))
    progress = 1 - (1 - (float(g.uniform(0.02, 0.3)) * curvature).clamp(max=1.0)) ** int(g.integers(1, 6))
    floor = float(g.uniform(0.2, 1.5))
    weight = 1 / float((curvature * optimum**2).sum())

    def rows(x: Tensor, clients: int, g: np.random.Generator) -> Tensor:
        return progress * (optimum - x + spread * scale * _normal(g, clients, len(x)))

    def loss(x: Tensor) -> float:
        return floor + weight * float((curvature * (x - optimum) ** 2).sum())

    return torch.zeros(sum(sizes), dtype=torch.float64), rows, loss


def _logistic(sizes: tuple[int, ...], g: np.random.Generator) -> tuple[Tensor, Rows, Callable[[Tensor], float]]:
    d, records = sum(sizes), 16
    scale = _per_block(sizes, np.exp(g.uniform(math.log(0.1), 0.0, len(sizes))))
    direction = _normal(g, d) * scale
    direction = direction / direction.norm() * float(g.uniform(0.5, 1.5))
    rate, steps = float(g.uniform(0.3, 2.0)) / float((scale**2).sum()), int(g.integers(1, 6))
    skew = float(g.uniform(0.0, 0.4))

    def labelled(g: np.random.Generator, *shape: int) -> tuple[Tensor, Tensor]:
        share = 0.5 + skew * torch.tensor(g.choice([-1.0, 1.0], (*shape[:-1], 1)))
        labels = (torch.tensor(g.random(shape)) < share).double()
        return scale * _normal(g, *shape, d) + (2 * labels - 1).unsqueeze(-1) * direction, labels

    validation, truth = labelled(g, 400, 1)
    validation, truth = validation[:, 0], truth[:, 0]

    def rows(x: Tensor, clients: int, g: np.random.Generator) -> Tensor:
        features, labels = labelled(g, clients, records)
        local = x.expand(clients, -1).clone()
        for _ in range(steps):
            error = torch.sigmoid(torch.einsum("krd,kd->kr", features, local)) - labels
            local -= rate * torch.einsum("kr,krd->kd", error, features) / records * d
        return local - x

    def loss(x: Tensor) -> float:
        return float(binary_cross_entropy_with_logits(validation @ x, truth))

    return torch.zeros(d, dtype=torch.float64), rows, loss


def hold_run(problem: Problem, controller: Any, seed: int, state: Any = None) -> tuple[list[float], Any]:
    """One run: the public loss before round 1 and after every round, and the controller's last state.

    Args:
        problem: the federation.
        controller: any controller.
        seed: of cohorts, clients and noise.
        state: the controller's state to start from; None for its own.
    """
    g, account = simulation_generator(seed, "synthetic run"), Account(problem.commitment)
    noise, sampling = InsecureSeededNoise(seed), problem.setting.sampling
    x, losses = problem.start, [problem.loss(problem.start)]
    if state is None:
        state = controller.init(problem.setting, PublicSignals(0, losses[0]))
    for round in range(1, problem.setting.rounds + 1):
        plan = controller.plan(state, problem.setting, round)
        clients = int(g.binomial(sampling.population, sampling.rate))
        total = contribute(Units(problem.rows(x, clients, g)), plan)
        cohort = CohortSampler.insecure_from_seed(seed).draw(sampling, round)  # its clients are those above
        release = charged_release(total, plan, cohort, ledger=account, noise=noise)
        x = x + release.update.double()
        losses.append(problem.loss(x))
        state = controller.update(state, problem.setting, release, PublicSignals(round, losses[-1], account.rho_spent))
    return losses, state


def _per_block(sizes: tuple[int, ...], values: np.ndarray) -> Tensor:
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(sizes))


def _normal(g: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(g.standard_normal(shape))
