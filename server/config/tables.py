"""Every table of a run's settings: type, limits, default.

A table stands where it is used. ``[data]`` is :class:`client.data.spec.DataSettings`, ``[local]`` is
:class:`client.engine.local_training.LocalTraining`, ``[strategy]`` is
:class:`client.record_level.settings.MethodSettings`. Here are those that the server and the launcher use, and what they
add to ``[privacy]`` and ``[silo]``.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from client.data.spec import MaxLength, Task
from client.models.frozen_base import FrozenBase
from client.record_level.settings import PrivacyTarget, StepSettings
from client.settings import Count, CountOrAuto, Positive, Table


class Secagg(Table):
    """Sums that the clients open together (``privacy.trust = "secagg"``), see docs/trust.md.

    ``min-survivors`` clients make the whole noise; with fewer a round ends with nothing. 0 takes four fifths of them.
    ``colluding`` clients may tell the server what they know without weakening the guarantee. ``step-timeout`` is for
    the short steps, in seconds. ``federation`` is the file with everybody's public identity; a simulation makes one.
    """

    min_survivors: CountOrAuto = 0
    colluding: CountOrAuto = 0
    modulus_bits: Literal[16, 24, 32] = 32
    step_timeout: Positive = 600.0
    federation: str = ""


class Privacy(PrivacyTarget):
    """The guarantee, for one unit added or removed.

    ``unit`` is a client; or, inside every client with a ledger of its own, a record, or a group of records that share
    ``data.unit-column`` (for generated notes a patient). The last two train as ``[silo]`` says.
    """

    unit: Literal["client", "record", "group"] = "client"
    non_private: bool = False
    seeded_cohorts: bool = False
    trust: Literal["server", "secagg"] = "server"
    secagg: Secagg = Secagg()

    @model_validator(mode="after")
    def _insecure_needs_flag(self) -> "Privacy":
        for key, unsafe in (("noise", self.noise == "insecure-zero"), ("seeded-cohorts", self.seeded_cohorts)):
            if unsafe and not self.non_private:
                raise ValueError(
                    f"{key} = {getattr(self, key.replace('-', '_'))!r} voids the guarantee; "
                    "set privacy.non-private = true to run it, marked as such"
                )
        return self


class Model(Table):
    """The frozen base model and the LoRA adapter on it. ``layers = 0`` adapts all layers, ``n`` the top n.

    ``chat-template`` (Jinja) renders conversations, for ``task = "instruction"``; empty takes the tokenizer's own.
    """

    name: str = "minilm"
    task: Task = "classification"
    rank: Count = 4
    alpha: Positive = 8.0
    targets: str = "query,value"
    layers: CountOrAuto = 0
    max_length: MaxLength = 128
    chat_template: str = ""


class Public(Table):
    """What the server does with its own public records besides validation; none of it costs privacy.

    The first ``training-fraction`` of them is trained on and no longer validated with, if anything here is switched on.
    ``warm-start-epochs`` trains the adapter before round 1.
    """

    training_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    warm_start_epochs: CountOrAuto = 0
    warm_start_learning_rate: Positive = 0.003
    warm_start_batch_size: Count = 32


class Engine(FrozenBase):
    """Where and how the clients train. ``workers = 0`` takes one worker per core (or GPU share).

    ``ray-address`` names a Ray cluster that is already there (``HOST:PORT``, as ``ray start`` says); it needs
    ``workers``, for how many it has room. Empty: Ray is started for the run, on this host. See docs/scale.md.
    """

    kind: Literal["flower", "inprocess"] = "flower"
    workers: CountOrAuto = 0
    sequential: bool = False
    token_budget: CountOrAuto = 0
    prefix_cache_mb: CountOrAuto = 2048
    round_timeout: Positive = 3600.0
    ray_address: str = ""

    @model_validator(mode="after")
    def _cluster_needs_workers(self) -> "Engine":
        if self.ray_address and (self.kind != "flower" or self.workers == 0):
            raise ValueError(
                f"ray-address = {self.ray_address!r} needs engine.kind = 'flower' and engine.workers >= 1, the number "
                "of workers for which the cluster has cores (or GPUs)"
            )
        return self

    @model_validator(mode="after")
    def _plain_peft_keeps_every_activation(self) -> "Engine":
        if self.sequential and self.checkpoint_blocks:
            raise ValueError(
                "checkpoint-blocks = true needs engine.sequential = false: plain PEFT keeps every activation"
            )
        return self


class Simulation(Table):
    """``clients-per-node = 0``: a node is a worker and trains its share of the cohort; ``1``: a node is one client."""

    clients_per_node: Annotated[int, Field(ge=0, le=1)] = 0


class Evaluation(Table):
    """How often (in rounds) the public validation set is evaluated. Controllers that read it need ``every = 1``.

    With ``model.task = "instruction"`` or ``"summarisation"`` a run ends with what its adapter writes to the first test
    records: ROUGE of ``rouge-records`` answers, 0 for none, and ``examples`` beside what the base model says. Each has
    at most ``rouge-tokens`` new tokens; 0 takes half of ``model.max-length``.
    """

    every: Count = 1
    rouge_records: CountOrAuto = 50
    rouge_tokens: CountOrAuto = 0
    examples: CountOrAuto = 5


class Span(Table):
    """Public texts, written by the model, in the span of whose gradients a site's releases lie.

    ``method`` is one of ``client.record_level.public_subspace``, or empty for none: ``coefficients`` is PE-SGD where
    the texts ``evolve``, else FixSample; ``projection`` PDP-SGD, ``embedding-residual`` GEP. ``samples`` texts come of
    ``samples / variants`` seeds; random ones continue ``openings``, which ``|`` separates. ``directions`` and
    ``residual-bound`` (GEP's S1; S0 is the controller's threshold) are for the methods with a basis. The adapter is
    trained on the first texts, which are free, before step 1.
    """

    method: Literal["", "coefficients", "projection", "embedding-residual", "embedding"] = ""
    evolve: bool = True
    samples: Count = 200
    variants: Count = 2
    openings: str = "The|In this|A"
    form: Literal["continuation", "instruction"] = "continuation"
    instruction: str = "{sample}\nBased on the above sample, write another text of its kind {tone}:"
    rule: Literal["softmax", "proportional"] = "softmax"
    directions: Count = 50
    residual_bound: Positive = 1.0
    warm_start_epochs: CountOrAuto = 2
    warm_start_learning_rate: Positive = 1e-3


class Silo(StepSettings):
    """How a client trains that protects its own records (``privacy.unit``), by ``client.record_level.dp_sgd``.

    ``strategy.controller`` and ``strategy.optimizer`` are then the site's. ``rounds`` counts the private steps of a
    run of one site; where several are averaged, each takes ``steps`` in a round.
    """

    steps: Count = 1
    gradients: Literal["stacked", "opacus"] = "stacked"
    checkpoint_every: Count = 10
    span: Span = Span()
