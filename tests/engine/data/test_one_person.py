"""One person is one unit however a file spells the name, for everyone who reads names; a hold-out splits nobody."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.data.local import ReadSettings, open_own
from client.data.prepare import prepare
from client.data.spec import DataSpec
from client.data.splits import hold_out
from client.record_level.statistics import Source
from client.record_level.units import UnitIndex

PEOPLE, ROWS = 30, 6
SPELLINGS = ("{}", "{}.0", " {} ", "{}\u200b", "\ufeff{}", "{}.")
"""Of people who are numbers; the names of the others hold a letter that is one character, or two."""
NAMES = ("Ren\xe9 {}", "Rene\u0301 {}", " Rene\u0301 {}", "Ren\xe9 {}\u200b", "\ufeffRen\xe9 {}", "Re\u200dn\xe9\t{}")


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A file in which every person has a row under each spelling, far from each other."""
    rows = [
        {
            "who": (SPELLINGS, NAMES)[person % 2][row].format(person),
            "text": f"person {person} row {row}",
            "label": "ab"[row % 2],
        }
        for row in range(ROWS)
        for person in range(PEOPLE)
    ]
    (tmp_path / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{tmp_path / 'people.jsonl'}"


def settings(source: str, place: Path, **changes: Any) -> DataSpec:
    return DataSpec(
        tokenizer="random:bert", seed=5, source=source, validation_records=20, test_records=20, cache=str(place / "c"),
        **{"clients": 1, "partition": "iid", **changes},
    )  # fmt: skip


def people(texts: Any) -> Counter[str]:
    return Counter(text.split()[1] for text in texts.texts)


@pytest.mark.parametrize("column", ["client_column", "unit_column"])
def test_nobody_is_held_out_in_part(column: str, source: str, tmp_path: Path) -> None:
    natural = {"clients": 0, "partition": "natural"} if column == "client_column" else {}
    parts = [
        people(texts) for texts in hold_out(settings(source, tmp_path, **{column: "who"}, **natural)).texts.values()
    ]
    assert sum(map(len, parts)) == len(set().union(*parts)) == PEOPLE
    assert all(set(part.values()) == {ROWS} for part in parts)
    assert all(parts)


def test_where_patients_are_protected_they_are_held_out_whole_whichever_client_has_their_records(
    source: str, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in Path(source.partition(":")[2]).read_text().splitlines()]
    clinics = "".join(json.dumps({**row, "clinic": f"{number % 7}"}) + "\n" for number, row in enumerate(rows))
    Path(source.partition(":")[2]).write_text(clinics)
    both = {"client_column": "clinic", "unit_column": "who", "clients": 0, "partition": "natural"}
    parts = [people(texts) for texts in hold_out(settings(source, tmp_path, **both)).texts.values()]
    assert all(set(part.values()) == {ROWS} for part in parts)


@pytest.mark.parametrize("whole", [False, True])
def test_a_person_is_one_unit_of_a_simulation(whole: bool, source: str, tmp_path: Path) -> None:
    data = prepare(settings(source, tmp_path, unit_column="who", clients=3, whole_units=whole))
    index = UnitIndex.of(data.train, grouped=True)
    assert (np.diff(index.starts) == ROWS).all()
    assert Source.of(data, "group", "random:bert").population == len(index)
    assert data.train.units is not None
    at = [set(np.asarray(data.train.units[start:stop])) for start, stop in zip(data.starts, data.stops, strict=True)]
    assert sum(map(len, at)) == len(index) or not whole


def test_a_person_is_one_client_of_a_simulation(source: str, tmp_path: Path) -> None:
    data = prepare(settings(source, tmp_path, client_column="who", clients=0, partition="natural"))
    assert (data.stops - data.starts == ROWS).all()


@pytest.mark.parametrize("column", ["client_column", "unit_column"])
def test_a_person_is_one_of_a_nodes_own(column: str, source: str, tmp_path: Path) -> None:
    reading = ReadSettings(task="classification", max_length=16, labels=("a", "b"), **{column: "who"})
    own = open_own(source, reading, "random:bert", tmp_path / "own")
    if column == "client_column":
        assert [len(own.client(number)) for number in range(own.clients)] == [ROWS] * PEOPLE
    else:
        assert (np.diff(UnitIndex.of(own.records, grouped=True).starts) == ROWS).all()
