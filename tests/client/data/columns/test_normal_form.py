"""One table gives the same units, classes and texts in every format: each cell is read as it is written."""

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.data.columns.labels import count_missing
from client.data.columns.normal_form import differ_in_case, is_blank, normal_form
from client.data.sources import Texts, read
from client.data.spec import Reading

READING = Reading(text_column="text", label_column="label", client_column="who", unit_column="unit")
FORMATS = ("csv", "jsonl", "json", "parquet")

SAME = [
    ("7", " 7 ", "7.0", "7.", "7\u200b", "\ufeff7", "7\0"),
    ("Ren\u00e9", "Rene\u0301", "Ren\u200d\u00e9", "Ren\u00e9\ufe0f", "\tRen\u00e9\n"),
    ("x y", "x\ty", "x\x85y"),
    ("0", "-0", "0.0", "-0.0"),
    ("10000000000000000", "1e+16", "1e16", "1.0E16", "1.00e+16"),
    ("10000000", "1.0E7"),
    ("0.00001", "1e-05", "1e-5"),
    ("true", "True", "TRUE"),
    ("2024-01-01", "2024-01-01 00:00:00", "2024-01-01T00:00:00.000"),
    ("2024-01-01 12:30:00.5", "2024-01-01T12:30:00.500"),
]
CODES = [
    "7",
    "07",
    "7.00",
    "7.50",
    "7.5",
    "+7",
    "1e3",
    "1000",
    "1E3",
    "12e15",
    "x",
    "X",
    "a b",
    "a  b",
    "tRUE",
    "1e9999",
]


@pytest.mark.parametrize("spellings", SAME)
def test_spellings_of_one_name_are_one(spellings: tuple[str, ...]) -> None:
    assert {normal_form(each) for each in spellings} == {spellings[0]}


def test_codes_stay_what_they_are() -> None:
    assert [normal_form(code) for code in CODES] == CODES
    assert differ_in_case(["Ann", "ann", "ANN", "Bob", "Bob"]) == 3


@given(st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_a_normal_form_is_its_own(cell: object) -> None:
    once = normal_form(cell)
    assert normal_form(once) == once
    assert bool(once) != is_blank(str(cell))


NASTY = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
COLUMNS: dict[str, tuple[pyarrow.DataType, st.SearchStrategy[Any]]] = {
    "texts": (pyarrow.string(), NASTY),
    "codes": (pyarrow.string(), st.sampled_from([*CODES, *(each for group in SAME for each in group)])),
    "integers": (pyarrow.int64(), NUMBERS | st.integers(0, 9)),
    "large integers": (pyarrow.uint64(), st.integers(2**63, 2**64 - 1)),
    "floats": (
        pyarrow.float64(),
        st.floats(-(2.0**52), 2.0**52) | st.integers(0, 2**52).map(float),
    ),
    "single floats": (pyarrow.float32(), st.floats(-(2.0**23), 2.0**23, width=32)),
    "booleans": (pyarrow.bool_(), st.booleans()),
    "dates": (pyarrow.date32(), st.dates(datetime.date(1000, 1, 1))),
    "times": (pyarrow.timestamp("us"), st.datetimes(datetime.datetime(1000, 1, 1))),
    "decimals": (pyarrow.decimal128(20, 2), st.integers(-(10**6), 10**6).map(lambda cents: Decimal(cents) / 100)),
    "dictionaries": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), st.sampled_from(["a", "A", "b "])),
}


def written(kind: str, value: Any, format_: str) -> Any:
    """A value as a program writes it: Python's str into CSV, a number or a boolean as such into JSON."""
    if kind == "decimals":
        value = f"{value:.2f}"
    if kind == "single floats":
        value = float(str(pyarrow.scalar(value, pyarrow.float32()).cast(pyarrow.string())))
    return str(value) if format_ == "csv" or kind in ("dates", "times", "decimals") else value


def save(folder: Path, rows: list[dict[str, Any]], kinds: dict[str, str]) -> None:
    for format_ in ("csv", "json", "jsonl"):
        table = [{name: written(kinds[name], value, format_) for name, value in row.items()} for row in rows]
        with (folder / f"d.{format_}").open("w", encoding="utf-8", newline="") as file:
            if format_ == "csv":
                lines = csv.writer(file, quoting=csv.QUOTE_ALL)
                lines.writerows([list(kinds), *([row[name] for name in kinds] for row in table)])
            elif format_ == "json":
                json.dump(table, file, indent=1)
            else:
                file.writelines(json.dumps(row) + "\n" for row in table)
    arrays = {name: pyarrow.array([row[name] for row in rows], COLUMNS[kind][0]) for name, kind in kinds.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), folder / "d.parquet")


