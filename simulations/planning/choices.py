"""A search for the settings with the most signal for their cost, and whether any has enough.

Rates and rounds are tried around those of the configuration, each calibrated as a run calibrates it; so are the head
alone, ranks and layers, whose sizes are taken from the model's shape without its weights.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from client.models.base import load_skeleton
from server.config.load import ConfigError, parse, with_overrides
from server.config.methods import methods
from server.config.schema import RunConfig
from server.runs.assembly import trained_values
from server.runs.commitment import commit_clients, commit_records
from server.runs.record_level_assembly import record_level_settings
from simulations.planning.signal import ALONE, BESIDE_A_HEAD, HALFWAY, Agreement, least_signal, signal_to_noise
from simulations.report.notation import number_text

RATES, ROUNDS = (0.25, 0.5, 1, 2, 4), (1, 2, 4)
"""What is tried, as multiples of the configuration's. Fewer rounds are not: S does not see too little training."""

RANKS = (1, 2, 4, 8, 16, 32)
SAME = 0.05
"""Signals this close count as equal, and the cheaper choice is taken."""

LARGEST_EPSILON = 10.0
"""Beyond it a remedy is no privacy."""

Settings = Mapping[str, Any]


class Hopeless(ValueError):
    """No choice has enough signal; the message says what would help."""


@dataclass(frozen=True)
class Trained:
    """A choice of what is trained: in words, how many values, and the settings that ask for it."""

    name: str
    dimension: int
    settings: Settings
    head_alone: bool = False


@dataclass(frozen=True)
class Pace:
    """A pace of training: rate q, rounds T, units expected in a round m, noise of each round.

    Attributes:
        cost: updates of clients, or gradients of records, over the run.
    """

    rate: float
    rounds: int
    cohort: float
    noise_multipliers: tuple[float, ...]
    settings: Settings

    @property
    def cost(self) -> int:
        return round(self.cohort * self.rounds)


@dataclass(frozen=True)
class Choice:
    """A way to run, with its predicted signal-to-noise S."""

    pace: Pace
    trained: Trained
    signal: float


@dataclass(frozen=True)
class Situation:
    """The circumstances that a run is planned for.

    Attributes:
        config: the settings to start from, with the target and, at client level, the number of clients.
        population: clients, or protected records (or groups) of one site.
        labels: classes of a classification.
        limit: most client updates (record gradients) of the run.
    """

    config: RunConfig
    population: int
    labels: int
    agreement: Agreement
    limit: int


@dataclass(frozen=True)
class Advice:
    """A recommendation, with its reason and the alternatives.

    Attributes:
        sizes: what could be trained, at the pace that is recommended.
        paces: rates and rounds, training what is recommended.
    """

    best: Choice
    why: str
    sizes: tuple[Choice, ...]
    paces: tuple[Choice, ...]


def advise(situation: Situation) -> Advice:
    """Choose the most values among those with enough signal, at the pace with the most signal.

    Raises:
        Hopeless: no choice has enough signal.
        ConfigError: settings that cannot work, or a limit below every choice.
    """
    every_pace, every_size = paces(situation), sizes(situation)
    most = choice(situation, max(every_pace, key=_strength), every_size[0])
    if most.signal < least_signal(situation.config.model.task):
        raise Hopeless(_hopeless(situation, most))
    pace = _cheapest_alike(every_pace)
    of_sizes = tuple(choice(situation, pace, size) for size in every_size)
    best, why = _chosen(of_sizes)
    of_paces = tuple(choice(situation, one, best.trained) for one in every_pace)
    return Advice(best, why, of_sizes, of_paces)


def choice(situation: Situation, pace: Pace, trained: Trained) -> Choice:
    """Predict the signal of one way to run."""
    a = situation.agreement.value
    return Choice(pace, trained, signal_to_noise(pace.noise_multipliers, pace.cohort, trained.dimension, a))


def paces(situation: Situation) -> list[Pace]:
    """Calibrate rates and rounds within the limit; ConfigError if there are none."""
    config, population = situation.config, situation.population
    cohort = float(config.site.batch_size) if config.is_single_site else config.expected_cohort
    cohorts = {min(population, round(cohort * more) if config.is_single_site else cohort * more) for more in RATES}
    if config.privacy.trust == "secagg":  # everybody takes part in every round
        cohorts = {cohort}
    wanted = [(m, more * config.rounds) for m in sorted(cohorts) if m >= 1 for more in ROUNDS]
    affordable = [(m, rounds) for m, rounds in wanted if round(m * rounds) <= situation.limit]
    if not affordable:
        least = min(round(m * rounds) for m, rounds in wanted)
        raise ConfigError(f"--cost {situation.limit:,}: the cheapest choice takes {least:,} updates; allow more")
    found, refused = [], list[str]()
    for m, rounds in affordable:
        try:
            found.append(_calibrated(situation, m, rounds))
        except ConfigError as error:  # a pace that no noise suits is no choice
            refused.append(str(error))
    if not found:
        raise ConfigError(refused[0])
    return found


def _calibrated(situation: Situation, cohort: float, rounds: int) -> Pace:
    config, population = situation.config, situation.population
    rate = cohort / population
    if config.is_single_site:
        settings: Settings = {"site.batch-size": int(cohort), "rounds": rounds}
        changed = changed_settings(config, settings)
        noise = commit_records(changed, record_level_settings(changed, rounds), population)
    else:
        settings = {"sampling-rate": rate, "rounds": rounds}
        changed = changed_settings(config, settings)
        noise = commit_clients(changed, methods(changed).controller)
    return Pace(rate, rounds, cohort, noise.multipliers, settings)


