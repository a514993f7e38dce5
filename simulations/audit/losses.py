"""Losses of single records under a run's adapter, and under a reference that has seen no private record.

The reference is the public start: the base model with what was trained into it on public records, as the run kept it.
Where it kept none, the warm start is done again. A classifier whose run had none gets one here, because an untrained
head takes all records for alike.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from client.data.prepared import PreparedData
from client.data.records import Records
from client.engine.engine import Engine
from server.config.methods import methods
from server.evaluation.finished import FinishedRun
from server.runs.assembly import make_assembly
from server.runs.public_data import PublicTraining, public_start

Floats = NDArray[np.float64]

EPOCHS = 5
"""Epochs of the warm start that a classifier without one gets."""


def adapter_losses(run: FinishedRun, sets: list[Records]) -> list[Floats]:
    """Measure the loss of every record of each set under the run's adapter.

    That of a language model is the mean over its tokens.
    """
    engine, vector = run.engine()
    return [record_losses(engine, vector, records) for records in sets]


def reference_losses(run: FinishedRun, data: PreparedData, sets: list[Records]) -> list[Floats]:
    """Measure the loss of every record of each set under the reference.

    Raises:
        CorruptRun: the start that the run kept is damaged.
    """
    engine, start = _kept_start(run) or _made_start(run, data)
    return [record_losses(engine, start, records) for records in sets]


def _kept_start(run: FinishedRun) -> tuple[Engine, torch.Tensor] | None:
    start = public_start(run.folder)
    if start is None:
        return None
    engine, adapter = run.engine()
    return (engine, start) if start.shape == adapter.shape else None  # a method may have changed the adapter's form


def _made_start(run: FinishedRun, data: PreparedData) -> tuple[Engine, torch.Tensor]:
    config = run.config.replace(local=run.config.local.replace(balance="none"))
    if run.label_names and not config.public.warm_start_epochs and not config.model.adapter:
        config = config.replace(public=config.public.replace(warm_start_epochs=EPOCHS))
    assembly = make_assembly(config, methods(config), data, run.folder)
    public = PublicTraining.of(assembly)
    if public.engine is None:
        from client.worker import make_engine

        engine: Engine = make_engine(assembly.job)
    else:
        engine = public.engine
    return engine, public.warm_start(assembly.start)


def record_losses(engine: Engine, vector: torch.Tensor, records: Records) -> Floats:
    """Measure the loss of every record as a client of its own."""
    ones = [records.select([row]) for row in range(len(records))]
    return np.asarray(engine.losses(vector, ones).double().cpu().numpy(), dtype=np.float64)
