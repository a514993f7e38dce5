"""The sum of what all runs on the same data have cost.

Runs are put together by the digest of their source (``source.digest``; of older runs that of the prepared data set) and
by the unit that they protect. How they add up is :mod:`privacy.ledger.together`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from privacy.commitment import Commitment, FloorStep
from privacy.errors import CorruptRun
from privacy.ledger import together
from server.run_folder.data_facts import data_digest
from server.run_folder.names import SOURCE_FILE, STATUS_FILE
from simulations.report.notation import delta_text, epsilon_text
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import Run, read_run


@dataclass(frozen=True)
class Cost:
    """The cost of one run: what it guarantees, and what it is committed to.

    Attributes:
        epsilon: infinite where nothing is guaranteed.
        floor: committed releases; None where they cannot be composed with others.
        population: units that the ledger counts.
        event: of which this run is a candidate; all candidates of one private sweep are paid for together.
        damage: the file of it that is damaged or gone, in words; its epsilon is then infinite.
    """

    folder: Path
    epsilon: float
    delta: float
    floor: tuple[FloorStep, ...] | None
    population: int | None
    not_private: str | None
    event: str | None = None
    damage: str = ""


@dataclass(frozen=True)
class Spending:
    """The spending of all runs on one data set that protect the same unit.

    Attributes:
        data: the first letters of the digest.
        added: (epsilon, delta) that add up.
        composed: (epsilon, delta) of all committed releases together; None where that cannot be had.
    """

    data: str
    unit: str
    source: str
    runs: list[Cost] = field(default_factory=list)

    @property
    def added(self) -> tuple[float, float]:
        """The sums of epsilons and of deltas."""
        return together.add_up(self.runs)

    @property
    def composed(self) -> tuple[float, float] | None:
        """The bound by privacy loss distributions, see :func:`privacy.ledger.together.compose`."""
        return together.compose(self.runs)

    @property
    def bound(self) -> tuple[float, float]:
        """The smaller of the two bounds, as (epsilon, delta)."""
        return together.least_bound(self.runs)

    def how(self, bound: tuple[float, float]) -> str:
        """Say which of the two a bound is."""
        return together.how(self.runs, bound)


def spendings(folders: Iterable[Path]) -> list[Spending]:
    """Group the runs in these folders by data set and unit; those that charged nothing are left out.

    A damaged run is listed apart, without a guarantee.
    """
    found: dict[tuple[str, str], Spending] = {}
    for folder in folders:
        digest, unit, source = data_digest(folder) or "unknown", "unknown unit", ""
        try:
            run = read_run(folder)
            if (cost := _cost(run)) is None:
                continue
            if digest == "unknown":
                raise CorruptRun(f"{folder / SOURCE_FILE} is missing: whose records were used is not known; restore it")
            unit = run.config.unit if run.config else str((run.guarantee or {}).get("unit", "client"))
            source = run.config.data.source if run.config else ""
        except CorruptRun as error:
            cost = Cost(folder, math.inf, 0.0, None, None, "it is damaged", damage=str(error))
        runs = found.setdefault((digest, unit), Spending(digest[:12], unit, source)).runs
        if cost.event is None or cost.event not in {run.event for run in runs}:
            runs.append(cost)
    return list(found.values())


def together_text(run: Run) -> str:
    """Say what a run guarantees together with the others in its output folder on the same data.

    Empty where there are no others, where the run has no guarantee of its own, and for the data that Lacquer invents,
    which are nobody's.
    """
    digest = data_digest(run.path)
    if digest is None or run.not_private or (run.config and run.config.data.source == "notes"):
        return ""
    path = run.path.resolve()
    beside = sorted(status.parent for status in path.parent.glob(f"*/{STATUS_FILE}"))
    found = spendings(folder for folder in beside if data_digest(folder) == digest)
    own = next((spending for spending in found if path in {each.folder for each in spending.runs}), None)
    if own is None or len(own.runs) == 1:
        return ""
    others = len(own.runs) - 1
    text = f"{others} run{'s' * (others > 1)} beside this one used the same data."
    epsilon, delta = bound = own.bound
    if not math.isfinite(epsilon):
        return f"{text} Not all of them have a guarantee, so together they have none."
    return (
        f"{text} All {len(own.runs)} together have ε ≤ {epsilon_text(epsilon)} at δ = {delta_text(delta)} "
        f"(add-remove; {own.how(bound)}), as of the writing of this page."
    )


def _cost(run: Run) -> Cost | None:
    pair = guaranteed_pair(run)
    if run.account is None:
        if run.guarantee is None:
            return None
        epsilon, delta = pair or (math.inf, 0.0)
        return Cost(run.path, epsilon, delta, None, None, run.not_private)
    epsilon = math.inf if run.not_private or pair is None else pair[0]
    return committed_cost(run.path, run.account.commitment, run.not_private, epsilon)


def committed_cost(folder: Path, commitment: Commitment, not_private: str | None, epsilon: float) -> Cost:
    """The cost of a run by what it commits to; `epsilon` is what it guarantees where it is private."""
    price = together.price_of(commitment, not_private, epsilon)
    event = None if commitment.tuning is None else commitment.tuning.id
    return Cost(folder, price.epsilon, price.delta, price.floor, price.population, not_private, event)
