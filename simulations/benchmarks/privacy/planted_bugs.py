"""Copies of the real release path with one line broken, which the two-world audit must refuse.

Each bug takes the source of a module of the privacy core, exchanges lines that must still be there word for word, and
runs the result as a module of its own; the original is untouched. So what is audited is the real path but for that
line, and a change of the path that would leave a bug out of place shows up as an error here.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from privacy import contribution, mechanism
from privacy.audit.two_world import ReleasePath, TwoWorldAudit, matched_filter, two_world, two_world_successive
from privacy.clipping import norms
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.contribution import Plan
from privacy.events import Poisson, ReleaseEvent
from privacy.queries import BoundedMean, NormBit, NormHistogram, OneHotVote
from privacy.randomness import noise
from privacy.randomness.sampling import CohortSampler

DIM, HONEST, Z = 64, 20, 0.5
BOUND = 2.0
SAMPLING = Poisson(rate=0.02, population=1000)  # expects 20 units
CANARY = torch.full((DIM,), 100.0)  # norm 800, far above the bound
ROWS = 5 * torch.randn(HONEST, DIM, generator=torch.Generator().manual_seed(1))
FLAT = Plan(FlatClip(BOUND, DIM), Z)


class UnwrittenLedger:
    """Stands in for the ledger where thousands of durable writes would only cost time; it pays for everything."""

    not_private: str | None = None

    def stamp_not_private(self, reason: str) -> None:
        """Remember that test noise was used."""
        self.not_private = reason

    def attempts(self, label: str, round: int) -> int:
        """Every release has a round of its own."""
        return 0

    def charge(self, event: ReleaseEvent) -> ReleaseEvent:
        return event

    def note_release(self, receipt: ReleaseEvent) -> None:
        """Nothing to note."""


@dataclass(frozen=True)
class Parts:
    """The parts of a release path, each exchangeable; as they stand, the real ones.

    Attributes:
        contribute, charged_release: the two halves of the mechanism.
        noise: makes the source of noise of one run.
        units: what one row per unit becomes.
        plan: clipping, noise and queries.
        ledger: makes the ledger of one run.
    """

    contribute: Callable[..., Any] = contribution.contribute
    charged_release: Callable[..., Any] = mechanism.charged_release
    noise: Callable[[], Any] = noise.GaussianNoise
    units: Callable[[Tensor], Units] = Units
    plan: Plan = FLAT
    ledger: Callable[[], Any] = UnwrittenLedger

    def new_run(self) -> ReleasePath:
        """The path of one run: rows -> update and answers, concatenated."""
        ledger, source, rounds, sampler = self.ledger(), self.noise(), count(), CohortSampler.create()

        def release(rows: Tensor) -> Tensor:
            released = self.charged_release(
                self.contribute(self.units(rows), self.plan),
                self.plan,
                sampler.draw(SAMPLING, next(rounds)),  # the worlds hold the same units whoever was drawn
                ledger=ledger,
                noise=source,
            )
            return torch.cat([released.update.double(), *released.answers])

        return release

    def audit(self, **options: Any) -> TwoWorldAudit:
        """Two-world test of one release."""
        return two_world(self.new_run(), ROWS, CANARY, noise_multiplier=self.plan.effective_noise_multiplier, **options)

    def audit_successive(self, **options: Any) -> TwoWorldAudit:
        """Two-world test of the difference of two rounds."""
        return two_world_successive(self.new_run, ROWS, CANARY, noise_multiplier=Z, **options)


def every_query() -> tuple[Parts, Tensor]:
    """The real path with all queries in the joint event, and the direction in which the canary moves all of it at
    once."""
    votes = OneHotVote((0.5, 1.0, 2.0), 1.5, simulated_noise_std_per_bound=0.0)
    queries = (NormBit(BOUND, 0.8), NormHistogram((1.0, 10.0), 1.4), votes, BoundedMean(4.0, 5.0))

    def units(rows: Tensor) -> Units:
        return Units(rows, losses=torch.full((len(rows),), 9.0), votes=torch.zeros(len(rows), dtype=torch.int64))

    plan, one_hot = Plan(FlatClip(BOUND, DIM), 0.9, queries), torch.eye(3)
    scale = BOUND / SAMPLING.expected_units
    shifts = [CANARY / CANARY.norm() * scale, torch.tensor([-0.5]), one_hot[2], one_hot[0], torch.tensor([4.0])]
    stds = [plan.noise_multiplier * scale, *(query.noise_std for query in queries)]
    return Parts(plan=plan, units=units), matched_filter(shifts, stds)


def broken(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A copy of a module in which each (old, new) text was exchanged.

    Raises:
        ValueError: the module does not hold an old text exactly once.
    """
    text = inspect.getsource(module)
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{module.__name__} must hold the line to break once, it has {text.count(old)}: {old}")
        text = text.replace(old, new)
    copy = ModuleType(f"{module.__name__}_broken")
    sys.modules[copy.__name__] = copy
    exec(compile(text, f"<broken {module.__name__}>", "exec"), copy.__dict__)
    return copy


