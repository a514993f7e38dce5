"""A ledger that pays for anything (stamped NOT PRIVATE: test noise) and releases made by the real mechanism."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from privacy.commitment import Commitment, FloorStep
from privacy.events import Poisson
from privacy.ledger import Ledger
from privacy.mechanism import Contribution, InsecureZeroNoise, Noise, Plan, Release, charged_release

ReleaseOf = Callable[..., Release]


@pytest.fixture
def ledger_for(tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    """A function that makes a ledger which pays for ``rounds`` rounds and one histogram at any noise."""
    opened: list[Ledger] = []

    def make(sampling: Poisson, rounds: int, noise_multiplier: float = 0.0) -> Ledger:
        floor = (
            FloorStep("histogram", Poisson(1.0, sampling.population), noise_multiplier),
            FloorStep("round", sampling, noise_multiplier, rounds),
        )
        commitment = Commitment(
            "client", "add_remove", sampling.population, 1.0, 1e-5, floor=floor, not_private="a test"
        )
        opened.append(Ledger.create(tmp_path / f"ledger-{len(opened)}.jsonl", commitment))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.close()


@pytest.fixture
def released(ledger_for: Callable[..., Ledger]) -> ReleaseOf:
    """A function that releases a sum under a plan, without noise unless some is given."""

    def release(plan: Plan, total: Contribution, sampling: Poisson, noise: Noise | None = None) -> Release:
        label, round = ("round", 1) if plan.clip.dim else ("histogram", 0)
        ledger = ledger_for(sampling, 1)
        noise = noise or InsecureZeroNoise()
        return charged_release(total, plan, label=label, round=round, sampling=sampling, ledger=ledger, noise=noise)

    return release
