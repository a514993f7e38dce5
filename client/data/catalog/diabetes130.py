"""The Diabetes 130-US hospitals table as text: one narrative per hospital encounter, one sentence per group of columns.

Data: Strack et al. 2014, doi:10.1155/2014/781670, UCI 296; 101,766 encounters of 71,518 patients. The wording is ours:
RLDP (arXiv 2507.22565), which fine-tunes on narratives of this table, does not publish its own. A narrative says what
the columns say, and nothing else; unknown values are left out, as are drugs that were not given, weight (97 % unknown)
and the payer. Identifiers (``encounter_id``, ``patient_nbr``) are never part of a text. Diagnoses keep their ICD-9
code; its chapter is added in words, for symptoms the group of Strack et al., table 2.
"""

import bisect
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow

COLUMNS = (
    "race gender age admission_type_id discharge_disposition_id admission_source_id time_in_hospital medical_specialty "
    "num_lab_procedures num_procedures num_medications number_outpatient number_emergency number_inpatient diag_1 "
    "diag_2 diag_3 number_diagnoses max_glu_serum A1Cresult change diabetesMed readmitted"
).split()
DRUGS = (
    "metformin repaglinide nateglinide chlorpropamide glimepiride acetohexamide glipizide glyburide tolbutamide "
    "pioglitazone rosiglitazone acarbose miglitol troglitazone tolazamide insulin glyburide-metformin "
    "glipizide-metformin glimepiride-pioglitazone metformin-rosiglitazone metformin-pioglitazone"
).split()

_UNKNOWN = {"?", "None", "NULL", "Not Available", "Not Mapped", "Unknown/Invalid"}
_RACE = {"AfricanAmerican": "African American", "Other": "other race"}
_DOSE = {"Steady": "unchanged", "Up": "increased", "Down": "decreased"}
_RESULT = {"Norm": "normal"}
_READMITTED = {
    "NO": "The patient was not readmitted.",
    "<30": "The patient was readmitted within 30 days.",
    ">30": "The patient was readmitted after more than 30 days.",
}
# First code of each chapter or group of ICD-9, in order; what lies between two belongs to the former.
_GROUPS = [
    (1, "infection"),
    (140, "neoplasm"),
    (240, "endocrine or metabolic disease"),
    (280, "disease of the blood"),
    (290, "mental disorder"),
    (320, "disease of the nervous system"),
    (390, "circulatory disease"),
    (460, "respiratory disease"),
    (520, "digestive disease"),
    (580, "genitourinary disease"),
    (630, "complication of pregnancy"),
    (680, "skin disease"),
    (710, "musculoskeletal disease"),
    (740, "congenital anomaly"),
    (780, "symptom"),
    (800, "injury or poisoning"),
]
_SYMPTOMS = {785: "circulatory disease", 786: "respiratory disease", 787: "digestive disease"}
_SYMPTOMS |= {788: "genitourinary disease"}


def narratives(encounters: pyarrow.Table, mapping: pyarrow.Table) -> Iterator[str]:
    """The narrative of every row of `encounters`, in order.

    Args:
        encounters: the 50 columns of the original table.
        mapping: columns ``field``, ``id``, ``description`` for the three coded columns.
    """
    codes = {(row["field"], row["id"]): _clean(row["description"]) for row in mapping.to_pylist()}
    names = [*COLUMNS, *DRUGS]
    columns = [encounters.column(name).to_pylist() for name in names]
    for values in zip(*columns, strict=True):
        yield narrative(dict(zip(names, values, strict=True)), codes)


def narrative(row: Mapping[str, Any], codes: Mapping[tuple[str, int], str]) -> str:
    """One encounter in words."""
    sentences = [_patient(row), _admission(row, codes), _procedures(row), _history(row), _diagnoses(row)]
    sentences += [*_tests(row), _drugs(row), _discharge(row, codes), _READMITTED[row["readmitted"]]]
    return " ".join(sentence for sentence in sentences if sentence)


def diagnosis(code: str) -> str:
    """An ICD-9 code with its group: ``"428 (circulatory disease)"``."""
    if code[0] in "EV":
        return f"{code} ({'external cause' if code[0] == 'E' else 'supplementary factor'})"
    number = int(float(code))
    if number == 250:
        return f"{code} (diabetes)"
    group = _SYMPTOMS.get(number) or _GROUPS[bisect.bisect_right([low for low, _ in _GROUPS], number) - 1][1]
    return f"{code} ({group})"


def _patient(row: Mapping[str, Any]) -> str:
    race = _RACE.get(row["race"], row["race"])
    gender = "" if row["gender"] in _UNKNOWN else row["gender"].lower()
    words = [word for word in ("" if race in _UNKNOWN else race, gender) if word]
    low, high = row["age"].strip("[)").split("-")
    return f"{_capital(' '.join([*words, 'patient']))} aged {low} to {high}."


def _admission(row: Mapping[str, Any], codes: Mapping[tuple[str, int], str]) -> str:
    kind = codes.get(("admission_type_id", row["admission_type_id"]), "")
    source = codes.get(("admission_source_id", row["admission_source_id"]), "")
    text = f"{_capital(kind.lower() + ' admission' if kind else 'admission')}"
    if source:
        text += f" ({source.lower()})"
    if row["medical_specialty"] not in _UNKNOWN:
        text += f" to {row['medical_specialty']}"
    return f"{text}, {_count(row['time_in_hospital'], 'day')} in hospital."


def _procedures(row: Mapping[str, Any]) -> str:
    tests, procedures = (_count(row[f"num_{name}"], word) for name, word in _WORK)
    return f"There were {tests}, {procedures} and {_count(row['num_medications'], 'medication')}."


_WORK = (("lab_procedures", "laboratory test"), ("procedures", "other procedure"))


def _history(row: Mapping[str, Any]) -> str:
    visits = [(row[f"number_{name}"], name) for name in ("outpatient", "emergency", "inpatient")]
    told = [_count(number, f"{name} visit") for number, name in visits if number]
    return f"In the year before: {', '.join(told)}." if told else "No visits in the year before."


def _diagnoses(row: Mapping[str, Any]) -> str:
    told = [diagnosis(row[name]) for name in ("diag_1", "diag_2", "diag_3") if row[name] not in _UNKNOWN]
    if not told:
        return ""
    return f"Diagnoses: {', '.join(told)}; {row['number_diagnoses']} in all."


def _tests(row: Mapping[str, Any]) -> Iterator[str]:
    for name, words in (("max_glu_serum", "Serum glucose"), ("A1Cresult", "HbA1c")):
        if row[name] not in _UNKNOWN:
            yield f"{words} {_RESULT.get(row[name], row[name])}."


def _drugs(row: Mapping[str, Any]) -> str:
    given = [f"{name} {_DOSE[row[name]]}" for name in DRUGS if row[name] in _DOSE]
    if row["diabetesMed"] == "No":
        return "No diabetes medication."
    changed = "was changed" if row["change"] == "Ch" else "was not changed"
    return f"Diabetes medication {changed}" + (f": {', '.join(given)}." if given else ".")


def _discharge(row: Mapping[str, Any], codes: Mapping[tuple[str, int], str]) -> str:
    place = codes.get(("discharge_disposition_id", row["discharge_disposition_id"]), "")
    return f"{_capital(place).rstrip(' .')}." if place else ""


def _clean(description: str) -> str:
    text = description.strip()
    return "" if text in _UNKNOWN else text


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
