"""Warm start: train the adapter on part of the server's public records before round 1.

It touches no client, so it costs no privacy. The records it used are left out of validation from then on: a loss
measured on them would fall for reasons that have nothing to do with the model's worth.
"""

import numpy as np
from jaxtyping import Float
from torch import Tensor

from client.job import Job
from client.records import Records
from client.training import LocalTraining
from client.worker import local_seed, make_engine
from server.config import WarmStart


def warm_start(
    start: Float[Tensor, " size"], public: Records, job: Job, config: WarmStart
) -> tuple[Float[Tensor, " size"], int]:
    """The adapter after the warm start, and how many of the first public records it used."""
    used = round(config.fraction * len(public))
    if not config.epochs or not used:
        return start, 0
    engine = make_engine(job)
    local = LocalTraining(
        optimizer="adamw", learning_rate=config.learning_rate, batch_size=config.batch_size, epochs=config.epochs
    )
    records = public.select(np.arange(used))
    delta = engine.train_all(start, [records], local, [local_seed(job.seed, 0, 0)])[0]
    layout = engine.layout
    return layout.with_trainable(start, layout.trainable(start) + delta), used
