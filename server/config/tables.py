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
from privacy.events import MOST_BUFFERS


class Secagg(Table):
    """Sums that the clients open together (``privacy.trust = "secagg"``), see docs/trust.md.

    Attributes:
        min_survivors: clients that make the whole noise; with fewer a round ends with nothing. 0 takes four fifths.
        colluding: clients that may tell the server what they know without weakening the guarantee.
        modulus_bits: width of the integers that are summed.
        step_timeout: seconds for each of the short steps of a sum.
        federation: file with everybody's public identity; empty in a simulation, which makes one.
    """

    min_survivors: CountOrAuto = 0
    colluding: CountOrAuto = 0
    modulus_bits: Literal[16, 24, 32] = 32
    step_timeout: Positive = 600.0
    federation: str = ""


class Privacy(PrivacyTarget):
    """The guarantee, for one unit added or removed.

    Attributes:
        unit: what is protected, be it a client or, inside every client with a ledger of its own, a record, or a
            group of records that share ``data.unit-column`` (for generated notes a patient). The last two train as
            ``[silo]`` says.
        non_private: allows what voids the guarantee; the run is marked as such.
        seeded_cohorts: cohorts are drawn from the seed, which voids the guarantee.
        trust: who is trusted with the sum over a cohort, be it the server or nobody (clients make the noise together).
        noise_correlation: whether the noise of a round takes off some of that before it, which pays where the noise
            multiplier is small; "banded" is BandMF, "blt" keeps a few buffers and counts on no sampling. Clients take
            part in turns with either (docs/correlated-noise.md).
        bands: of "banded" noise, groups of clients that take turns; 0 takes the number with the least noise.
        buffers: of "blt" noise, vectors the server keeps; 0 takes the fewest within a percent of the least noise.
    """

    unit: Literal["client", "record", "group"] = "client"
    non_private: bool = False
    seeded_cohorts: bool = False
    trust: Literal["server", "secagg"] = "server"
    noise_correlation: Literal["none", "banded", "blt"] = "none"
    bands: CountOrAuto = 0
    buffers: Annotated[int, Field(ge=0, le=MOST_BUFFERS)] = 0
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
    """The frozen base model and the LoRA adapter on it.

    Attributes:
        name: the base model, be it minilm, smollm2, lacquer-small, a folder of transformers, or a hub id.
        task: what is learnt, be it labels, texts, summaries or answers.
        rank: r of every adapter; its values grow with it.
        alpha: the scale of an adapter is alpha / rank.
        targets: names of the linear layers that get an adapter, separated by commas; "auto" takes
            the queries and values of the model's attention, "all-linear" every linear layer of its blocks.
        layers: how many layers, from the top, are adapted; 0 adapts all.
        max_length: most tokens of a record; what is longer is cut.
        chat_template: renders conversations (Jinja); empty takes the tokenizer's own.
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

    Attributes:
        training_fraction: share of the public validation records that is trained on, and no longer validated with, if
            there is a warm start.
        warm_start_epochs: passes over these records before round 1; 0 is no warm start.
        warm_start_learning_rate: of AdamW in the warm start.
        warm_start_batch_size: records per step of the warm start.
    """

    training_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    warm_start_epochs: CountOrAuto = 0
    warm_start_learning_rate: Positive = 0.003
    warm_start_batch_size: Count = 32


class Engine(FrozenBase):
    """Where and how the clients train.

    Attributes:
        kind: Flower's simulation on Ray, or all in one process.
        workers: processes that train; 0 takes one per GPU, or per core where there is none.
        sequential: clients train one after the other with plain PEFT; slow, for comparison.
        token_budget: most tokens of a micro-batch, padding included; 0 chooses by the memory there is.
        prefix_cache_mb: memory a worker may use to keep the hidden states below the lowest adapter; 0 keeps none.
        round_timeout: seconds after which a client's reply is no longer waited for.
        ray_address: HOST:PORT of a Ray cluster that is already there (as ``ray start`` says); needs ``workers``, for
            how many it has room. Empty starts Ray for the run, on this host. See docs/scale.md.
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
    """How clients are laid out on Flower's nodes.

    Attributes:
        clients_per_node: with 0 a node is a worker and trains its share of the cohort, with 1 it is one client.
    """

    clients_per_node: Annotated[int, Field(ge=0, le=1)] = 0


class Evaluation(Table):
    """What is measured on public records. Runs of answers or summaries end with what the adapter writes to some.

    Attributes:
        every: rounds between two evaluations on the public validation set; controllers that read it need 1.
        rouge_records: answers to test records that ROUGE is measured on; 0 for none.
        rouge_tokens: most new tokens of an answer; 0 takes half of ``model.max-length``.
        examples: answers that are shown beside what the base model says.
    """

    every: Count = 1
    rouge_records: CountOrAuto = 50
    rouge_tokens: CountOrAuto = 0
    examples: CountOrAuto = 5


class Audit(Table):
    """What a run carries for an attack on it (``lacquer audit``), see docs/audit.md.

    Attributes:
        canaries: how many of the protected units, the last ones, are canaries: each of them that a secret coin takes in
            brings a made-up update in place of its own. The guarantee stays; the model is not for use.
    """

    canaries: CountOrAuto = 0


class Span(Table):
    """Public texts, written by the model, in the span of whose gradients a site's releases lie.

    Attributes:
        method: how releases lie in the span; empty for none. ``coefficients`` is PE-SGD where the
            texts ``evolve``, else FixSample; ``projection`` is PDP-SGD, ``embedding-residual`` GEP.
        evolve: whether the texts change during the run.
        samples: how many texts.
        variants: texts that come of one seed text.
        openings: beginnings that random texts continue, separated by ``|``.
        form: how a text is varied.
        instruction: what the model is asked where ``form`` is ``instruction``; holds {sample} and {tone}.
        rule: how the weight of a text becomes its chance to be kept.
        directions: size of the basis, for the methods with one.
        residual_bound: GEP's S1; S0 is the controller's threshold.
        warm_start_epochs: passes over the first texts, which cost no privacy, before step 1.
        warm_start_learning_rate: of these passes.
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
    run of one site.

    Attributes:
        steps: private steps of every site in a round, where several are averaged.
        gradients: how gradients of single records are computed.
        checkpoint_every: steps between two checkpoints.
    """

    steps: Count = 1
    gradients: Literal["stacked", "opacus"] = "stacked"
    checkpoint_every: Count = 10
    span: Span = Span()
