"""Cohorts for tests: drawn as a run draws them, or of the units that a test names. Not a test."""

from typing import Any

import numpy as np

from privacy.events import Poisson
from privacy.randomness.sampling import SEAL, Cohort, CohortSampler


def cohort(sampling: Poisson, round: int, ledger: Any, label: str = "round") -> Cohort:
    """A fresh one for a release that the ledger may have charged before."""
    return CohortSampler.create().draw(sampling, round, ledger.attempts(label, round), label=label)


def repeatable(seed: int) -> CohortSampler:
    """The draws of ``insecure_from_seed``, for tests of what is private but for that."""
    return CohortSampler(CohortSampler.insecure_from_seed(seed)._secret, insecure=False)


def always(*ids: int) -> Any:
    """In the place of ``CohortSampler.draw``: the cohort is of these units, whatever the secret says."""

    def draw(self: Any, sampling: Poisson, round: int, attempt: int = 0, *, label: str = "round") -> Cohort:
        return Cohort(np.array(ids, dtype=np.int64), sampling, label, round, attempt, False, SEAL)

    return draw
