"""The noise that a privacy budget costs, and what more clients, rounds or sampling would buy.

The released mean is ``sum / m + N(0, (z C / m)^2 I_d)`` with clip bound C, expected cohort m and dimension d, so the
noise has norm ``z C sqrt(d) / m`` and the signal at most C (all updates parallel and clipped). Over T rounds the
signal adds up like T and the noise like sqrt(T); :attr:`Option.noise_over_run` is the ratio that is left.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from privacy import checks
from privacy.accountants import composition
from privacy.accountants.calibration import calibrate
from privacy.commitment import check_delta
from privacy.errors import UnsupportedEvent
from privacy.events import Poisson, Step, effective_noise_multiplier


@dataclass(frozen=True)
class Scenario:
    """One way to run.

    Attributes:
        epsilon, delta: the target.
        clients: population size N.
        rate: sampling rate q, in (0, 1].
        rounds: number of rounds T.
        histogram: noise multiplier of one initial histogram over all clients, or None for no histogram.
        queries: noise multipliers of the further components of each round's joint Gaussian.
        adjacency: ``"add_remove"`` or ``"replace_one"``.
    """

    epsilon: float
    delta: float
    clients: int
    rate: float
    rounds: int
    histogram: float | None = None
    queries: tuple[float, ...] = ()
    adjacency: str = "add_remove"

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.integer_at_least(1, clients=self.clients, rounds=self.rounds)
        checks.probability(rate=self.rate)
        check_delta(self.delta, self.clients)
        if self.histogram is not None:
            checks.positive(histogram=self.histogram)
        for query in self.queries:
            checks.positive(query=query)

    @property
    def cohort(self) -> Poisson:
        """The sampling that draws each round's cohort."""
        return Poisson(self.rate, self.clients)

    @property
    def extra(self) -> tuple[Step, ...]:
        """The releases beside the rounds."""
        return () if self.histogram is None else ((Poisson(1.0, self.clients), self.histogram, 1),)

    def noise_multiplier(self) -> float:
        """The calibrated noise multiplier of the update; errors as for :func:`calibration.calibrate`."""
        return calibrate(
            self.epsilon,
            self.delta,
            self.cohort,
            self.rounds,
            extra=self.extra,
            queries=self.queries,
            adjacency=self.adjacency,
        )

    def steps(self, noise_multiplier: float) -> tuple[Step, ...]:
        """Everything released at that noise multiplier."""
        effective = effective_noise_multiplier((1.0, noise_multiplier), *((1.0, other) for other in self.queries))
        return (*self.extra, (self.cohort, effective, self.rounds))


@dataclass(frozen=True)
class Option:
    """A setting with its price in noise.

    Attributes:
        name: what was changed, in words.
        noise_multiplier: the calibrated z.
    """

    name: str
    setting: Scenario
    noise_multiplier: float

    @property
    def cohort(self) -> float:
        """Expected cohort size m."""
        return self.setting.cohort.expected_units

    @property
    def noise_on_mean(self) -> float:
        """Standard deviation of each coordinate of the mean, in units of the clip bound: z / m."""
        return self.noise_multiplier / self.cohort

    @property
    def noise_over_run(self) -> float:
        """Noise against signal in one coordinate when all rounds are added up: z / (m sqrt(T))."""
        return self.noise_on_mean / math.sqrt(self.setting.rounds)

    @property
    def break_even_dimension(self) -> float:
        """Number of coordinates at which the noise of one round is as long as the clip bound: (m / z)^2."""
        return self.noise_on_mean**-2


@dataclass(frozen=True)
class Refusal:
    """A change that is impossible, or whose target cannot be met, and why."""

    name: str
    reason: str


def price(name: str, setting: Scenario) -> Option:
    """Calibrate a setting and price it; errors as for :func:`calibration.calibrate`."""
    return Option(name, setting, setting.noise_multiplier())


def alternatives(now: Option) -> tuple[Option | Refusal, ...]:
    """The setting of a priced option changed in one respect at a time, each priced for the same epsilon and delta."""
    setting = now.setting
    clients, rate, rounds = setting.clients, setting.rate, setting.rounds
    changes: dict[str, dict[str, Any]] = {
        "2 x clients": {"clients": 2 * clients},
        "4 x clients": {"clients": 4 * clients},
        "4 x clients, rate/4": {"clients": 4 * clients, "rate": rate / 4.0},
        "2 x rate": {"rate": min(1.0, 2.0 * rate)},
        "rounds/2": {"rounds": max(1, rounds // 2)},
        "2 x rounds": {"rounds": 2 * rounds},
    }
    found: list[Option | Refusal] = []
    for name, change in changes.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a generous delta was said of the setting itself
                changed = replace(setting, **change)
                same_price = changed == replace(setting, clients=changed.clients)
            if changed == setting:
                continue
            if same_price:
                # The cost of Poisson sampling depends on the rate, not on the population.
                found.append(Option(name, changed, now.noise_multiplier))
            else:
                found.append(price(name, changed))
        except ValueError as error:
            found.append(Refusal(name, str(error)))
    return tuple(found)


def by_accountant(
    setting: Scenario, noise_multiplier: float, names: Sequence[str] = composition.ACCOUNTANTS
) -> dict[str, float | str]:
    """Epsilon of the whole run by each accountant; a sentence where one cannot account it."""
    found: dict[str, float | str] = {}
    for name in names:
        try:
            steps = setting.steps(noise_multiplier)
            found[name] = composition.epsilon(steps, setting.delta, name, adjacency=setting.adjacency)
        except UnsupportedEvent as error:
            found[name] = str(error)
    return found
