"""One release of a run as everyone may see it: a type that has no place for a client's own numbers.

A :class:`RoundRecord` has a fixed set of fields, none of which holds a client's metric, the realised cohort, a count
of replies or a raw norm, and refuses tensors and arrays, the form in which such things travel. Further values enter
through :func:`released_values`, whose one argument says what the caller vouches for. Throughput is the *expected*
cohort over the round's wall time for the same reason.

Who was there (:class:`Presence`) stands in it as far as everybody may know it. Under a trusted server that is which
nodes of a deployment were connected before the cohort was drawn: whoever was drawn, and whatever their records are. How
many of the drawn ones contributed is not released, for the guarantee counts on a cohort that nobody knows. It is told
of sites with ledgers of their own, of which no amplification is claimed, and of secure sums, whose adjacency leaves
open what a client contributes and not that it does.

How long a round takes depends on who took part. An operator needs the wall time, so it is a field, and it is left out
of what is written for everybody (:meth:`RoundRecord.to_json`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

if TYPE_CHECKING:
    from client.models.tasks import Metrics

Phase = Literal["start", "histogram", "round"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases in the order in which a run has them."""

FURTHER = ("macro_f1", "perplexity")
"""Metrics that some tasks have beside loss and accuracy, by their name in :class:`client.models.tasks.Metrics`.

What is named here, and has a field ``validation_NAME`` below, is in every round's record and in results.json
(``test_NAME``), in TensorBoard and in trackers.
"""


