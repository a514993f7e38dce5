"""`[silo.span]`: public texts that the model writes, and a silo's training inside the span of their gradients."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from client.dp_sgd import PrivateSgd
from client.models import load_base
from client.public_span import PublicSpan, in_public_span
from client.synthetic import Synthesis, Synthesiser
from client.training import LocalTraining
from server.assembly import Assembly
from server.config import ConfigError


@dataclass(frozen=True)
class Spanned:
    """What a silo's training starts from.

    Attributes:
        start: the adapter.
        span: that its releases lie in; None for the whole space.
    """

    start: Float[Tensor, " size"]
    span: PublicSpan | None = None

    def around(self, training: PrivateSgd) -> PrivateSgd:
        """The training, inside the span."""
        return training if self.span is None else in_public_span(training, self.span)


def spanned(assembly: Assembly, engine: Any) -> Spanned:
    """The span that `[silo.span]` asks for. Nothing private is read and nothing spent.

    The first texts are written by the base model, and the adapter is then trained on them: both are public and come
    out the same again when a run goes on.

    Raises:
        ConfigError: settings that do not fit each other or the model.
    """
    config = assembly.config
    span, start = config.silo.span, assembly.start
    if not span.method:
        return Spanned(start)
    if config.model.task != "causal-lm" or config.silo.gradients != "stacked":
        raise ConfigError(
            f"silo.span.method = {span.method!r} needs model.task = 'causal-lm', whose model can write texts, and "
            "silo.gradients = 'stacked'"
        )
    writer, tokenizer = load_base(config.model.name, "causal-lm")
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
        local = LocalTraining("adamw", span.warm_start_learning_rate, batch_size=8, epochs=span.warm_start_epochs)
        layout, moved = engine.layout, engine.train_all(start, [texts], local, [config.seed])[0]
        start = layout.with_trainable(start, layout.trainable(start) + moved.to(start.dtype))
    return Spanned(start, inside)
