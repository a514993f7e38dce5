"""What the server learns from its own public records before it asks anybody: a warm start.

It touches no client, so it costs no privacy. Records used here are left out of validation: a loss measured on
them would fall for reasons that have nothing to do with the model's worth.

`[silo.span]`: public texts that the model writes, and a site's training inside the span of their gradients.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from client.data.records import Records
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.record_level.public_subspace import PublicSpan
from client.record_level.synthetic_texts import Synthesis, Synthesiser
from client.worker import local_seed, make_engine
from server.config.load import ConfigError
from server.config.tables import Public
from server.runs.assembly import Assembly


@dataclass(frozen=True)
class PublicTraining:
    """The public records that are trained on, and the engine that does it.

    Attributes:
        config: what is switched on.
        records: the first ``training-fraction`` of the public validation records; none if nothing is switched on.
        engine: None if nothing is switched on.
    """

    config: Public
    records: Records
    engine: Engine | None
    seed: int

    @staticmethod
    def of(assembly: Assembly) -> "PublicTraining":
        """Of an assembled run."""
        config, public = assembly.config.public, assembly.data.validation
        wanted = config.warm_start_epochs > 0
        used = round(config.training_fraction * len(public)) if wanted else 0
        engine = make_engine(assembly.job) if wanted else None
        return PublicTraining(config, public.select(np.arange(used)), engine, assembly.config.seed)

    @property
    def used(self) -> int:
        """How many of the first public records are not for validation."""
        return len(self.records)

    def warm_start(self, start: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """The adapter after the warm start; ``start`` itself where it is switched off."""
        if self.engine is None:
            return start
        local = LocalTraining(
            optimizer="adamw",
            learning_rate=self.config.warm_start_learning_rate,
            batch_size=self.config.warm_start_batch_size,
            epochs=self.config.warm_start_epochs,
        )
        return trained_without_noise(self.engine, start, self.records, local, local_seed(self.seed, 0, 0))


def trained_without_noise(
    engine: Any, start: Float[Tensor, " size"], records: Records, local: LocalTraining, seed: int
) -> Float[Tensor, " size"]:
    """The adapter after training on all of these records at once, as one client does."""
    change = engine.train_all(start, [records], local, [seed])[0]
    trainable = engine.layout.trainable(start)
    result: Tensor = engine.layout.with_trainable(start, trainable + change.to(trainable))
    return result


def public_span(assembly: Assembly, engine: Any) -> tuple[Float[Tensor, " size"], PublicSpan | None]:
    """The adapter that a site starts from, and the span for its releases that `[silo.span]` asks for, if it does.

    Nothing private is read and nothing spent. The first texts are written by the base model, and the adapter is then
    trained on them: both are public and come out the same again when a run is resumed.

    Raises:
        ConfigError: settings that do not fit each other or the model.
    """
    config = assembly.config
    span, start = config.silo.span, assembly.start
    if not span.method:
        return start, None
    if config.model.task != "causal-lm" or config.silo.gradients != "stacked":
        raise ConfigError(
            f"silo.span.method = {span.method!r} needs model.task = 'causal-lm', whose model can write texts, and "
            "silo.gradients = 'stacked'"
        )
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
        evolve = synthesiser.evolved if span.evolve and span.method == "coefficients" else None
        inside = PublicSpan(engine, texts, span.method, span.directions, span.residual_bound, evolve)
    except ValueError as error:
        raise ConfigError(f"silo.span: {error}") from error
    if span.warm_start_epochs:
        local = LocalTraining(
            optimizer="adamw",
            learning_rate=span.warm_start_learning_rate,
            batch_size=8,
            epochs=span.warm_start_epochs,
        )
        start = trained_without_noise(engine, start, texts, local, config.seed)
    return start, inside
