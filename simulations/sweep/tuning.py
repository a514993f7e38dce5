"""A private sweep before it begins: which cells may be candidates of one event, and the noise that pays for all of it.

``privacy.epsilon`` and ``privacy.delta`` of the cells are those of tuning and training together. Every candidate is
calibrated to the same epsilon of its own, the largest with which releasing the best of a random number of candidates
stays within them (``privacy/accountants/selection.py``).

Cells that train on the server's public records alone take no part. They cost nothing, so nothing is gained by drawing
them: run them by a plain sweep, and comparing them with what the private one released costs nothing either.
"""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.optimize import brentq

from privacy.accountants import composition, selection
from privacy.commitment import FloorStep, Tries, Tuning
from server.config.load import ConfigError, flatten
from simulations.sweep.cells import Cell
from strategies.calibration import Calibrated

NoiseOf = Callable[[Cell, float], Calibrated]
"""A function that calibrates a cell so that it costs, alone, at most so much epsilon."""

_SAME = ("data.", "privacy.", "clients", "seed", "model.task")
_FREE = ("data.cache",)
_LEAST = 1e-3  # of the target: below this share a candidate is not worth running
_CLOSE = 1e-3  # relative tolerance of a candidate's epsilon


@dataclass(frozen=True)
class TuningPlan:
    """The plan that a private sweep commits to.

    Attributes:
        epsilon, delta: of tuning and training together, as asked for; `total` is what it comes to, at Rényi `order`.
        alone: the epsilon that a candidate by itself may cost.
        noise: of every cell, by its key; the commitments are those of candidates.
    """

    tries: Tries
    epsilon: float
    delta: float
    total: float
    order: float
    alone: float
    noise: Mapping[str, Calibrated]

    @property
    def statement(self) -> str:
        """The guarantee of tuning and training in words."""
        return (
            f"tuning and training: (epsilon {self.total:.4f}, delta {self.delta:g}) by repeat-and-select, RDP order "
            f"{self.order:g}"
        )


def refuse_unlike(cells: Sequence[Cell]) -> None:
    """Refuse cells that are not candidates for one release: each must be the same question put to the same units.

    Raises:
        ConfigError: naming a cell, what is different or not private, and the remedy.
    """
    for cell in cells:
        config = cell.config
        if cell.kind == "public-only":
            raise ConfigError(
                f"{cell.key}: kind = 'public-only' takes no part in a private sweep: it costs no privacy, so there is "
                "nothing to share; leave it out by --only and run it by a sweep without --private"
            )
        if config.privacy.non_private:
            raise ConfigError(
                f"{cell.key}: privacy.non-private = true has no guarantee that could be shared; leave the cell out by "
                "--only"
            )
        if config.several_sites or config.privacy.trust != "server":
            raise ConfigError(
                f"{cell.key}: a private sweep takes runs over clients with privacy.trust = 'server' and runs of one "
                "site; sites and clients that add noise themselves would have to know of all candidates"
            )
        if config.privacy.mode != "floor":
            raise ConfigError(
                f"{cell.key}: privacy.mode = {config.privacy.mode!r} must be 'floor' in a private sweep: a filter "
                "bounds the divergence at one order, and the price of choosing needs several"
            )
        if config.site.sampling_level != "user":
            raise ConfigError(
                f"{cell.key}: site.sampling-level = {config.site.sampling_level!r} must be 'user' in a private sweep: "
                "the price of choosing needs Rényi divergences, and sampling of records is accounted by PLD alone"
            )
    first, *others = cells
    for cell in others:
        ours, theirs = flatten(first.config.to_table()), flatten(cell.config.to_table())
        for key in sorted(ours.keys() | theirs.keys()):
            if key.startswith(_SAME) and key not in _FREE and ours.get(key) != theirs.get(key):
                raise ConfigError(
                    f"{cell.key}: {key} = {theirs.get(key)!r}, and {first.key} has {ours.get(key)!r}: candidates of a "
                    "private sweep share data, units, seed (which deals the data) and guarantee; choose cells by "
                    "--only, or sweep another setting"
                )


def plan_tuning(cells: Sequence[Cell], tries: Tries, noise_of: NoiseOf) -> TuningPlan:
    """Calibrate every cell as a candidate; nothing is drawn or spent.

    Args:
        cells: at least one; :func:`refuse_unlike` has let them pass.
        noise_of: calibrates one cell; called again and again.

    Raises:
        ConfigError: no noise keeps the target, or the cells protect different units.
    """
    privacy = cells[0].config.privacy

    def cost(found: Mapping[str, Calibrated]) -> tuple[float, float]:
        return selection.epsilon(tries, _distinct(found), privacy.delta)

    alone, noise = _dearest(cells, noise_of, privacy.epsilon, lambda found: cost(found)[0])
    units = {(one.commitment.unit, one.commitment.population, one.commitment.adjacency) for one in noise.values()}
    if len(units) > 1:
        raise ConfigError(
            f"the cells protect different units ({sorted(units)}); candidates of a private sweep share them"
        )
    tuning = Tuning(uuid.uuid4().hex, tries, _distinct(noise))
    committed = {
        key: one._replace(commitment=replace(one.commitment, epsilon=privacy.epsilon, tuning=tuning))
        for key, one in noise.items()
    }
    return TuningPlan(tries, privacy.epsilon, privacy.delta, *cost(noise), alone, committed)


def every_cell_once(cells: Sequence[Cell], noise_of: NoiseOf) -> tuple[float, Mapping[str, Calibrated]]:
    """Price the alternative: each cell run once, all released and composed by PLD within the same target.

    Returns:
        The epsilon of each run by itself, and its noise by the cell's key.

    Raises:
        ConfigError: no noise keeps the target.
    """
    privacy = cells[0].config.privacy

    def cost(found: Mapping[str, Calibrated]) -> float:
        return composition.epsilon([step for one in found.values() for step in one.commitment.floor], privacy.delta)

    return _dearest(cells, noise_of, privacy.epsilon, cost)


def _dearest(
    cells: Sequence[Cell], noise_of: NoiseOf, target: float, cost: Callable[[Mapping[str, Calibrated]], float]
) -> tuple[float, Mapping[str, Calibrated]]:
    """Find the largest epsilon of a run by itself, within 0.1 %, with which all cost at most ``target``."""
    kept: dict[float, Mapping[str, Calibrated]] = {}

    def excess(log_epsilon: float) -> float:
        epsilon = math.exp(log_epsilon)
        found = {cell.key: noise_of(cell, epsilon) for cell in cells}
        over = cost(found) / target - 1.0
        if over <= 0.0:
            kept[epsilon] = found
        return over

    high = math.log(target)
    if excess(high) > 0.0:
        low = high - 0.5
        while excess(low) > 0.0:
            high, low = low, low - 0.5
            if low < math.log(_LEAST * target):
                raise ConfigError(
                    f"privacy.epsilon = {target:g}: so many tries leave a candidate less than {_LEAST:g} of it; ask "
                    "for fewer (--tries), or raise privacy.epsilon"
                )
        brentq(excess, low, high, xtol=_CLOSE)
    best = max(kept)
    return best, kept[best]


def _distinct(noise: Mapping[str, Calibrated]) -> tuple[tuple[FloorStep, ...], ...]:
    """The committed steps of all cells, equal ones once."""
    return tuple(dict.fromkeys(one.commitment.floor for one in noise.values()))
