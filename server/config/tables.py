"""Every table of a run's settings: type, limits, default.

A table stands where it is used. ``[data]`` is :class:`client.data.spec.DataSettings`, ``[local]`` is
:class:`client.engine.local_training.LocalTraining`, ``[strategy]`` is
:class:`client.record_level.settings.MethodSettings`. Here are those that the server and the launcher use, and what they
add to ``[privacy]`` and ``[site]``.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from client.data.spec import MaxLength, Task
from client.models.frozen.base import FrozenBase
from client.record_level.settings import PrivacyTarget, StepSettings
from client.settings import Count, CountOrAuto, NonNegative, Positive, Rate, Table
from privacy.events import MOST_BUFFERS


class Secagg(Table):
    """Sums that the clients open together (``privacy.trust = "secagg"``), see docs/trust.md.

    Attributes:
        min_survivors: fewest clients that must complete a round; together they make the whole noise. With fewer the
            round releases nothing. 0 takes four fifths of the clients.
        colluding: number of clients that may collude with the server without weakening the guarantee.
        modulus_bits: width in bits of the integers that are summed.
        step_timeout: seconds that a client has for each step of a sum.
        federation: file with the public identities of all clients; empty in a simulation, which makes its own.
    """

    min_survivors: CountOrAuto = 0
    colluding: CountOrAuto = 0
    modulus_bits: Literal[16, 24, 32] = 32
    step_timeout: Positive = 600.0
    federation: str = ""


class Privacy(PrivacyTarget):
    """The guarantee, for one unit added or removed.

    Attributes:
        unit: unit that is protected: a whole client, one record, or a group of records that share ``data.unit-column``
            (for generated notes a patient). With records and groups every client keeps a ledger of its own and trains
            as ``[site]`` says.
        non_private: permission for settings that void the guarantee; the run is then marked as not private.
        seeded_cohorts: cohorts drawn from the seed, which voids the guarantee.
        trust: party that adds the noise: the server, which is then trusted with the sum over a cohort, or the clients
            together (``secagg``), so that nobody sees a sum without noise.
        noise_correlation: correlation of the noise between rounds: a round takes off part of the noise before it, which
            pays where the noise multiplier is small. ``banded`` is BandMF; ``blt`` keeps a few buffers and needs no
            sampling. With either, clients take part in turns (docs/correlated-noise.md).
        bands: number of groups of clients that take turns, with ``banded`` noise; 0 takes the number with the least
            noise.
        buffers: number of vectors that the server keeps, with ``blt`` noise; 0 takes the fewest within a percent of the
            least noise.
        account: file of the account of these data, which pays for the whole run before its first charge
            (docs/budget.md); empty for none.
    """

    unit: Literal["client", "record", "group"] = "client"
    non_private: bool = False
    seeded_cohorts: bool = False
    trust: Literal["server", "secagg"] = "server"
    noise_correlation: Literal["none", "banded", "blt"] = "none"
    bands: CountOrAuto = 0
    buffers: Annotated[int, Field(ge=0, le=MOST_BUFFERS)] = 0
    account: str = ""
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
        name: base model: minilm, smollm2, lacquer-small, a folder in transformers' format, or a hub id.
        task: what the model learns: labels (classification), texts (causal-lm), summaries (summarisation), answers
            (instruction) or which of two answers people prefer (preference).
        rank: rank r of every adapter; the number of trained values grows with it.
        alpha: scale of an adapter: its output is multiplied by alpha / rank.
        targets: names of the linear layers that get an adapter, separated by commas; ``auto`` takes the queries and
            values of the model's attention, ``all-linear`` every linear layer of its blocks.
        layers: number of layers, counted from the top, that get adapters; 0 adapts all.
        max_length: most tokens of a record; longer records are cut.
        chat_template: Jinja template that renders conversations; empty takes the tokenizer's own.
        adapter: adapter that the run goes on from: the folder of a run that has ended, of an export, or one that PEFT
            has saved (docs/budget.md). Rank, alpha, targets and layers are then its own where they are not set; empty
            starts from the base model.
    """

    name: str = "minilm"
    task: Task = "classification"
    rank: Count = 4
    alpha: Positive = 8.0
    targets: str = "query,value"
    layers: CountOrAuto = 0
    max_length: MaxLength = 128
    chat_template: str = ""
    adapter: str = ""


