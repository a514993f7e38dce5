"""Keys of every run, table by table: type, limits, default. Those of silos are in :mod:`server.config.tables`.

What the tables of a configuration are made of: kebab-case keys, no unknown ones, numbers within their limits.

Keys of a run that protects records inside silos; those of every run are in :mod:`server.config.tables`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrAuto = Annotated[int, Field(ge=0)]


def _scalar(value: object) -> object:
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"must be a text, a number or a boolean, got {value!r}")
    return value


Options = dict[str, Annotated[str | int | float | bool, PlainValidator(_scalar)]]


def kebab(name: str) -> str:
    """The key that holds the field `name`."""
    return name.replace("_", "-")


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=kebab, validate_by_alias=True, validate_by_name=False, strict=True
    )


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


class Privacy(Table):
    """The guarantee. ``epsilon`` and ``delta`` hold for the whole run, for one unit added or removed.

    ``unit`` is a client; or, inside every client with a ledger of its own, a record, or a group of records that share
    ``data.unit-column`` (for generated notes a patient). The last two train as ``[silo]`` says.
    """

    unit: Literal["client", "record", "group"] = "client"
    epsilon: Positive = 4.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    noise: Literal["gaussian", "discrete", "insecure-zero"] = "gaussian"
    mode: Literal["floor", "filter"] = "floor"
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


class Strategy(Table):
    """What the server decides. Names come from the tables in ``strategies`` or are ``"package.module:Object"``."""

    controller: str = "dp-lac"
    controller_options: Options = Field(default_factory=dict)
    aggregation: str = "plain"
    aggregation_options: Options = Field(default_factory=dict)
    optimizer: str = "fedavg"
    optimizer_options: Options = Field(default_factory=dict)
    served_average: Fraction = 0.0


class Model(Table):
    """The frozen base model and the LoRA adapter on it. ``layers = 0`` adapts all layers, ``n`` the top n."""

    name: str = "minilm"
    task: Literal["classification", "causal-lm", "summarisation"] = "classification"
    rank: Count = 4
    alpha: Positive = 8.0
    targets: str = "query,value"
    layers: CountOrAuto = 0
    max_length: Annotated[int, Field(ge=4, le=4096)] = 128


class Data(Table):
    """Where records come from and how they become clients, a public validation set and a test set.

    ``least-words`` leaves out shorter records, public ones too, the test source excepted: a rule of the text alone.
    ``test-limit`` tests on so many records of the test source, the same for every seed; 0 tests on all.
    ``train-records`` deals so many of the records to the clients, drawn by the seed; 0 deals all.
    ``unit-column`` names what makes records one unit of privacy (a patient, a document). ``canaries`` secrets are
    planted into the training records for audits, see ``client.data.canaries``. ``sensitive`` says what is done about
    sensitive spans of the training records, which ``detector`` finds, see ``client.data.sensitive``.
    ``partition = "repeated"`` is for speed tests: any number of clients share the records, see
    ``client.data.partition``. ``held-by = "nodes"`` is a deployment: every node is one client and reads records of its
    own, in columns of these names; ``source`` and ``test-source`` then hold public records only, the validation and
    the test set.
    """

    held_by: Literal["server", "nodes"] = "server"

    source: str = "notes"
    test_source: str = ""
    text_column: str = "text"
    text_pair_column: str = ""
    label_column: str = "label"
    client_column: str = ""
    unit_column: str = ""
    partition: Literal["dirichlet", "iid", "natural", "repeated"] = "dirichlet"
    dirichlet_alpha: Positive = 1.0
    validation_records: Count = 1000
    test_records: Count = 1000
    least_words: CountOrAuto = 0
    test_limit: CountOrAuto = 0
    train_records: CountOrAuto = 0
    records_per_client: Count = 20
    canaries: CountOrAuto = 0
    canary_kind: Literal["six-digit", "secret-id", "id-record"] = "six-digit"
    canary_copies: Count = 10
    sensitive: Literal["none", "weights", "redaction"] = "none"
    detector: str = "regex"
    mask: str = "<MASK>"
    other_weight: Rate = 0.2
    cache: str = ""


class Public(Table):
    """What the server does with its own public records besides validation; none of it costs privacy.

    The first ``training-fraction`` of them is trained on and no longer validated with, if anything here is switched on.
    ``warm-start-epochs`` trains the adapter before round 1.
    """

    training_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    warm_start_epochs: CountOrAuto = 0
    warm_start_learning_rate: Positive = 0.003
    warm_start_batch_size: Count = 32


class Local(Table):
    """One client's training in one round. ``balance = "prior"`` adjusts the loss for the client's label skew.

    ``max-steps`` ends it early, 0 runs all epochs: with 1, a client takes one batch of its records, drawn anew in
    every round, which costs a fraction of the time where clients have many.
    """

    optimizer: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Positive = 0.1
    batch_size: Count = 16
    epochs: Count = 1
    max_steps: CountOrAuto = 0
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 0.0
    balance: Literal["none", "prior"] = "none"


class Engine(Table):
    """Where and how the clients train. ``workers = 0`` takes one worker per core (or GPU share).

    ``ray-address`` names a Ray cluster that is already there (``HOST:PORT``, as ``ray start`` says); it needs
    ``workers``, for how many it has room. Empty: Ray is started for the run, on this host. See docs/scale.md.
    """

    kind: Literal["flower", "inprocess"] = "flower"
    workers: CountOrAuto = 0
    sequential: bool = False
    precision: Literal["auto", "fp32", "bf16", "bf16-model"] = "auto"
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


class Simulation(Table):
    """``clients-per-node = 0``: a node is a worker and trains its share of the cohort; ``1``: a node is one client."""

    clients_per_node: Annotated[int, Field(ge=0, le=1)] = 0


class Evaluation(Table):
    """How often (in rounds) the public validation set is evaluated. Controllers that read it need ``every = 1``.

    For ``model.task = "summarisation"`` a run ends with ROUGE of the summaries that its adapter writes of the first
    ``rouge-records`` test records, 0 for none, of at most ``rouge-tokens`` new tokens each; 0 takes half of
    ``model.max-length``, which is what records keep of a summary.
    """

    every: Count = 1
    rouge_records: CountOrAuto = 50
    rouge_tokens: CountOrAuto = 0


class Span(Table):
    """Public texts, written by the model, in the span of whose gradients a silo's releases lie.

    ``method`` is one of ``client.record_level.public_subspace``, or empty for none: ``coefficients`` is PE-SGD where
    the texts ``evolve``, else FixSample; ``projection`` PDP-SGD, ``embedding-residual`` GEP. ``samples`` texts come of
    ``samples / variants`` seeds; random ones go on from ``openings``, which ``|`` separates. ``directions`` and
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


class Silo(Table):
    """How a client trains that protects its own records (``privacy.unit``), by ``client.record_level.dp_sgd``.

    ``strategy.controller`` and ``strategy.optimizer`` are then the silo's. ``rounds`` counts the private steps of a
    single silo; where several are averaged, each takes ``steps`` in a round. ``batch-size`` is the expected number of
    units in a batch. ``records-per-unit`` bounds the work on one group: 0 takes all its records.
    """

    steps: Count = 1
    batch_size: Count = 64
    records_per_unit: CountOrAuto = 0
    combine: Literal["mean", "sum"] = "mean"
    gradients: Literal["stacked", "opacus"] = "stacked"
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warm_up: CountOrAuto = 0
    checkpoint_every: Count = 10
    span: Span = Span()