@pytest.mark.parametrize("kind", COLUMNS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_one_table_is_the_same_in_every_format(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    cells = COLUMNS[kind][1].filter(lambda value: not count_missing([normal_form(value)]) and value != "#N/A")
    names = ("text", "label", "who", "unit")
    rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, cells)), min_size=1, max_size=6))
    save(tmp_path, rows, dict.fromkeys(names, kind))
    found = [read(f"{format_}:{tmp_path / f'd.{format_}'}", READING) for format_ in FORMATS]
    first = _names(found[0])
    assert all(_names(other) == first for other in found[1:])
    if kind in ("texts", "codes", "dictionaries"):
        assert all(texts.texts == [row["text"] for row in rows] for texts in found)


def _names(texts: Texts) -> tuple[Any, ...]:
    return texts.keys(), texts.labels, texts.clients, texts.units


def test_a_number_is_read_digit_by_digit(tmp_path: Path) -> None:
    """Neither size nor step of a number, nor what another row holds, makes two people one."""
    people = [10**19 + number for number in range(40)]
    rows = [{"text": f"text {n}", "label": 10**19 + 1000 * (n % 4), "who": people[n % 40]} for n in range(400)]
    rows += [{"text": "a", "label": 10**19, "who": 1.5}, {"text": "b", "label": 10**19, "who": 9007199254740993}]
    rows += [{"text": "c", "label": 10**19, "who": 9007199254740992}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = read(f"jsonl:{tmp_path / 'd.jsonl'}", Reading(client_column="who"))
    assert texts.clients is not None
    assert texts.labels is not None
    assert (len(set(texts.clients)), len(set(texts.labels))) == (43, 4)


def test_dates_and_codes_of_json_are_labels_and_ids(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": "2024-01-01", "who": "2024-01-02"}, {"text": "4/6", "label": "b", "who": "b"}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = read(f"jsonl:{tmp_path / 'd.jsonl'}", Reading(client_column="who"))
    assert (texts.labels, texts.clients) == (["2024-01-01", "b"], ["2024-01-02", "b"])


@pytest.mark.parametrize("column", [["true", "false"], ["4", "6"], ["4/6", "1/2"], ["2024-01-01", "2024-01-02"]])
def test_a_csv_column_that_looks_typed_is_text(tmp_path: Path, column: list[str]) -> None:
    (tmp_path / "d.csv").write_text("text,pair\n" + "".join(f"{cell},{cell}\n" for cell in column))
    texts = read(f"csv:{tmp_path / 'd.csv'}", Reading(label_column="", text_pair_column="pair"))
    assert (texts.texts, texts.pairs) == (column, column)


def test_what_nobody_can_read_is_no_text(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", "\u200b", "\0 \ufeff", "NaN", "<NA>", None, float("nan"), "\ud83d b")]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = read(f"jsonl:{tmp_path / 'd.jsonl'}", Reading(label_column=""))
    assert (texts.texts, texts.left_out) == (["a", "\ufffd b"], {"empty": 6})


def test_floats_that_merge_ids_are_refused(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"], "who": pyarrow.array([1.0, 2.0**53])})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"holds floating-point numbers \(double\) up to 9\.0072e\+15.*as integers"):
        read(f"parquet:{tmp_path / 'd.parquet'}", Reading(label_column="", client_column="who"))


def test_names_that_differ_in_case_stay_two_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,label,who\na,Yes,Ann\nb,yes,ann\nc,no,bob\n")
    texts = read(f"csv:{tmp_path / 'd.csv'}", Reading(client_column="who"))
    assert texts.labels == ["Yes", "yes", "no"]
    assert [(count, what.partition(" differ ")[0]) for what, count in texts.noted.items()] == [
        (2, "names of a label"),
        (2, "names of a client"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"line 2 is no JSON .*an object on every line, or one list of objects"),
        ('{"text": "a"}\n["b"]\n', "line 2 is .* not an object"),
        ('{"text": "a", "text": "b"}\n', "has the key 'text' twice"),
        ("[" * 100_000, "not a readable jsonl file"),
        (b"\xff\xfe{\0".decode("latin-1"), "not a readable jsonl file"),
    ],
)
def test_json_that_cannot_be_read_says_where(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read(f"jsonl:{tmp_path / 'd.jsonl'}", Reading(label_column=""))
