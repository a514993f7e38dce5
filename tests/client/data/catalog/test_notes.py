"""The note generator: repeatable everywhere, exact spans, the stated best accuracy, patients that never mix."""

import hashlib
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from client.data.catalog import notes
from client.data.catalog.notes import BAYES_ACCURACY, LABEL_NOISE, NOTES_PER_BLOCK, generate, grammar, split

ROOT = Path(__file__).parents[4]
PRINT_DIGEST = (
    "import hashlib; from client.data.catalog.notes import generate; "
    "print(hashlib.sha256(repr(generate(60, 3)).encode()).hexdigest())"
)


@pytest.mark.run
def test_same_notes_in_every_process_and_for_every_range():
    whole = generate(60, 3)
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT), "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    command = [sys.executable, "-c", PRINT_DIGEST]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert other == hashlib.sha256(repr(whole).encode()).hexdigest()
    assert generate(30, 3, start=30) == whole[30:]
    assert generate(7, 3, start=12) == whole[12:19]
    assert generate(60, 4) != whole


def test_global_random_state_has_no_part_in_it():
    drawn = []
    for state in (1, 2):
        random.seed(state)
        np.random.seed(state)
        notes._pools.cache_clear()
        drawn.append(generate(12, 99))
    assert drawn[0] == drawn[1]


def test_spans_are_exact_and_hold_what_they_say():
    notes = generate(1500, 0)
    shapes = {
        "DATE": r"\d\d/\d\d/\d{4}|[A-Z][a-z]{2} \d{1,2}|\d{4}",
        "AGE": r"\d{2}",
        "PHONE": r"\(\d{3}\) 555-\d{4}",
        "EMAIL": r"[a-z0-9.]+@example\.(com|org|net)",
        "ID": r"MRN \d{8}|[A-Z]{2}\d{7}",
        "ADDRESS": r"\d+ [A-Z][\w' ]+, [A-Z][\w' ]+",
        "PERSON": r"(Dr\. )?[A-Z][\w']+( [A-Z][\w']+)?",
    }
    kinds = Counter()
    for note in notes:
        covered = [False] * len(note.text)
        for span in note.spans:
            value = note.text[span.start : span.end]
            assert re.fullmatch(shapes[span.kind], value), (span, value)
            assert not any(covered[span.start : span.end])
            covered[span.start : span.end] = [True] * len(value)
            kinds[span.kind] += 1
        # nothing of the patient's identity stands outside the spans
        rest = "".join(" " if inside else letter for letter, inside in zip(note.text, covered, strict=True))
        patient = note.patient
        for private in (patient.mrn, patient.phone, patient.email, patient.address, patient.insurance, patient.last):
            assert not re.search(rf"\b{re.escape(private)}\b", rest)
    assert set(kinds) == set(shapes)
    assert min(kinds.values()) >= 20


def test_age_agrees_with_birth_and_visit():
    seen = 0
    for note in generate(3000, 2):
        values = {span.kind: note.text[span.start : span.end] for span in note.spans}
        written = re.search(r"(\d\d)/(\d\d)/(\d{4})", values.get("DATE", ""))
        if "AGE" in values and written:
            month, day, year = map(int, written.groups())
            birth = note.patient.birth
            assert int(values["AGE"]) == year - birth.year - ((month, day) < (birth.month, birth.day))
            seen += 1
    assert seen > 50


@pytest.mark.run
def test_bayes_accuracy_is_the_stated_one():
    """The rule over the latent findings is right on 97% of the labels, within five standard errors, and on no more."""
    notes = generate(8_000, 1)
    predicted = [int(any(finding.red and finding.status == "present" for finding in note.findings)) for note in notes]
    assert predicted == [note.clean_label for note in notes]
    accuracy = sum(guess == note.label for guess, note in zip(predicted, notes, strict=True)) / len(notes)
    error = math.sqrt(LABEL_NOISE * BAYES_ACCURACY / len(notes))
    assert BAYES_ACCURACY == 0.97
    assert abs(accuracy - BAYES_ACCURACY) < 5 * error
    # flips do not depend on what the note says: the rate is the same in strata of the latents
    for stratum in (0, 1):
        flips = [note.label != note.clean_label for note in notes if note.clean_label == stratum]
        assert abs(sum(flips) / len(flips) - LABEL_NOISE) < 5 * math.sqrt(LABEL_NOISE * BAYES_ACCURACY / len(flips))
        assert abs(len(flips) / len(notes) - 0.5) < 5 * 0.5 / math.sqrt(len(notes))


@pytest.mark.run
def test_text_determines_the_label_but_red_flag_words_do_not():
    """No wording belongs to two findings and no sentence form to two statuses, so the text reveals the latents."""
    words = grammar()
    wordings = [(text, red) for red in ("red", "benign") for texts in words[red].values() for text in texts]
    assert len({text for text, _ in wordings}) == len(wordings)
    for text, red in wordings:
        assert not any(text in other for other, kind in wordings if kind != red)
    forms = [form for forms in words["statements"].values() for form in forms]
    assert len(set(forms)) == len(forms)
    notes = generate(4000, 5)
    naming = [note for note in notes if any(finding.red for finding in note.findings)]
    routine = sum(1 - note.clean_label for note in naming)
    assert 0.12 < routine / len(naming) < 0.3  # what a word list would call urgent and is not


@pytest.mark.run
def test_texts_are_varied():
    notes = generate(5000, 6)
    assert len({note.text for note in notes}) == len(notes)
    assert len({re.sub(r"[\d]", "0", note.text) for note in notes}) > 4950


def test_splits_share_no_patient():
    parts = split(100, 50, 31, seed=7)
    assert [len(part) for part in parts] == [100, 50, 31]
    numbers = [{note.number for note in part} for part in parts]
    patients = [{note.patient.number for note in part} for part in parts]
    records = [{note.patient.mrn for note in part} for part in parts]
    for sets in (numbers, patients, records):
        assert not sets[0] & sets[1]
        assert not sets[0] & sets[2]
        assert not sets[1] & sets[2]
    assert {count for count in Counter(note.patient.number for note in parts[0][:96]).values()} == {1, 2, 3}


def test_patient_may_not_be_torn_apart():
    with pytest.raises(ValueError, match=f"multiple of {NOTES_PER_BLOCK}, got 7"):
        generate(5, 0, start=7)
    with pytest.raises(ValueError, match=r"count .*>= 0"):
        generate(-1, 0)
