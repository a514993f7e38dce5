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

import functools
import importlib.resources
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Literal

from faker import Faker

from privacy import checks
from privacy.randomness.rng import simulation_generator

SpanKind = Literal["PERSON", "DATE", "AGE", "PHONE", "EMAIL", "ID", "ADDRESS"]

_FIRST_VISIT, _VISIT_DAYS = date(2021, 1, 4), 1400
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"^(?:an?|the) ")
_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()  # strftime's depend on the locale
_DRAWS = 96


@dataclass(frozen=True, slots=True)
class Span:
    """Personal data at ``text[start:end]``."""

    start: int
    end: int
    kind: SpanKind


@dataclass(frozen=True, slots=True)
class Patient:
    """An invented person of a note; `number` and `mrn` are unique within a seed."""

    number: int
    first: str
    last: str
    sex: Literal["F", "M"]
    birth: date
    mrn: str
    insurance: str
    phone: str
    email: str
    address: str


@functools.cache
def grammar_text() -> str:
    """The grammar file, for fingerprints of generated data."""
    return importlib.resources.files("client.data.catalog").joinpath("notes_grammar.toml").read_text(encoding="utf-8")


@functools.cache
def grammar() -> dict[str, Any]:
    """The grammar: templates, word lists, findings with their wordings."""
    return tomllib.loads(grammar_text())


@functools.lru_cache(maxsize=4)
def _pools(seed: int) -> dict[str, tuple[str, ...]]:
    """Lists of names and places. Faker is slow, so a few hundred of each are drawn once and combined."""
    fake = Faker("en_US")
    fake.seed_instance(int(simulation_generator(seed, "notes", "pools").integers(2**32)))
    makers = {
        "F": (fake.first_name_female, 300),
        "M": (fake.first_name_male, 300),
        "last": (fake.last_name, 600),
        "street": (fake.street_name, 400),
        "city": (fake.city, 300),
        "state": (fake.state_abbr, 60),
    }
    return {kind: tuple(dict.fromkeys(make() for _ in range(count))) for kind, (make, count) in makers.items()}


class Draws:
    """Uniform numbers of one stream, drawn in one call: a call per number would dominate the generator's time."""

    def __init__(self, seed: int, *stream: int | str) -> None:
        self._values: Iterator[float] = iter(simulation_generator(seed, "notes", *stream).random(_DRAWS).tolist())

    def below(self, limit: int) -> int:
        return int(next(self._values) * limit)

    def chance(self, probability: float) -> bool:
        return next(self._values) < probability

    def choice(self, options: Any) -> Any:
        return options[self.below(len(options))]


def invent_patient(seed: int, number: int) -> Patient:
    draws, pools = Draws(seed, "patient", number), _pools(seed)
    sex: Literal["F", "M"] = "F" if draws.chance(0.5) else "M"
    first, last = draws.choice(pools[sex]), draws.choice(pools["last"])
    handle = f"{first}.{last}" if draws.chance(0.5) else f"{first[0]}{last}{draws.below(90) + 10}"
    return Patient(
        number=number,
        first=first,
        last=last,
        sex=sex,
        birth=date(2003, 1, 1) - timedelta(days=draws.below(75 * 365)),
        # 39,916,801 is prime, so this walks all eight-digit numbers before it repeats one
        mrn=f"{(39_916_801 * number + 7_654_321 + 104_729 * seed) % 10**8:08d}",
        insurance=f"{draws.choice('ABCDEFGHJK')}{draws.choice('LMNPQRSTUV')}{draws.below(10**7):07d}",
        phone=f"({draws.below(700) + 201}) 555-{draws.below(10_000):04d}",
        email=f"{handle.lower()}@example.{draws.choice(('com', 'org', 'net'))}",
        address=f"{draws.below(980) + 11} {draws.choice(pools['street'])}, {draws.choice(pools['city'])}",
    )


class Writer:
    """Fills templates and keeps the offset of every piece of personal data."""

    def __init__(self, draws: Draws, seed: int, patient: Patient) -> None:
        self.text = ""
        self.spans: list[Span] = []
        self._draws, self._pools, self._patient = draws, _pools(seed), patient
        self._visit = _FIRST_VISIT + timedelta(days=draws.below(_VISIT_DAYS))

    def write(self, template: str, finding: str = "") -> None:
        """Append one sentence to the note; `finding` fills its place for a finding, if it has one."""
        if self.text:
            self.text += " "
        for index, piece in enumerate(_SLOT.split(template)):
            if index % 2 == 0:
                self.text += piece
            elif piece.lower() in ("x", "bare"):
                words = finding if piece.lower() == "x" else _ARTICLE.sub("", finding)
                self.text += words if piece.islower() else words[0].upper() + words[1:]
            else:
                value, kind = self._value(piece)
                if kind is not None:
                    self.spans.append(Span(len(self.text), len(self.text) + len(value), kind))
                self.text += value

    def _value(self, slot: str) -> tuple[str, SpanKind | None]:
        patient, draws, words = self._patient, self._draws, grammar()
        match slot:
            case "patient":
                return f"{patient.first} {patient.last}", "PERSON"
            case "first" | "last":
                return getattr(patient, slot), "PERSON"
            case "relative":
                return draws.choice(self._pools[draws.choice("FM")]), "PERSON"
            case "doctor":
                return f"Dr. {draws.choice(self._pools['last'])}", "PERSON"
            case "age":
                return str((self._visit - patient.birth).days * 4 // 1461), "AGE"
            case "date":
                return f"{self._visit:%m/%d/%Y}", "DATE"
            case "date_short":
                return _day(self._visit), "DATE"
            case "appointment":
                return _day(self._visit + timedelta(days=7 + draws.below(90))), "DATE"
            case "birth":
                return f"{patient.birth:%m/%d/%Y}", "DATE"
            case "year":
                return str(self._visit.year - 2 - draws.below(12)), "DATE"
            case "mrn":
                return f"MRN {patient.mrn}", "ID"
            case "insurance":
                return patient.insurance, "ID"
            case "phone":
                return patient.phone, "PHONE"
            case "email":
                return patient.email, "EMAIL"
            case "address":
                return patient.address, "ADDRESS"
            case "title" | "sex":
                return draws.choice(words["titles" if slot == "title" else "sexes"][patient.sex]), None
            case "Kin" | "kin":
                kin = draws.choice(words["kin"])
                return kin.capitalize() if slot == "Kin" else kin, None
            case "relation" | "duration" | "moment":
                return draws.choice(words[f"{slot}s"]), None
        raise KeyError(f"the grammar names an unknown slot {{{slot}}}")


def _day(when: date) -> str:
    return f"{_MONTHS[when.month - 1]} {when.day}"


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


def draw_findings(draws: Draws, urgent: bool) -> list[Finding]:
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
    findings = draw_findings(draws, bool(clean))
    writer = Writer(draws, seed, patient)
    writer.write(draws.choice(words["headers"]))
    for finding in findings:
        wording = draws.choice(words["red" if finding.red else "benign"][finding.name])
        writer.write(draws.choice(words["statements"][finding.status]), wording)
    if draws.chance(_FOOTER):
        writer.write(draws.choice(words["footers"]))
    return Note(number, writer.text, label, clean, tuple(findings), patient, tuple(writer.spans))