def sizes(situation: Situation) -> list[Trained]:
    """List the head alone (of a classifier) and adapters of several ranks and layers, the fewest values first."""
    config = situation.config
    model = load_skeleton(config.model.name, config.model.task, situation.labels)
    total = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    own = config.model.layers or total
    found = {size.dimension: size for size in reversed(list(_sizes(config, model, total, own)))}
    return [found[dimension] for dimension in sorted(found)]


def _sizes(config: RunConfig, model: nn.Module, total: int, own: int) -> Iterator[Trained]:
    if config.model.targets.strip():
        ranks = sorted({*RANKS, config.model.rank})
        wanted = [(config.model.rank, own), *((rank, own) for rank in ranks)]
        wanted += [(config.model.rank, layers) for layers in sorted({1, total})] + [(1, 1)]
        for rank, layers in dict.fromkeys(wanted):
            settings: Settings = {"model.rank": rank, "model.layers": layers % total}
            try:
                dimension = _values(config, model, settings)
            except ValueError:  # a rank beyond the layer's smaller side, or that the aggregation has no use for
                if (rank, layers) == (config.model.rank, own):
                    raise
                continue
            where = "all layers" if layers == total else "top layer" if layers == 1 else f"top {layers} layers"
            yield Trained(f"rank {rank}, {where}", dimension, settings)
    if config.model.task == "classification":
        settings = {"model.targets": "", "model.layers": 0}
        yield Trained("head alone", _values(config, model, settings), settings, head_alone=True)


def _values(config: RunConfig, model: nn.Module, settings: Settings) -> int:
    changed = changed_settings(config, settings)
    return trained_values(changed, methods(changed), model)


def changed_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The configuration with single keys changed; ConfigError as of :func:`server.config.load.parse`."""
    return parse(with_overrides(config.to_table(), settings))


def _strength(pace: Pace) -> float:
    """The signal S of one value at full agreement, by which paces compare whatever is trained."""
    return signal_to_noise(pace.noise_multipliers, pace.cohort, 1, 1.0)


def _cheapest_alike(every: list[Pace]) -> Pace:
    """The cheapest of those paces whose signal is the most, or all but."""
    enough = (1.0 - SAME) * max(map(_strength, every))
    return min((pace for pace in every if _strength(pace) >= enough), key=lambda pace: (pace.cost, -pace.rounds))


def _chosen(of_sizes: tuple[Choice, ...]) -> tuple[Choice, str]:
    """Choose among sizes in the order of their numbers of values; returns the choice and why.

    Of a language model the most values that should come half of the way: fewer hold less of what public records teach.
    """
    head = next((one for one in of_sizes if one.trained.head_alone), None)
    for enough in (*reversed(HALFWAY), ALONE) if head is None else (BESIDE_A_HEAD,):
        paying = [one for one in of_sizes if one.signal >= enough and not one.trained.head_alone]
        if paying:
            half = "; from there half of the way is expected" if enough in HALFWAY else ""
            return paying[-1], f"they are the most values with an S of at least {enough:g}{half}"
    if head is not None:
        return head, f"no adapter has an S of {enough:g}, below which the head alone is as good and takes less time"
    return of_sizes[0], f"no values have an S of {enough:g}, and these are the fewest; expect little"


def _hopeless(situation: Situation, best: Choice) -> str:
    """Say why there is too little signal, and every remedy with its number."""
    config, least = situation.config, least_signal(situation.config.model.task)
    units = config.units_text
    remedies = [f"{_rounded_up(situation.population * least / best.signal):,} {units} at the rate {best.pace.rate:.3g}"]
    epsilon = _enough_epsilon(situation, best)
    if epsilon is not None:
        remedies.append(f"epsilon {epsilon:g}")
    if not config.is_single_site:
        remedies.append("many more records a client, whose updates then agree better")
    return (
        f"privacy.epsilon = {config.privacy.epsilon:g} with {situation.population:,} {units} is hopeless: in "
        f"{best.pace.rounds} rounds with {number_text(best.pace.cohort)} {units} expected in each, signal-to-noise S "
        f"is {best.signal:.2g} even for the fewest values that can be trained ({best.trained.name}, "
        f"{best.trained.dimension:,}); below {least:g} a run learns its noise.\n"
        f"What would be enough: {', or '.join(remedies)}.\n"
        "What costs no privacy: training on public records alone (public.warm-start-epochs starts from them)."
    )


def _enough_epsilon(situation: Situation, best: Choice) -> float | None:
    """An epsilon in steps of a half that lifts this very choice; None if none up to the largest does."""
    epsilon = situation.config.privacy.epsilon
    while epsilon < LARGEST_EPSILON:
        epsilon = min(float(f"{1.5 * epsilon:.2g}"), LARGEST_EPSILON)
        config = changed_settings(situation.config, {"privacy.epsilon": epsilon})
        raised = replace(situation, config=config)
        try:
            pace = _calibrated(raised, best.pace.cohort, best.pace.rounds)
        except ConfigError:  # so large an epsilon that too little noise would do
            return None
        if choice(raised, pace, best.trained).signal >= least_signal(config.model.task):
            return epsilon
    return None


def _rounded_up(value: float) -> int:
    """Round a number up to two digits."""
    unit = int(10.0 ** max(math.floor(math.log10(value)) - 1, 0))
    return math.ceil(value / unit) * unit