def noise_over_population() -> Parts:
    """The noise is divided by the population, the sum by the cohort."""
    copy = broken(
        mechanism,
        (
            "(part.noise_multiplier, part.dim)",
            "(part.noise_multiplier * sampling.expected_units / sampling.population, part.dim)",
        ),
    )
    return Parts(charged_release=copy.charged_release)


def weighted_by_examples() -> Parts:
    """Units are weighted by their number of examples: 1000 of the canary, 10 of everybody else (sent as losses)."""
    copy = broken(
        contribution,
        (
            "encoded.add(plan.clip.encode(rows), len(rows), terms=plan.clip.dim)",
            "weights = (units.losses[part] / units.losses.mean()).unsqueeze(1)\n"
            "        encoded.value += (plan.clip.encode(rows) * weights * GRID).sum(dim=0).long()",
        ),
    )

    def units(rows: Tensor) -> Units:
        examples = torch.full((len(rows),), 10.0, dtype=torch.float64)
        examples[HONEST:] = 1000.0
        return Units(rows, losses=examples)

    return Parts(contribute=copy.contribute, units=units)


def noise_before_averaging() -> Parts:
    """Every client adds zC/m to its update, as if that were the mean: on the sum it is zC/sqrt(m)."""
    copy = broken(
        mechanism,
        (
            "noisy = joint + noise.draw([(part.noise_multiplier, part.dim) for part in event.components])",
            "clients = int(sampling.expected_units)\n"
            "    shares = [(part.noise_multiplier / clients, part.dim) for part in event.components]\n"
            "    noisy = joint + noise.draw(shares * clients).view(clients, -1).sum(dim=0)",
        ),
    )
    return Parts(charged_release=copy.charged_release)


def per_tensor_clip() -> Plan:
    """Eight tensors, each clipped to C: a row may be sqrt(8) C long."""
    copy = broken(
        norms,
        (
            "        copy, norms = finite_rows(rows, self.params)\n"
            "        return copy.mul_(norms.clamp_(min=self.bound).reciprocal_().unsqueeze(1))",
            "        copy, _ = finite_rows(rows, self.params)\n"
            "        tensors = copy.view(len(copy), 8, -1)\n"
            "        tensors /= tensors.norm(dim=2, keepdim=True).clamp(min=self.bound)\n"
            "        return copy",
        ),
    )
    return Plan(copy.FlatClip(BOUND, DIM), Z)


def clipped_per_tensor() -> Parts:
    """Clipping per tensor under noise for the whole, where rows are not measured again either."""
    copy = broken(contribution, ("torch.maximum(norms, largest)", "torch.ones_like(norms)"))
    return Parts(contribute=copy.contribute, plan=per_tensor_clip())


def reused_noise() -> Parts:
    """A run draws its noise once and adds it in every round; only two rounds together show it."""
    copy = broken(
        noise,
        (
            "        return scale_normals(self._random.normal(sum(length for _, length in blocks)), blocks)",
            "        if not hasattr(self, 'kept'):\n"
            "            self.kept = self._random.normal(sum(length for _, length in blocks))\n"
            "        return scale_normals(self.kept.copy(), blocks)",
        ),
    )
    return Parts(noise=copy.GaussianNoise)


def realised_divisor() -> Parts:
    """The sum is divided by the number of units that came, not by the expected one."""
    came: list[int] = []

    def counting(units: Units, plan: Plan) -> contribution.Contribution:
        came.append(len(units))
        return contribution.contribute(units, plan)

    right = "noisy.to(torch.float64) / GRID, plan, sampling.expected_units"
    copy = broken(mechanism, (right, "noisy.to(torch.float64) / GRID, plan, float(CAME[-1])"))
    copy.CAME = came  # type: ignore[attr-defined]
    return Parts(contribute=counting, charged_release=copy.charged_release)
