"""The cost of runs about to start together with earlier ones on the same data, counted as by ``lacquer budget``.

Lacquer's own invented data are nobody's and are not counted; nor is what has no guarantee to lose.
"""

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config.schema import RunConfig
from server.run_folder.data_facts import data_digest
from simulations.history.folders import run_folders
from simulations.report.budget import Cost, Spending, committed_cost, spendings
from simulations.report.notation import delta_text, epsilon_text
from simulations.report.read_run import NoRunFolder
from strategies.calibration import Calibrated


@dataclass(frozen=True)
class Planned:
    """A run that has not started.

    Attributes:
        digest: of the records that it reads.
        source: how a person calls them.
    """

    digest: str
    source: str
    unit: str
    cost: Cost


def planned_costs(config: RunConfig, digest: str, noise: Mapping[str, Any] | None) -> list[Planned]:
    """The commitments of a checked run; none where nobody's privacy is at stake.

    Args:
        digest: of its records; empty where it reads none.
        noise: as it was calibrated, in JSON; None where every site calibrates for itself.
    """
    if not digest or config.data.source == "notes" or config.privacy.non_private:
        return []
    if noise is None or "commitment" not in noise:
        cost = Cost(Path(), config.privacy.epsilon, config.privacy.delta, None, None, None)
    else:
        commitment = Calibrated.from_json(noise).commitment
        cost = committed_cost(Path(), commitment, commitment.not_private, config.privacy.epsilon)
    return [Planned(digest, config.data.source, config.unit, cost)]


def warn_together(new: Iterable[Planned], places: Sequence[Path], this: str, *, but: Path | None = None) -> list[str]:
    """Warn of each data set that these runs do not use alone: all they and the runs below `places` add up to.

    Args:
        this: what the new runs are called, such as "this run"; `{count}` stands for their number.
        but: a folder whose runs are the new ones.
    """
    groups: dict[tuple[str, str], list[Planned]] = {}
    for run in new:
        groups.setdefault((run.digest, run.unit), []).append(run)
    before = _earlier(places, {digest for digest, _ in groups}, but)
    said = []
    for (digest, unit), runs in groups.items():
        earlier = before.get((digest[:12], unit), [])
        if len(runs) + len(earlier) < 2:
            continue
        total = Spending(digest[:12], unit, runs[0].source, [*earlier, *(run.cost for run in runs)])
        said.append(_warning(total, len(earlier), places, this.format(count=len(runs))))
    return said


def _earlier(places: Sequence[Path], digests: set[str], but: Path | None) -> dict[tuple[str, str], list[Cost]]:
    found: dict[Path, None] = {}
    for place in places if digests else ():
        try:
            found |= {folder.resolve(): None for folder in run_folders([place])}
        except NoRunFolder:
            continue
    if but is not None:
        found = {folder: None for folder in found if not folder.is_relative_to(but.resolve())}
    same = [folder for folder in found if data_digest(folder) in digests]
    return {(spending.data, spending.unit): spending.runs for spending in spendings(same)}


def _warning(total: Spending, earlier: int, places: Sequence[Path], this: str) -> str:
    where = [os.path.relpath(place) for place in dict.fromkeys(map(Path.resolve, places)) if place.is_dir()]
    where = [
        place for place in where if not any(Path(place).is_relative_to(other) for other in where if other != place)
    ]
    beside = f" and {earlier} earlier run{'s' * (earlier > 1)} in {' and '.join(where)}" if earlier else ""
    text = f"{this[0].upper()}{this[1:]}{beside} use the same data ({total.source})."
    epsilon, delta = bound = total.bound
    if not math.isfinite(epsilon):
        return f"{text} Not all of them have a guarantee, so together they have none."
    each = f"; one by one: lacquer budget {shlex.join(where)}" if earlier else ""
    return (
        f"{text} Together they have epsilon at most {epsilon_text(epsilon)} at delta {delta_text(delta)} "
        f"(add-remove; {total.how(bound)}){each}"
    )
