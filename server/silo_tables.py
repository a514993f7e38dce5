"""Keys of a run that protects records inside silos; those of every run are in :mod:`server.run_tables`."""

from typing import Literal

from server.table import Count, CountOrAuto, Positive, Table


class Span(Table):
    """Public texts, written by the model, in the span of whose gradients a silo's releases lie: server.public_texts.

    ``method`` is one of ``client.public_span``, or empty for none: ``coefficients`` is PE-SGD where the texts
    ``evolve``, else FixSample; ``projection`` PDP-SGD, ``embedding-residual`` GEP. ``samples`` texts come of
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
    """How a client trains that protects its own records (``privacy.unit``), by ``client.dp_sgd``.

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
