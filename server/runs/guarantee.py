"""What a recipe guarantees, in the weakest words that are true.

- ``record``: every phase that reads private texts is differentially private. A record-level (epsilon, delta).
- ``selective``: the phases without noise read redacted texts only. Selective DP: neighbours differ in the sensitive
  spans of ONE record, as a public policy finds them, and have the same redacted texts, so that the ordinary phases
  cannot tell them apart. (Neither is a text that occurs among the public records: such a record was left out before.)
  It protects nothing that the detector misses, and neither presence nor the rest of a record.
  At record level epsilon is infinite. Neighbours of this kind REPLACE a record, so the epsilon printed is that of
  replacement, which is larger than the one for adding or removing that JFT and ATDP print.
- ``none``: a phase without noise read original texts. Epsilon is infinite, whatever follows.

Who trusts whom with what in a silo, and what its guarantee does not cover: the words of its privacy.json.
"""

from dataclasses import asdict, dataclass
from typing import Any

from client.data.sensitive import make_detector
from privacy.accountants import composition
from privacy.ledger.statement import rounded_up
from server.config.schema import RunConfig
from server.runs.phase_plan import Phases, PlannedNoise


@dataclass(frozen=True)
class Guarantee:
    """The guarantee of a whole recipe.

    Attributes:
        kind: ``"record"``, ``"selective"`` or ``"none"``.
        delta: of every epsilon here.
        record_epsilon: one unit added or removed, rounded UP; None is infinite.
        selective_epsilon: the sensitive spans of one record replaced, rounded UP; None if there is no such guarantee.
        noise_epsilon: what the private phases cost by themselves; no guarantee of the recipe unless ``kind`` is
            ``"record"``.
        policy: detectors that selective DP depends on, or "".
        not_private: why there is no record-level guarantee; the stamp of every artefact. None if there is one.
    """

    kind: str
    delta: float
    record_epsilon: float | None
    selective_epsilon: float | None
    noise_epsilon: float
    policy: str
    not_private: str | None

    @property
    def sentence(self) -> str:
        """The guarantee in plain words."""
        at = f"at delta {self.delta:g}"
        if self.kind == "record":
            return (
                f"Adding or removing one protected unit: epsilon at most {self.record_epsilon:g} {at}; every phase "
                "that reads private texts is differentially private."
            )
        if self.kind == "selective":
            return (
                f"NOT PRIVATE at record level (epsilon infinite): {self.not_private}. selective-DP (policy "
                f"{self.policy}, detector assumed perfect): epsilon at most {self.selective_epsilon:g} {at}, for the "
                "sensitive spans of one record; what the detector misses has no protection."
            )
        return f"NOT PRIVATE (epsilon infinite): {self.not_private}."

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; infinity is the word."""
        values = {"sentence": self.sentence, **asdict(self)}
        return values | {"record_epsilon": self.record_epsilon if self.kind == "record" else "infinite"}


def guarantee_of(recipe: Phases, planned: PlannedNoise) -> Guarantee:
    """The guarantee of `recipe` with the noise of `planned`."""
    if not recipe.ordinary:
        return Guarantee("record", recipe.delta, planned.epsilon, None, planned.epsilon, "", None)
    readers = [phase.name for phase in recipe.ordinary if phase.text != "redacted"]
    if readers:
        reason = f"phase {' and '.join(repr(name) for name in readers)} trains on private texts without noise"
        return Guarantee("none", recipe.delta, None, None, planned.epsilon, "", reason)
    policy = ", ".join(dict.fromkeys(make_detector(recipe.detector_of(phase)).name for phase in recipe.ordinary))
    names = " and ".join(repr(phase.name) for phase in recipe.ordinary)
    reason = f"phase {names} trains without noise on texts redacted by {policy}"
    selective = 0.0
    if planned.floor:
        selective, _ = composition.tightest_bound(planned.floor, recipe.delta, adjacency="replace_one")
    return Guarantee("selective", recipe.delta, None, rounded_up(selective, 4), planned.epsilon, policy, reason)


TRUST = (
    "the silo itself: it holds the records, draws the batches and adds the noise; the guarantee is against everyone "
    "who sees only what the run releases (the adapter, its metrics, its ledger)"
)
NOT_COVERED = (
    "choices made by looking at other runs on the same data (hyper-parameters, seeds, the best of several models): "
    "every such run spends an epsilon of its own, and they add up",
    "the number of protected units, the names of the labels, the texts' largest length and every setting: they are "
    "taken as public",
    "the held-out validation and test records: they are not among the protected, and their metrics are published",
    "which units were in a file before these and the training records were drawn from it",
    "one person behind several units: k units together are protected by a k-fold group guarantee only",
    "the base model: what it was trained on before",
    "anything computed on the data outside this ledger, such as the prepared files, logs and timing inside the silo",
    "that a silo fails: a record that makes the whole of a step raise shows in that",
)


def not_covered(config: RunConfig, *, steered: bool) -> tuple[str, ...]:
    """What the guarantee of a silo does not cover, with what this run does with the held-out records.

    ``steered``: whether its controller or optimizer reads their loss.
    """
    found = list(NOT_COVERED)
    if config.public.warm_start_epochs:
        found.append(
            f"{config.public.training_fraction:.0%} of the held-out validation records: they are trained on WITHOUT "
            "noise before the first step (public.warm-start-epochs), so the adapter may hold what they say"
        )
    if steered:
        found.append(
            "the loss on held-out validation records after every step: it is read without noise and steers what is "
            f"released ({config.strategy.controller}, {config.strategy.optimizer})"
        )
    return tuple(found)
