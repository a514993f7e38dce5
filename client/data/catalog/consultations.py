"""Synthetic consultations: a patient asks, a clinician answers in the three lines of the house.

Patients and findings are those of :mod:`client.data.catalog.notes`, all invented. A question tells two or three of them
with their status; the answer says whether one of them is a red flag that is present now, the next step, and what to do
until then. Its form is always the same and unlike what a language model says by itself, so that anyone can see in an
answer whether a model has learnt it; whether it says "urgent" rightly needs the question read.

Users are numbered. Consultation `j` of user `i` of a seed is the same on every machine.
"""

import functools
import importlib.resources
import tomllib
from dataclasses import dataclass
from typing import Any

from client.data.catalog.notes import Draws, Finding, Writer, draw_findings, grammar, invent_patient
from client.data.columns import preferences
from client.data.conversations import to_text
from privacy import checks


@functools.cache
def words_text() -> str:
    """The file of words, for fingerprints of generated data."""
    return importlib.resources.files("client.data.catalog").joinpath("consultations.toml").read_text(encoding="utf-8")


@functools.cache
def words() -> dict[str, Any]:
    """Openings, questions and answers."""
    return tomllib.loads(words_text())


@dataclass(frozen=True, slots=True)
class Consultation:
    """One question and its answer.

    Attributes:
        user: number of the patient.
        question, answer: texts.
        wrong: an answer of the other kind, about another finding where there is one.
        urgent: whether a red flag is present now.
    """

    user: int
    question: str
    answer: str
    wrong: str
    urgent: bool

    @property
    def text(self) -> str:
        """The conversation, as :mod:`client.data.conversations` keeps it."""
        return to_text([{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}])

    @property
    def pair(self) -> str:
        """The question with both answers, as :mod:`client.data.columns.preferences` keeps them."""
        return preferences.to_text(f"{self.question}\n", self.answer, self.wrong)


def generate(users: int, each: int, seed: int, start: int = 0) -> list[Consultation]:
    """`each` consultations of users number `start` to ``start + users - 1``."""
    checks.integer_at_least(0, users=users, start=start)
    checks.integer_at_least(1, each=each)
    return [_consultation(seed, user, number) for user in range(start, start + users) for number in range(each)]


def _consultation(seed: int, user: int, number: int) -> Consultation:
    draws, said = Draws(seed, "consultation", user, number), words()
    urgent = draws.chance(0.5)
    findings = draw_findings(draws, urgent)
    asked = Writer(draws, seed, invent_patient(seed, user))
    asked.write(draws.choice(said["openings"]))
    listed = grammar()
    worded = [(finding, draws.choice(listed["red" if finding.red else "benign"][finding.name])) for finding in findings]
    for finding, wording in worded:
        asked.write(draws.choice(said["told"][finding.status]), wording)
    asked.write(draws.choice(said["questions"]))
    answer, wrong = (_answer(draws, worded, kind) for kind in (urgent, not urgent))
    return Consultation(user, asked.text, answer, wrong, urgent)


def _answer(draws: Draws, worded: list[tuple[Finding, str]], urgent: bool) -> str:
    said, kind = words(), "urgent" if urgent else "routine"
    about = next(wording for finding, wording in _by_weight(worded, urgent))
    return str(
        said["answers"][kind].format(
            x=about, step=draws.choice(said["steps"][kind]), care=draws.choice(said["care"][kind])
        )
    )


def _by_weight(worded: list[tuple[Finding, str]], urgent: bool) -> list[tuple[Finding, str]]:
    """What the answer is about first: a red flag that is present, else an everyday finding that is present."""

    def weight(item: tuple[Finding, str]) -> bool:
        finding = item[0]
        return finding.status == "present" and finding.red == urgent

    return sorted(worded, key=weight, reverse=True)
