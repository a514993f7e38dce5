"""A small site that tests of record-level training share. Not a test."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.record_level.calibration import commit
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.settings import RecordLevelSettings
from client.record_level.training import private_training
from client.record_level.units import UnitIndex
from privacy.commitment import Commitment
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from strategies.controllers.controller import PublicSignals
from tests.cases.cohorts import build, clients, fresh, start

RECORDS = 12
BOUND = 1e3  # no gradient of the small models is as long
EXACT: dict[str, Any] = {
    "unit": "record", "steps": 3, "batch_size": RECORDS, "epsilon": 4.0, "delta": 1e-3, "noise": "insecure-zero",
    "not_private": "test", "controller": "fixed", "controller_options": {"clip-norm": BOUND}, "optimizer": "fedavg",
    "optimizer_options": {"learning-rate": 0.5},
}  # fmt: skip
"""Everybody in every batch, no noise, nothing clipped: plain gradient descent."""

PRIVATE: dict[str, Any] = {
    "unit": "record", "steps": 4, "batch_size": 4, "epsilon": 4.0, "delta": 1e-3,
    "controller": "fixed", "controller_options": {"clip-norm": 0.1},
    "optimizer": "fedadam", "optimizer_options": {"learning-rate": 0.01},
}  # fmt: skip


def records(count: int = RECORDS, units: list[int] | None = None, seed: int = 0) -> Records:
    """Ragged random records; `units` numbers the unit of each."""
    made = clients((count,), seed=seed)[0]
    return made if units is None else replace(made, units=np.array(units))


def engine(name: str = "llama", token_budget: int = 96) -> CohortEngine:
    """The stacked engine on a small random model, in double precision."""
    model, spec, task = build(name)
    return CohortEngine(fresh(model), spec, task, precision="fp64", token_budget=token_budget)


def vector(name: str = "llama") -> Tensor:
    """Where training starts: every gradient is away from zero."""
    model, spec, _ = build(name)
    return start(model, spec)


def site_training(
    folder: Path,
    data: Records,
    *,
    made: Any = None,
    name: str = "llama",
    adapter: Tensor | None = None,
    **settings: Any,
) -> PrivateSgd:
    """A site that has begun, with its ledger in `folder`."""
    site = RecordLevelSettings(**settings)
    index = UnitIndex.of(data, grouped=site.unit != "record", most=site.records_per_unit, seed=site.seed)
    commitment, multipliers = _commit(site.to_json(), len(index), index.kept)
    ledger = Ledger.create(folder / "ledger.jsonl", commitment)
    training = private_training(site, made or engine(name), index, ledger, multipliers, CohortSampler.create())
    training.begin(vector(name) if adapter is None else adapter, PublicSignals(0, 1.0))
    return training


@functools.cache
def _commit(site: str, population: int, kept: int) -> tuple[Commitment, tuple[float, ...]]:
    """Calibrating takes longer than training."""
    return commit(RecordLevelSettings.from_json(site), population, records=kept)


def run(training: PrivateSgd, steps: int) -> Tensor:
    """The adapter after so many steps; the public loss is made up."""
    for step in range(1, steps + 1):
        training.step()
        training.observe(PublicSignals(step, 1.0 / step, training.ledger.rho_spent))
    adapter: Tensor = training.state.adapter
    return adapter


def gradient(adapter: Tensor, data: Records, name: str = "llama") -> Tensor:
    """Gradients of all records one by one, by autograd through plain PEFT."""
    from client.engine.sequential import SequentialEngine

    model, spec, task = build(name)
    oracle = SequentialEngine(fresh(model), spec, task, precision="fp64")
    return torch.cat([chunk.rows for chunk in oracle.per_record_gradients(adapter, data)])
