"""What the server learns from its own public records: a warm start, and the subspace in which updates are clipped.

Neither touches a client, so neither costs privacy. Records used here are left out of validation: a loss measured on
them would fall for reasons that have nothing to do with the model's worth.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from client.data import PreparedData
from client.engine import Engine
from client.job import Job
from client.part import Part
from client.records import Records
from client.training import LocalTraining
from client.worker import local_seed, make_engine
from server.alignment import aligned
from server.assembly import Assembly
from server.config import ConfigError, Public, RunConfig


@dataclass(frozen=True)
class PublicTraining:
    """The public records that are trained on, and the engine that does it.

    Attributes:
        config: what is switched on.
        records: the first ``training-fraction`` of the public validation records; none if nothing is switched on.
        engine: None if nothing is switched on.
        seed: of the run.
    """

    config: Public
    records: Records
    engine: Engine | None
    seed: int

    @staticmethod
    def of(assembly: Assembly) -> "PublicTraining":
        """From an assembled run.

        Raises:
            ConfigError: the subspace is larger than the number of public training records.
        """
        return PublicTraining.on(assembly.config, assembly.data, assembly.job, assembly.setting.dimension(1))

    @staticmethod
    def on(run: RunConfig, data: PreparedData, job: Job, dimension: int) -> "PublicTraining":
        """From the settings of a run that trains so many values; as :meth:`of`."""
        config, public = run.public, data.validation
        wanted = config.warm_start_epochs or config.subspace
        used = round(config.training_fraction * len(public)) if wanted else 0
        if config.subspace > (most := min(used, dimension)):
            raise ConfigError(
                f"public.subspace = {config.subspace}: at most {most}, the number of "
                "public training records (public.training-fraction x data.validation-records) and of trained values"
            )
        engine = make_engine(job) if wanted else None
        return PublicTraining(config, public.select(np.arange(used)), engine, run.seed)

    @property
    def used(self) -> int:
        """How many of the first public records are not for validation."""
        return len(self.records)

    @property
    def refresh(self) -> int:
        """Rounds a subspace is kept."""
        return self.config.subspace_refresh

    def warm_start(self, start: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """The adapter after the warm start; ``start`` itself where it is switched off.

        With ``aligned``, a first warm start serves only to train the heads that :func:`server.alignment.aligned` needs.
        """
        if self.engine is None or not self.config.warm_start_epochs:
            return start
        if not self.config.aligned:
            return self._trained(start)
        return self._trained(aligned(start, self._trained(start), self.engine, self.records, self.seed))

    def _trained(self, start: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        assert self.engine is not None
        local = LocalTraining(
            optimizer="adamw",
            learning_rate=self.config.warm_start_learning_rate,
            batch_size=self.config.warm_start_batch_size,
            epochs=self.config.warm_start_epochs,
        )
        delta = self.engine.train_all(start, [self.records], local, [local_seed(self.seed, 0, 0)])[0]
        layout = self.engine.layout
        return layout.with_trainable(start, layout.trainable(start) + delta)

    def basis(self, adapter: Float[Tensor, " size"], part: Part) -> Float[Tensor, "k d"]:
        """The k leading right singular vectors of the public records' gradients at ``adapter``, as rows.

        In the space of what ``part`` sends. From the eigenvectors of the Gram matrix (n x n), in float64: n public
        records are far fewer than d values.
        """
        assert self.engine is not None, "public.subspace = 0"
        self.engine.switch(part.factors)
        layout = self.engine.layout
        start = adapter if part.ranks is None else layout.truncated(adapter, part.ranks)
        gradients = torch.zeros(len(self.records), part.layout(layout).dim)
        for chunk in self.engine.per_record_gradients(start, self.records):
            gradients[torch.from_numpy(chunk.records)] = part.sent(layout, chunk.rows.cpu())
        rows = gradients.double()
        _, vectors = torch.linalg.eigh(rows @ rows.T)
        leading = vectors[:, -self.config.subspace :].flip(1)
        # The QR step makes the rows orthonormal also where gradients are linearly dependent.
        basis: Tensor = torch.linalg.qr(rows.T @ leading).Q.T.float().contiguous()
        return basis