class Public(Table):
    """Training of the server on its own public records; none of it costs privacy.

    Attributes:
        training_fraction: share of the public validation records that the warm start trains on; they no longer
            validate.
        warm_start_epochs: passes over those records before round 1; 0 leaves the warm start out. The result is kept in
            ``data.cache`` for runs that would train the same.
        warm_start_learning_rate: learning rate of AdamW in the warm start.
        warm_start_batch_size: records in a step of the warm start.
        warm_start_factors: ``"trained"`` trains what round 1 trains; ``"both"`` trains both LoRA factors, so that
            ``strategy.aggregation = "ffa"`` goes on from an A that public records chose.
    """

    training_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    warm_start_epochs: CountOrAuto = 0
    warm_start_learning_rate: Positive = 0.003
    warm_start_batch_size: Count = 32
    warm_start_factors: Literal["trained", "both"] = "trained"


class Engine(FrozenBase):
    """The place and the way in which the clients train.

    Attributes:
        kind: engine: Flower's simulation on Ray, or everything in one process.
        workers: number of processes that train; 0 takes one per GPU, or one per core where there is none.
        sequential: training of clients one after the other with plain PEFT; slow, for comparison.
        token_budget: most tokens of a micro-batch, padding included; 0 chooses by the free memory.
        prefix_cache_mb: memory in MB in which a worker keeps the hidden states below the lowest adapter; 0 keeps none.
        round_timeout: seconds after which the server stops waiting for a client's reply.
        ray_address: HOST:PORT of a Ray cluster that runs already (``ray start`` prints it), whose nodes are then asked
            for what they have. Empty starts Ray for the run, on this host. See docs/scale.md.
    """

    kind: Literal["flower", "inprocess"] = "flower"
    workers: CountOrAuto = 0
    sequential: bool = False
    token_budget: CountOrAuto = 0
    prefix_cache_mb: CountOrAuto = 2048
    round_timeout: Positive = 3600.0
    ray_address: str = ""

    @model_validator(mode="after")
    def _cluster_needs_flower(self) -> "Engine":
        if self.ray_address and self.kind != "flower":
            raise ValueError(f"ray-address = {self.ray_address!r} needs engine.kind = 'flower'")
        return self

    @property
    def base(self) -> FrozenBase:
        """The frozen base as every process is told: on a cluster with GPUs the server's host need not have one."""
        device = "auto" if self.ray_address and self.device == "cuda" else self.device
        return FrozenBase.of(self, device=device)

    @model_validator(mode="after")
    def _plain_peft_keeps_every_activation(self) -> "Engine":
        if self.sequential and self.checkpoint_blocks:
            raise ValueError(
                "checkpoint-blocks = true needs engine.sequential = false: plain PEFT keeps every activation"
            )
        return self


class Simulation(Table):
    """The layout of clients on Flower's nodes.

    Attributes:
        clients_per_node: clients on each of Flower's nodes: 1 makes every node one client; 0 makes every node a worker
            that trains its share of the cohort.
    """

    clients_per_node: Annotated[int, Field(ge=0, le=1)] = 0


