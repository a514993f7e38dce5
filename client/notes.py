"""Synthetic clinical notes with gold spans of personal data and a known best possible accuracy.

The task: does a note call for urgent follow-up (label 1) or not (label 0)? A note states two or three findings. A
finding is a red flag or an everyday one and has a status: present now, denied, resolved in the past, a relative's, or
only warned about. The clean label is 1 exactly if some red flag is present now. The published label is the clean one,
flipped with probability ``LABEL_NOISE`` = 3% independently of everything else; half the clean labels are 1. The wording
determines findings and statuses, so the best possible (Bayes) accuracy of a classifier that reads the text is
``BAYES_ACCURACY`` = 97%, and the best cross-entropy ``-(.97 ln .97 + .03 ln .03)`` = 0.135 nats.
A word list of red flags does not suffice: many routine notes name one that is denied, old, a relative's or only
warned about.

Every note names a patient or their record number, and may hold dates, ages, telephone numbers, e-mail and postal
addresses, insurance numbers, relatives and doctors: all invented (names and places from Faker's US lists, telephone
numbers from the fictional 555 exchange, mail at example domains), and all marked as spans ``text[start:end]``.

Notes are numbered. Note `i` of a seed is the same on every machine, in every process, whatever range is generated, for
one version of Faker and of the grammar. Patients own one, two or three consecutive notes each, and ranges that start
at a multiple of ``NOTES_PER_BLOCK`` never share one.
"""

from dataclasses import dataclass
from typing import Any, Literal

from client.note_writer import Draws, Patient, Span, Writer, grammar, invent_patient
from privacy import checks

LABEL_NOISE = 0.03
BAYES_ACCURACY = 1 - LABEL_NOISE
LABELS = ("routine", "urgent")
NOTES_PER_PATIENT = (1, 2, 3)
NOTES_PER_BLOCK = sum(NOTES_PER_PATIENT)

Status = Literal["present", "denied", "resolved", "relative", "conditional"]

# How a red flag that is not the patient's now is told; denial is the most common in real notes too.
_NOT_NOW: tuple[Status, ...] = ("denied", "denied", "resolved", "relative", "conditional")
_THREE_FINDINGS = 0.15
_SECOND_RED_FLAG = 0.2
_RED_BUT_NOT_NOW = 0.12
_BENIGN_DENIED = 0.25
_FOOTER = 0.2


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of a note: which finding, whether it is a red flag, and its status."""

    name: str
    red: bool
    status: Status


@dataclass(frozen=True, slots=True)
class Note:
    """One note, its label, what it was made from, and the personal data in it."""

    number: int
    text: str
    label: int
    clean_label: int
    findings: tuple[Finding, ...]
    patient: Patient
    spans: tuple[Span, ...]


def generate(count: int, seed: int, start: int = 0) -> list[Note]:
    """Notes number `start` to ``start + count - 1`` of `seed`; about 15,000 a second on one core.

    Raises:
        ValueError: `start` is not a multiple of ``NOTES_PER_BLOCK`` (a patient would be torn apart).
    """
    checks.integer_at_least(0, count=count, start=start)
    if start % NOTES_PER_BLOCK:
        raise ValueError(f"start must be a multiple of {NOTES_PER_BLOCK}, got {start}; patients own several notes")
    notes: list[Note] = []
    patient = start // NOTES_PER_BLOCK * len(NOTES_PER_PATIENT)
    while len(notes) < count:
        owner = invent_patient(seed, patient)
        for _ in range(min(NOTES_PER_PATIENT[patient % len(NOTES_PER_PATIENT)], count - len(notes))):
            notes.append(_note(seed, start + len(notes), owner))
        patient += 1
    return notes


def split(train: int, validation: int, test: int, seed: int) -> tuple[list[Note], list[Note], list[Note]]:
    """Notes for clients, public validation and test, of `seed`; no patient is in two of them."""
    train_start = 0
    validation_start = train_start + _whole_blocks(train)
    test_start = validation_start + _whole_blocks(validation)
    return (
        generate(train, seed, train_start),
        generate(validation, seed, validation_start),
        generate(test, seed, test_start),
    )


def _whole_blocks(count: int) -> int:
    return -(-count // NOTES_PER_BLOCK) * NOTES_PER_BLOCK


def _findings(draws: Draws, urgent: bool) -> list[Finding]:
    """Two or three distinct findings in random order, of which a red flag is present exactly if `urgent`."""
    red, benign = list(grammar()["red"]), list(grammar()["benign"])
    size = 2 + draws.chance(_THREE_FINDINGS)
    findings: list[Finding] = []
    if urgent:
        present = 1 + draws.chance(_SECOND_RED_FLAG)
        findings += [Finding(_take(red, draws), True, "present") for _ in range(present)]
    while len(findings) < size:
        if draws.chance(_RED_BUT_NOT_NOW):
            findings.append(Finding(_take(red, draws), True, draws.choice(_NOT_NOW)))
        else:
            status: Status = "denied" if draws.chance(_BENIGN_DENIED) else "present"
            findings.append(Finding(_take(benign, draws), False, status))
    return [_take(findings, draws) for _ in range(len(findings))]


def _take(items: list[Any], draws: Draws) -> Any:
    return items.pop(draws.below(len(items)))


def _note(seed: int, number: int, patient: Patient) -> Note:
    draws, words = Draws(seed, "note", number), grammar()
    clean = int(draws.chance(0.5))
    label = 1 - clean if draws.chance(LABEL_NOISE) else clean
    findings = _findings(draws, bool(clean))
    writer = Writer(draws, seed, patient)
    writer.write(draws.choice(words["headers"]))
    for finding in findings:
        wording = draws.choice(words["red" if finding.red else "benign"][finding.name])
        writer.write(draws.choice(words["statements"][finding.status]), wording)
    if draws.chance(_FOOTER):
        writer.write(draws.choice(words["footers"]))
    return Note(number, writer.text, label, clean, tuple(findings), patient, tuple(writer.spans))
