"""What cannot be read is refused in one line with cause and remedy; what is no hub id, before the hub is asked."""

from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from client.data import sources
from client.data.sources import read
from client.data.spec import Reading

COLUMNS = Reading(text_column="text", label_column="label", unit_column="unit")


def _write(folder, content, name="d.csv"):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"csv:{folder / name}"


@pytest.mark.parametrize("blank", ["", "  ", '" "'])
def test_blank_ids_of_a_csv_file_are_missing(tmp_path, blank):
    source = _write(tmp_path, f"text,label,unit\none,a,p1\ntwo,b,{blank}\nthree,b,{blank}\n ,a,{blank}\n")
    with pytest.raises(ValueError, match=r"d\.csv'?: 2 rows .*'unit'"):
        read(source, COLUMNS)


@pytest.mark.parametrize("ids", [["p1", "", "p2"], ["p1", " ", None], [1.0, float("nan"), 2.0], ["1", "nan", "2"]])
def test_blank_ids_of_a_parquet_file_are_missing(tmp_path, ids):
    pandas.DataFrame({"text": ["a", "b", "c"], "who": ids}).to_parquet(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"client .*'who'"):
        read(f"parquet:{tmp_path / 'd.parquet'}", Reading(text_column="text", client_column="who", label_column=""))


def test_ids_of_a_csv_file_are_text(tmp_path):
    source = _write(tmp_path, "text,label,unit\none,1,007\ntwo,0, 7\nthree,1,7 \n")
    records = read(source, COLUMNS)
    assert records.units == ["007", "7", "7"]
    assert records.labels == ["1", "0", "1"]
    with pytest.raises(ValueError, match="1 rows have no unit"):
        read(_write(tmp_path, "text,label,unit\none,1,1\ntwo,0,NA\n"), COLUMNS)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("text,label,unit\ncaf\xe9,a,p\n".encode("latin-1"), "d.csv", "its text is not UTF-8; save it as UTF-8"),
        ("text,label,unit\nx,caf\xe9,p\n".encode("latin-1"), "d.csv", "its text is not UTF-8; save it as UTF-8"),
        ("text,label,unit\xe9\nx,a,p\n".encode("latin-1"), "d.csv", "its text is not UTF-8; save it as UTF-8"),
        ("text,label,unit\nx,a,p\n".encode("utf-16"), "d.csv", "its text is not UTF-8; save it as UTF-8"),
        ("text;label;unit\nhello;a;p\n", "d.csv", "its separator is ';', not commas; set data.separator = ';'"),
        ("text;label;unit\nhello, you;a;p\n", "d.csv", "its separator is ';', not commas; set data.separator = ';'"),
        ("text\tlabel\tunit\nhello\ta\tp\n", "d.csv", r"its separator is tabs, not commas; name it \.tsv"),
        ("text,label,unit\nhello,a,p\n", "d.tsv", "its separator is commas, not tabs; set data.separator = ','"),
        ("text,label,unit\n", "d.csv", "it has no rows"),
        ("text,label,unit\n,a,p\n", "d.csv", "all texts are empty"),
        ("text,label,unit,label\nx,a,p,b\n", "d.csv", r"2 columns are called 'label' \(data\.label-column\); rename"),
    ],
)
def test_the_cause_is_named(tmp_path, content, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(_write(tmp_path, content, name), COLUMNS)
    assert "\n" not in str(caught.value)


def test_columns_of_one_name_that_nobody_reads_do_no_harm(tmp_path):
    source = _write(tmp_path, "text,label,unit,note,note\nx,a,p,1,2\n")
    assert read(source, COLUMNS).labels == ["a"]
    path = tmp_path / "d.parquet"
    for names in (["text", "more", "more"], ["text", "text", "more"]):
        pyarrow.parquet.write_table(pyarrow.table([["x"], ["y"], ["z"]], names=names), path)
        if names.count("text") == 1:
            assert read(f"parquet:{path}", Reading(text_column="text", label_column="")).texts == ["x"]
        else:
            with pytest.raises(ValueError, match=r"'text' \(data\.text-column\)"):
                read(f"parquet:{path}", Reading(text_column="text", label_column=""))


def test_a_cell_of_megabytes_is_read(tmp_path):
    long = "word " * 500_000
    records = read(_write(tmp_path, f"text,label,unit\nx,a,p\n{long},b,q\ny,a,r\n"), COLUMNS)
    assert [len(text) for text in records.texts] == [1, len(long), 1]
    (tmp_path / "d.jsonl").write_text(f'{{"text": "x"}}\n{{"text": "{long}"}}\n')
    assert len(read(f"jsonl:{tmp_path / 'd.jsonl'}", Reading(text_column="text", label_column=""))) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("complaints.csv", r"a file needs its kind before it; did you mean csv:complaints\.csv\?"),
        ("tsv:complaints.csv", r"there is no kind of source 'tsv'; did you mean csv:complaints\.csv\?"),
        ("tsv:complaints.tsv", r"did you mean csv:complaints\.tsv\?"),
        ("missing/table.parquet", r"did you mean parquet:missing/table\.parquet\?"),
        ("CSV:complaints.csv@train", r"did you mean csv:complaints\.csv@train\?"),
        ("parqet:table", r"there is no kind of source 'parqet'; did you mean parquet:table\?"),
        ("notes.txt", r"a file needs its kind before it; sources are 'notes', parquet:PATH, "),
        ("text:notes.txt", r"there is no kind of source 'text'; sources are 'notes', parquet:PATH, "),
        ("notes:5", "'notes' takes no path; sources are"),
        ("folder", "folder is a folder here, and no hub id; sources are"),
        ("hf:owner/name", "this is no hub id; sources are"),
        ("./owner/name", "this is no hub id; sources are"),
        ("/data/of/mine", "this is no hub id; sources are"),
        ("", "this is no hub id; sources are"),
    ],
)
def test_a_path_is_no_hub_id(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("complaints.csv", "notes.txt"):
        (tmp_path / name).write_text("text\nx\n")
    with pytest.raises(ValueError, match=message):
        read(source, COLUMNS)


@pytest.mark.parametrize(
    "source", ["glue", "nyu-mll/glue", "nyu-mll/glue:sst2@train[:10%]", "glue:sst2", "a/b.v1@test"]
)
def test_hub_ids_go_to_the_hub(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sst2").mkdir()
    sources.check_hub_id(source, "data.source")


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (b"text;label\nhello, you;a\n", {"separator": ";"}),
        (b"hello, you\ta\n", {"separator": "\t", "columns": "text, label"}),
        ('text,label\n"hello, you",a\n'.encode("utf-16"), {"encoding": "utf-16"}),
    ],
)
def test_separator_header_and_encoding_may_be_said(content: bytes, settings: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(content)
    texts = read(f"csv:{path}", Reading(label_column="label", **settings))
    assert (texts.texts, texts.labels) == (["hello, you"], ["a"])


def test_a_file_without_a_header_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("hello there,a\nbye,b\n")
    with pytest.raises(ValueError, match=r"it has hello there, a; if that is a record, .*data\.columns"):
        read(f"csv:{path}", Reading())


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="'utf-9' is no encoding that Python knows"):
        Reading(encoding="utf-9")
