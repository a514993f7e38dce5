"""The signal of a run against its noise, in one number.

A released mean is ``mean of clipped updates + N(0, (z C / m)^2 I_d)``, so its noise is ``z C sqrt(d) / m`` long. Of C,
one unit's update contributes the part that it shares with the others: the expected clipped update has norm ``a C``,
where a in [0, 1] is the agreement of one update with the mean (their cosine, where all are clipped). Over T rounds
signals add up like T and noise like sqrt(T):

    S = sqrt(T) a m / (z sqrt(d)).

S says how long the signal is beside the noise. It does not say how much there is to learn, nor whether T rounds are
enough to learn it, nor what a badly chosen threshold or learning rate costs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from privacy import checks
from server.config.load import ConfigError
from simulations.report.judgement import DEVIATIONS
from simulations.report.notation import number_text
from simulations.report.read_run import read_run

BESIDE_A_HEAD, ALONE = 3.0, 1.0
"""From this S adapters are worth training: beside a classification head, which alone is as good below it, and alone."""

HOPELESS = {"classification": 0.5, "other": 0.3}
"""Least S of the fewest values, by task. Classifiers below it came out below training on a few hundred public records;
language models were measured down to 0.4, where they still learnt. See docs/results/planning.md."""

SPREAD = {"classification": (35.0, 190.0), "other": (0.0, 5.65)}
"""What sets updates apart, see :func:`agreement_of`; by task, fitted to what `planning.agreement` measured."""


HALFWAY = (3.2, 5.8)
"""Between which S a language model had come half of the way from its public start to training without noise: two data
sets at two epsilon each, see docs/results/planning.md."""


def least_signal(task: str) -> float:
    """The signal S below which a run of this task is refused."""
    return HOPELESS.get(task, HOPELESS["other"])


def signal_to_noise(noise_multipliers: Sequence[float], cohort: float, dimension: int, agreement: float) -> float:
    """The signal S of a run whose rounds have these noise multipliers.

    Args:
        cohort: units expected in a round, m.
        dimension: values trained, d.
        agreement: of one unit's update with the mean, a.
    """
    checks.positive(cohort=cohort, agreement=agreement)
    checks.integer_at_least(1, dimension=dimension)
    rounds = math.sqrt(sum(multiplier**-2 for multiplier in noise_multipliers))
    return rounds * agreement * cohort / math.sqrt(dimension)


def expected_share(signal: float) -> tuple[float, float]:
    """The share of the way from public records alone to training without noise that so much signal S covers.

    Returns the least and the most: ``S^2 / (S^2 + h^2)``, as of a mean shrunk for its noise. The share is a half
    at h, the largest and the smallest that was measured.
    """
    least, most = (signal**2 / (signal**2 + halfway**2) for halfway in reversed(HALFWAY))
    return least, most


def agreement_of(records: float, between: float, within: float) -> float:
    """The agreement of an update from so many records, ``a = 1 / sqrt(1 + between + within / records)``.

    Args:
        between: variance of what sets clients apart for good (skewed labels), over the squared norm of the mean.
        within: variance of one record's gradient, alike; averaging b records divides it by b.
    """
    return 1.0 / math.sqrt(1.0 + between + within / records)


@dataclass(frozen=True)
class Agreement:
    """The agreement of one unit's update with the mean, and where it is from."""

    value: float
    source: str


def default_agreement(task: str, records: float) -> Agreement:
    """The agreement that was measured on public data for this kind of task and number of records."""
    words = "1 record" if records == 1 else f"{number_text(records)} records"
    return Agreement(agreement_of(records, *SPREAD.get(task, SPREAD["other"])), f"a default for updates of {words}")


def given_agreement(value: float) -> Agreement:
    """The agreement that somebody has measured; ValueError outside (0, 1]."""
    checks.probability(agreement=value)
    return Agreement(value, "given")


def measured_agreement(folder: Path) -> Agreement:
    """Estimate the agreement from the releases of a finished run; nothing is spent, they are public.

    From a mean's squared norm is taken that of its noise, and the 1/m that m unrelated updates of length C have.

    Raises:
        ConfigError: the folder has no releases, or they cannot be told from noise.
    """
    run = read_run(folder)
    noisy = run.config is None or run.config.privacy.noise != "insecure-zero"  # without noise what it would be is told
    seen, spread = list[float](), 0.0
    for record in run.rounds:
        if record.update_norm is None or record.noise_norm is None or not record.clip_bound:
            continue
        noise = (record.noise_norm / record.clip_bound) ** 2 if noisy else 0.0
        seen.append((record.update_norm / record.clip_bound) ** 2 - noise - 1.0 / record.expected_cohort)
        spread += 2.0 * noise**2 / (run.result("dimension") or 1)  # variance of a squared norm of noise
    if not seen:
        raise ConfigError(f"--like {folder}: it has no released norms with a clip threshold; give a run that has")
    square = sum(seen) / len(seen)
    if square <= DEVIATIONS * math.sqrt(spread) / len(seen):
        raise ConfigError(
            f"--like {folder}: its {len(seen)} releases cannot be told from their noise, so they say nothing of "
            "agreement; give a run on public data with privacy.noise = 'insecure-zero' and privacy.non-private = true"
        )
    return Agreement(min(math.sqrt(square), 1.0), f"measured in {folder.name}")