class ReleasedValues(Mapping[str, float]):
    """Named numbers that a controller computed from releases and public data. Made by :func:`released_values` only."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, float], *, vouched: object = None) -> None:
        if vouched is not _VOUCHED:
            raise TypeError("ReleasedValues is made by released_values(released), which says what may be logged")
        self._values = dict(values)

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"ReleasedValues({self._values})"


_VOUCHED = object()


def released_values(released: Mapping[str, float]) -> ReleasedValues:
    """Vouch that numbers are functions of releases and public data, so that they may be logged.

    Args:
        released: name to plain Python float, e.g. a controller's noisy quantile estimate.

    Raises:
        TypeError: if a name is not a string or a value is not a float (tensors, arrays, counts and lists are refused:
            they are what raw client values come as).
    """
    for name, value in released.items():
        if not isinstance(name, str) or not isinstance(value, float):
            raise TypeError(
                f"released value {name!r} must be a float, got {type(value).__name__}; log a released number, "
                "never what a client sent"
            )
    return ReleasedValues(released, vouched=_VOUCHED)


NO_VALUES = released_values({})


@dataclass(frozen=True)
class Presence:
    """The parties of a round that were there, as far as everybody may know it.

    Attributes:
        nodes: clients of a deployment, or sites that were asked.
        connected: nodes that were, before the cohort was drawn; None in a simulation.
        contributed: sites, or clients of a secure sum, that are in the sum; None under a trusted server.
        missing: the others by name, and why, in the server's words or a site's own; empty if there are none.
    """

    nodes: int
    connected: int | None = None
    contributed: int | None = None
    missing: str = ""

    @property
    def text(self) -> str:
        """The presence in words, such as "2 of 3 contributed; client-2: it did not answer in time"."""
        count, did = (self.connected, "connected") if self.contributed is None else (self.contributed, "contributed")
        return f"{count} of {self.nodes} {did}" + (f"; {self.missing}" if self.missing else "")

    @property
    def is_complete(self) -> bool:
        """Whether nobody was missing."""
        return self.nodes == (self.connected if self.contributed is None else self.contributed)


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A release of a run as everyone may see it, or the model that it starts from, which releases nothing.

    Attributes:
        phase: "start" for the model before any client, "histogram" for the private histogram before training, "round"
            for a training round.
        round: 1..rounds; 0 for the first two.
        clip_bound: L2 threshold of the round (a function of earlier releases); None where there is no one number.
        noise_multiplier: noise standard deviation on the sum over the unit's joint L2 bound.
        epsilon_spent: upper bound on epsilon after this release, at the run's delta.
        epsilon_budget: epsilon the run may not exceed.
        validation_loss, validation_accuracy: on the public validation set; None where not evaluated.
        validation_macro_f1: of a classifier, see :mod:`client.models.confusion`.
        validation_perplexity: of a language model.
        validation_loss_within, validation_accuracy_within: of values that held-out units gave with noise: half the
            width of the 95 % interval around them. None for values on public records.
        validation_confusion, validation_confusion_within: a matrix of confusions that they gave, in units, by label
            (row) and answer (column), and that width of every cell.
        validation_tokens, validation_tokens_within: tokens that a language model predicts for them, as they said.
        update_norm: L2 norm of the released, noisy update.
        noise_norm: its part that noise alone explains in expectation, s*sqrt(d) (from the plan: public).
        signal_estimate: sqrt(max(update_norm^2 - d*s^2, 0)), a post-processing of the release.
        expected_cohort: q*N, clients; never the realised cohort.
        seconds: wall time of the round, evaluation included; 0 where it is not known.
        extra: what a controller wants shown, through :func:`released_values`.
        not_private: why the run has no guarantee, or None.
        presence: who was there; None where that is not known or everybody is one process.

    Raises:
        TypeError: for a value of another type than annotated, a tensor or an array above all.
        ValueError: for a round outside 0..rounds, a negative or non-finite time or cohort, an accuracy outside [0, 1].
    """

    phase: Phase
    round: int
    rounds: int
    epsilon_spent: float
    epsilon_budget: float
    noise_multiplier: float
    expected_cohort: float
    seconds: float = 0.0
    clip_bound: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    validation_macro_f1: float | None = None
    validation_perplexity: float | None = None
    validation_loss_within: float | None = None
    validation_accuracy_within: float | None = None
    validation_confusion: tuple[tuple[int, ...], ...] | None = None
    validation_confusion_within: float | None = None
    validation_tokens: float | None = None
    validation_tokens_within: float | None = None
    update_norm: float | None = None
    noise_norm: float | None = None
    signal_estimate: float | None = None
    extra: ReleasedValues = NO_VALUES
    not_private: str | None = None
    presence: Presence | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = _ALLOWED.get(field.name, (float,))
            if not isinstance(value, allowed) or isinstance(value, bool):
                names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
                raise TypeError(f"{field.name} must be {names}, got {type(value).__name__}")
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")
        if not 0 <= self.round <= self.rounds:
            raise ValueError(f"round must lie in 0..rounds = {self.rounds}, got {self.round}")
        for name in ("expected_cohort", "seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value}")
        if self.validation_accuracy is not None and not 0 <= self.validation_accuracy <= 1:
            raise ValueError(f"validation_accuracy must lie in [0, 1], got {self.validation_accuracy}")

    @classmethod
    def of_start(
        cls, metrics: "Metrics", *, rounds: int, epsilon: float, seconds: float, not_private: str | None
    ) -> Self:
        """Make the record of the model that a run starts from, on the public validation set.

        Nothing is released or spent for it.
        """
        return cls(
            phase="start",
            round=0,
            rounds=rounds,
            epsilon_spent=0.0,
            epsilon_budget=epsilon,
            noise_multiplier=0.0,
            expected_cohort=0.0,
            seconds=seconds,
            not_private=not_private,
            **validation_fields(metrics),
        )

    def __str__(self) -> str:
        """Describe the record in a sentence.

        Such as "Round 3 of 40: accuracy 81.2 %, loss 0.4113, clip threshold 0.52, epsilon 1.2 of 4."
        """
        head = {"start": "Before round 1", "histogram": "Histogram before round 1"}
        told = []
        if self.validation_perplexity is not None:
            told.append(f"perplexity {self.validation_perplexity:.4g}")
        elif self.validation_accuracy is not None:
            told.append(f"accuracy {100 * self.validation_accuracy:.1f}{within(self, 'accuracy')} %")
        if self.validation_loss is not None:
            told.append(f"loss {self.validation_loss:.4g}{within(self, 'loss')}")
        if self.clip_bound is not None:
            told.append(f"clip threshold {self.clip_bound:.4g}")
        if self.not_private is not None:
            told.append(f"not private: {self.not_private}")
        elif self.phase != "start":
            told.append(f"epsilon {self.epsilon_spent:.2f} of {self.epsilon_budget:g}")
        return f"{head.get(self.phase, f'Round {self.round} of {self.rounds}')}: {', '.join(told)}."

    @property
    def clients_per_second(self) -> float:
        """The expected number of clients trained per second of the round."""
        return self.expected_cohort / self.seconds if self.seconds > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON without the wall time, and without answers that the run did not ask for.

        Non-finite numbers become the strings "nan", "inf" and "-inf".
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seconds"}
        values["extra"] = dict(self.extra)
        values["presence"] = None if self.presence is None else asdict(self.presence)
        for name in ("validation_confusion", "validation_tokens"):
            if values[name] is None:
                del values[name], values[f"{name}_within"]
        return {name: _plain(value) for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make a record from its JSON form. Its values were vouched for when they were written."""
        restored = dict(values)
        for name in _NUMBERS:
            if restored.get(name) is not None:
                restored[name] = float(restored[name])
        if restored.get("presence") is not None:
            restored["presence"] = Presence(**restored["presence"])
        if restored.get("validation_confusion") is not None:
            restored["validation_confusion"] = tuple(map(tuple, restored["validation_confusion"]))
        restored["extra"] = released_values({name: float(value) for name, value in restored.get("extra", {}).items()})
        return cls(**restored)


def within(record: RoundRecord, name: str) -> str:
    """The half width of the 95 % interval around a released ``"accuracy"`` (in percent) or ``"loss"``, else nothing."""
    width = getattr(record, f"validation_{name}_within")
    if width is None:
        return ""
    return f" +- {100 * width:.1f}" if name == "accuracy" else f" +- {width:.2g}"


def validation_fields(metrics: "Metrics | None") -> dict[str, Any]:
    """The fields of a record that hold metrics on the public validation set; none where it was not evaluated."""
    if metrics is None:
        return {}
    released = metrics.confusion_within is not None
    return {
        "validation_confusion": metrics.confusion if released else None,
        "validation_confusion_within": metrics.confusion_within,
        "validation_tokens": metrics.tokens,
        "validation_tokens_within": metrics.tokens_within,
        "validation_loss": metrics.loss,
        "validation_accuracy": metrics.accuracy,
        **{f"validation_{name}": getattr(metrics, name) for name in FURTHER},
        "validation_loss_within": metrics.loss_within,
        "validation_accuracy_within": metrics.accuracy_within,
    }


_OPTIONAL = (float, type(None))
_ALLOWED: dict[str, tuple[type, ...]] = {
    "phase": (str,),
    "round": (int,),
    "rounds": (int,),
    "extra": (ReleasedValues,),
    "not_private": (str, type(None)),
    "presence": (Presence, type(None)),
    "validation_confusion": (tuple, type(None)),
    **{field.name: _OPTIONAL for field in fields(RoundRecord) if field.type == float | None},
}
_NUMBERS = tuple(field.name for field in fields(RoundRecord) if float in _ALLOWED.get(field.name, (float,)))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
