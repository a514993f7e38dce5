"""The outcome of a run in words: how it ended, what it guarantees, how long it took, what it answers."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from server.lineage import together_with_start
from simulations.report.notation import delta_text, duration_text, epsilon_text, number_text, percent_text
from simulations.report.read_run import Run

_STATE_TEXTS = {
    "completed": "Completed",
    "stopped-budget": "Stopped by its privacy budget",
    "failed": "Failed",
    "running": "Still running, or interrupted",
    "preparing": "Preparing, or interrupted",
    "unknown": "State unknown",
}

CLEAR = 2.0
"""A loss has clearly fallen where it fell by more than so many standard errors."""


@dataclass(frozen=True)
class Learnt:
    """The gain of private training over the model that it started from, on the same public validation records.

    Attributes:
        name: of the measure: accuracy, or perplexity of a language model.
        before, after: accuracy as a share; perplexity.
        who: whose records it was trained on.
    """

    name: str
    before: float
    after: float
    who: str

    @property
    def better(self) -> bool:
        """Whether anything was gained over the start."""
        return self.after > self.before if self.name == "accuracy" else self.after < self.before

    @property
    def before_text(self) -> str:
        return self._text(self.before)

    @property
    def after_text(self) -> str:
        return self._text(self.after)

    @property
    def added(self) -> str:
        """The gain in words, such as "clients added +1.6 points".

        Perplexity falls, so what is gained has a minus sign.
        """
        if self.name == "accuracy":
            return f"{self.who} added {self.change} points"
        return f"{self.who} changed it by {self.change}"

    @property
    def change(self) -> str:
        """The change in points of accuracy, or in per cent of the perplexity before."""
        if self.name == "accuracy":
            return f"{100 * (self.after - self.before):+.1f}"
        return f"{100 * (self.after / self.before - 1):+.1f}\u00a0%"

    @property
    def sentence(self) -> str:
        """The quality before and after training and the difference, in words."""
        return f"validation {self.name} {self.before_text} before round 1, {self.after_text} now: {self.added}"

    def _text(self, value: float) -> str:
        return percent_text(value) if self.name == "accuracy" else number_text(value)


def gain_of(run: Run) -> Learnt | None:
    """The gain of training so far; None where the start or the end was not measured."""
    if run.start is None:
        return None
    who = run.config.units_text if run.config else "clients"
    for name in ("perplexity", "accuracy"):
        before, after = getattr(run.start, f"validation_{name}"), run.result(f"validation_{name}")
        known = [value for r in run.rounds if (value := getattr(r, f"validation_{name}")) is not None]
        if after is None and known:
            after = known[-1]
        if before is not None and after is not None:
            return Learnt(name, before, after, who)
    return None


def clearly_better(run: Run) -> bool:
    """Whether training gained anything, and validation loss fell by more than chance; False where that is not known.

    An estimate: the standard deviation of what a record's or a token's loss changed by is taken to be the mean loss
    before. It is usually less, because both losses are of the same record.
    """
    found = gain_of(run)
    return found is not None and found.better and _fell(*validation_losses(run), run.result("validation_records"))


def _fell(before: float | None, after: float | None, count: float | None) -> bool:
    if not count or before is None or after is None:
        return False
    return before - after > CLEAR * before / math.sqrt(count)


@dataclass(frozen=True)
class BesidePublic:
    """A comparison of a run's model with the one that public records alone make, on the test set.

    Attributes:
        public: what public records alone come to, in words; they cost no privacy.
        run: what the run came to.
        better: whether the run's loss is lower by more than chance (:func:`clearly_better` says how that is judged).
    """

    public: str
    run: str
    better: bool


def beside_public(run: Run) -> BesidePublic | None:
    """Compare the run with its public start; None where there was none, or the run was not tested."""
    for name, text in (("perplexity", number_text), ("accuracy", percent_text)):
        before, after = run.result(f"public_test_{name}"), run.result(f"test_{name}")
        if before is not None and after is not None:
            losses = run.result("public_test_loss"), run.result("test_loss")
            better = _fell(*losses, run.result("test_records"))
            return BesidePublic(f"test {name} {text(before)}", text(after), better)
    return None


def validation_losses(run: Run) -> tuple[float | None, float | None]:
    """The validation loss before round 1 and now; None where it was not measured."""
    known = [record.validation_loss for record in run.rounds if record.validation_loss is not None]
    after = run.result("validation_loss")
    return run.start.validation_loss if run.start else None, known[-1] if after is None and known else after


def state_text(run: Run) -> str:
    """The state of the run, as a person says it."""
    return _STATE_TEXTS.get(run.state, run.state)


def guaranteed_pair(run: Run) -> tuple[float, float] | None:
    """The epsilon and delta that hold for the run; None if nothing guarantees anything."""
    if run.not_private or run.guarantee is None or "epsilon" not in run.guarantee:
        return None
    return float(run.guarantee["epsilon"]), float(run.guarantee["delta"])


def guarantee_sentence(run: Run) -> str:
    """The guarantee in one sentence."""
    guarantee = run.guarantee or {}
    if run.not_private and not guarantee.get("not_private"):
        return f"This run is NOT PRIVATE: {run.not_private}."
    if not guarantee:
        return "There is no readable ledger, so nothing can be said about privacy."
    return str(guarantee["sentence"])


def privacy_text(run: Run) -> str:
    """The guarantee as one pair of numbers, with what of it is spent if that is less."""
    if run.not_private:
        return "none"
    pair = guaranteed_pair(run)
    if pair is None:
        return "unknown"
    used, whole = spent_text(run), together_with_start(run.guarantee or {})
    text = f"epsilon at most {epsilon_text(pair[0])} at delta {delta_text(pair[1])}" + (f", {used}" if used else "")
    if whole is None:
        return text
    if not math.isfinite(whole[0]):
        return f"{text}, no guarantee together with what it went on from"
    return f"{text}, {epsilon_text(whole[0])} at {delta_text(whole[1])} together with what it went on from"


def selective_text(run: Run) -> str:
    """The guarantee that phases give where there is none at record level; "" if there is none either."""
    guarantee = run.guarantee or {}
    if guarantee.get("kind") != "selective":
        return ""
    epsilon, delta = float(guarantee["selective_epsilon"]), float(guarantee["delta"])
    return f"at record level; selective-DP: ε ≤ {epsilon_text(epsilon)} at δ = {delta_text(delta)}"


def spent_text(run: Run) -> str:
    """The text "1.46 spent" if the run has spent less than it is guaranteed to stay within, else empty."""
    pair, spent = guaranteed_pair(run), (run.guarantee or {}).get("epsilon_spent")
    if pair is None or spent is None or epsilon_text(spent) == epsilon_text(pair[0]):
        return ""
    return f"{epsilon_text(spent)} spent"


def resumed_text(run: Run) -> str:
    """Say how often the run was resumed, after which rounds, and at what cost; empty if it never was."""
    if not run.resumed:
        return ""
    rounds = ", ".join(str(max(resumed.round, 0)) for resumed in run.resumed)
    word = "round" if len(run.resumed) == 1 else "rounds"
    times = "once" if len(run.resumed) == 1 else f"{len(run.resumed)} times"
    text = f"It was interrupted and resumed {times}, after {word} {rounds}."
    if lost := run.resumed[-1].lost:
        which = "1 release was" if lost == 1 else f"{lost} releases were"
        text += f" {which} lost after the charge: the budget stands spent, so the run may end that many rounds earlier."
    if code := sorted({change for resumed in run.resumed for change in resumed.code}):
        text += f" It resumed with other code: {'; '.join(code)}."
    return text


def run_time(run: Run) -> str | None:
    """The wall time of the whole run, or of its rounds if it did not get to its end."""
    seconds = run.result("seconds")
    return training_time(run) if seconds is None else duration_text(seconds)


def training_time(run: Run) -> str | None:
    """The wall time of the rounds and their evaluations, or of the whole run where that of the rounds is not known."""
    seconds = sum(record.seconds for record in run.metrics) or run.result("seconds")
    return None if seconds is None else duration_text(seconds)


class Example(NamedTuple):
    """A test record with answers: the prompt, the reference, and the answers without and with the adapter."""

    prompt: str
    reference: str
    before: str
    after: str


def examples(run: Run) -> list[Example]:
    """The example answers in results.json; none where it has none, or is of an earlier version."""
    rows = (run.results or {}).get("examples")
    if not isinstance(rows, list):
        return []
    return [
        Example(*(str(row[name]) for name in Example._fields))
        for row in rows
        if isinstance(row, dict) and row.keys() >= set(Example._fields)
    ]