class Evaluation(Table):
    """Measurements after rounds, and what is kept of them.

    Runs of answers or summaries end with what the adapter writes to some test records.

    Attributes:
        every: rounds from one evaluation on the validation set to the next; controllers that read it need 1.
        data: records that validate: ``public`` ones, exactly and for free, or those of clients that are held out and
            never trained on (``private``), whose bounded answers are released with noise and paid for (docs/data.md).
        held_out: share of the clients that are held out, with ``private``.
        epsilon: most that all evaluations may cost a held-out client; 0 takes ``privacy.epsilon``. A client is held out
            or trained on, so the run costs the larger of both and not their sum.
        sampling_rate: probability with which each held-out client is asked. Less than 1 saves time, never noise.
        loss_bound: largest loss that counts, in nats; 0 takes that of a guess twice (two times the logarithm of the
            number of labels, or of the two answers of a pair), for a language model 10.
        confusion: whether held-out clients also answer which labels they have and what the adapter takes them for, with
            ``private``; all three answers then have more noise, by the root of 3/2.
        tokens: most tokens of a held-out client that count, where a language model's held-out clients also answer how
            many it predicts, with ``private``; the same noise. 0 does not ask.
        keep: adapter that a run ends with: that of the ``last`` round, or of the one with the ``best`` validation loss.
        patience: evaluations in a row without a better loss after which a run ends early; 0 never ends it early.
        rouge_records: number of test records whose answers ROUGE measures; 0 for none.
        rouge_tokens: most new tokens of an answer; 0 takes half of ``model.max-length``.
        examples: number of answers that the report shows beside those of the base model.
    """

    every: Count = 1
    data: Literal["public", "private"] = "public"
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    epsilon: NonNegative = 0.0
    sampling_rate: Rate = 1.0
    loss_bound: NonNegative = 0.0
    confusion: bool = False
    tokens: CountOrAuto = 0
    keep: Literal["last", "best"] = "last"
    patience: CountOrAuto = 0
    rouge_records: CountOrAuto = 50
    rouge_tokens: CountOrAuto = 0
    examples: CountOrAuto = 5


class Audit(Table):
    """Canaries that a run carries for an attack on it (``lacquer audit``), see docs/audit.md.

    Attributes:
        canaries: number of protected units, the last ones, that are canaries. A secret coin decides for each whether it
            takes part; it then brings a made-up update. The guarantee stays, but the model is not for use.
    """

    canaries: CountOrAuto = 0


class Span(Table):
    """Public texts, written by the model, in the span of whose gradients a site's releases lie.

    Attributes:
        method: how releases lie in the span; empty leaves the span out. ``coefficients`` is PE-SGD where the texts
            ``evolve``, else FixSample; ``projection`` is PDP-SGD, ``embedding-residual`` GEP, ``embedding`` B-GEP.
        evolve: whether the texts change during the run.
        samples: number of texts.
        variants: number of texts that are made from one seed text.
        openings: beginnings that random texts continue, separated by ``|``.
        form: way in which a text is varied: the model continues it, or follows an instruction about it.
        instruction: request to the model where ``form`` is ``instruction``; holds {sample} and {tone}.
        rule: rule that turns the weight of a text into its chance to be kept.
        directions: size of the basis, for the methods that have one.
        residual_bound: clip threshold of GEP's residual (S1); that of the embedding (S0) is the controller's.
        warm_start_epochs: passes over the first texts before step 1; they cost no privacy.
        warm_start_learning_rate: learning rate of these passes.
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


class Site(StepSettings):
    """Training at a client that protects its own records (``privacy.unit``), by ``client.record_level.dp_sgd``.

    ``strategy.controller`` and ``strategy.optimizer`` are then the site's; of several sites that send coefficients
    (``site.span``), the optimizer is the server's. ``rounds`` counts the private steps of a run of one site.

    Attributes:
        steps: private steps that every site takes in a round, before the sites are averaged.
        gradients: way in which gradients of single records are computed: by Lacquer's stacked engine or by Opacus.
        checkpoint_every: steps from one checkpoint to the next.
    """

    steps: Count = 1
    gradients: Literal["stacked", "opacus"] = "stacked"
    checkpoint_every: Count = 10
    span: Span = Span()
