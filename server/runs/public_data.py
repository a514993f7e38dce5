"""Training on the server's own public records before anybody is asked: a warm start.

It touches no client, so it costs no privacy. Records used here are left out of validation: a loss measured on
them would fall for reasons that have nothing to do with the model's worth. Beside the prepared data it is kept for the
next run that would train the same: a sweep over strategies trains it once.

`[site.span]`: public texts that the model writes, and a site's training inside the span of their gradients.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from client.data.prepare import prepare
from client.data.records import Records
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.models.files import fingerprint
from client.record_level.public_subspace import PublicSpan
from client.record_level.synthetic_texts import Synthesis, Synthesiser
from client.worker import local_seed, make_engine
from privacy import durable
from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.config.tables import Public
from server.run_folder.names import PUBLIC_START_FILE
from server.run_folder.provenance import code_version
from server.runs.assembly import Assembly, data_spec

log = logging.getLogger(__name__)

KEPT = "warm-starts"
"""Folder of warm starts in the data cache."""


@dataclass(frozen=True)
class PublicTraining:
    """The warm start of a run: the public records it trains on, and the engine that does it.

    Attributes:
        config: what is switched on.
        records: the first ``training-fraction`` of the public validation records; none if nothing is switched on.
        engine: None if nothing is switched on.
        folder: where warm starts are kept.
        name: digest of everything that decides the warm start, but for the adapter it begins with.
    """

    config: Public
    records: Records
    engine: Engine | None
    seed: int
    folder: Path
    name: str

    @staticmethod
    def of(assembly: Assembly) -> "PublicTraining":
        """Prepare the warm start of an assembled run."""
        config, public = assembly.config.public, assembly.data.validation
        wanted = config.warm_start_epochs > 0
        used = round(config.training_fraction * len(public)) if wanted else 0
        engine = make_engine(assembly.job) if wanted else None
        if engine is not None and config.warm_start_factors == "both":
            engine.train_factors("both")
        name = _decisive(assembly, used) if wanted else ""
        folder = assembly.data.folder.parent / KEPT
        return PublicTraining(config, public.select(np.arange(used)), engine, assembly.config.seed, folder, name)

    @property
    def num_records(self) -> int:
        """The number of the first public records that are trained on, so that they do not validate."""
        return len(self.records)

    def warm_start(self, start: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """Train the adapter on the public records; ``start`` itself where the warm start is switched off."""
        if self.engine is None:
            return start
        local = LocalTraining(
            optimizer="adamw",
            learning_rate=self.config.warm_start_learning_rate,
            batch_size=self.config.warm_start_batch_size,
            epochs=self.config.warm_start_epochs,
        )
        engine, seed = self.engine, local_seed(self.seed, 0, 0)
        digest = hashlib.sha256(start.contiguous().numpy().tobytes())
        digest.update(self.name.encode())
        file = self.folder / f"{digest.hexdigest()[:24]}.safetensors"
        return load_or_make(file, lambda: train_without_noise(engine, start, self.records, local, seed))


def public_first_tokens(config: RunConfig) -> Integer[np.ndarray, " m"]:
    """Read the first token of every public validation record of a run's settings.

    Raises:
        ConfigError: they are not here.
    """
    if config.is_deployed:
        raise ConfigError("the records of this run lie at its nodes; give public beginnings of texts: --prompts FILE")
    public = prepare(data_spec(config)).validation
    if not len(public):
        raise ConfigError("this run has no public validation records; give public beginnings of texts: --prompts FILE")
    return np.asarray(public.tokens[public.offsets[:-1]])


def public_start(folder: Path) -> Tensor | None:
    """Load the adapter after the warm start of the run in this folder; None where it had none.

    Raises:
        CorruptRun: the file is damaged.
    """
    path = folder / PUBLIC_START_FILE
    if not path.is_file():
        return None
    try:
        return load_file(path)["adapter"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; restore or delete it: an audit can make it again") from error


def _decisive(assembly: Assembly, used: int) -> str:
    job, host = assembly.job, (torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    engine = job.replace(
        data=assembly.data.folder.name, local=LocalTraining(), canaries=0, first_canary=0, canary_key=""
    )
    parts = [
        code_version(assembly.config),
        fingerprint(job.model),
        engine.to_json(),
        assembly.config.public.to_json(),
        used,
        host,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_or_make(file: Path, make: Callable[[], Float[Tensor, " size"]]) -> Float[Tensor, " size"]:
    """Load the adapter in `file`; one that is not there, or damaged, is made and written first."""
    if file.is_file():
        try:
            return load_file(file)["adapter"]
        except (SafetensorError, KeyError) as error:
            log.warning("%s is damaged (%s) and is made again", file, error)
    made = make()
    durable.new_folder(file.parent)
    with durable.open_replacement(file) as draft:
        save_file({"adapter": made.contiguous()}, draft)
    return made


def train_without_noise(
    engine: Any, start: Float[Tensor, " size"], records: Records, local: LocalTraining, seed: int
) -> Float[Tensor, " size"]:
    """Train an adapter on all of these records at once, as one client does, without noise.

    Args:
        start: full vector; a new one of its shape is returned.
    """
    change = engine.train_all(start, [records], local, [seed])[0]
    trainable = engine.layout.trainable_values(start)
    result: Tensor = engine.layout.with_trainable(start, trainable + change.to(trainable))
    return result


def public_span(assembly: Assembly, engine: Any) -> tuple[Float[Tensor, " size"], PublicSpan | None]:
    """Set up the span of public texts that `[site.span]` asks for, and the adapter that a site starts from.

    Nothing private is read and nothing spent. The first texts are written by the base model, and the adapter is then
    trained on them: both are public and come out the same again when a run is resumed.

    Raises:
        ConfigError: settings that do not fit each other or the model.
    """
    config = assembly.config
    span, start = config.site.span, assembly.start
    if not span.method:
        return start, None
    writer, tokenizer = config.engine.load_rounded(config.model.name, "causal-lm")
    try:
        synthesis = Synthesis(
            samples=span.samples,
            longest=config.model.max_length,
            openings=tuple(opening.strip() for opening in span.openings.split("|") if opening.strip()),
            variants=span.variants,
            form=span.form,
            instruction=span.instruction,
            rule=span.rule,
        )
        synthesiser = Synthesiser(writer, tokenizer, assembly.spec, synthesis, config.seed, engine.device)
        texts = synthesiser.initial(start)
        evolve = synthesiser.evolve_texts if span.evolve and span.method == "coefficients" else None
        inside = PublicSpan(engine, texts, span.method, span.directions, span.residual_bound, evolve)
    except ValueError as error:
        raise ConfigError(f"site.span: {error}") from error
    if span.warm_start_epochs:
        local = LocalTraining(
            optimizer="adamw",
            learning_rate=span.warm_start_learning_rate,
            batch_size=8,
            epochs=span.warm_start_epochs,
        )
        start = train_without_noise(engine, start, texts, local, config.seed)
    return start, inside
