"""Sources: every format reads the same records, and what cannot work says why and what to do."""

import json

import pandas
import pytest

from client.data.sources import fingerprint, read
from client.data.spec import Reading

ROWS = {
    "sentence": ["good, film", "bad\nfilm", "  ", "it's fine", None],
    "other": ["a", "b", "c", "d", "e"],
    "label": [1, 0, 1, 1, 0],
    "author": ["x", "y", "x", "y", "x"],
}
COLUMNS = Reading(text_column="sentence", label_column="label", client_column="author")


@pytest.fixture
def files(tmp_path):
    frame = pandas.DataFrame(ROWS)
    frame.to_parquet(tmp_path / "d.parquet")
    frame.to_csv(tmp_path / "d.csv", index=False)
    frame.to_csv(tmp_path / "d.tsv", index=False, sep="\t")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    return tmp_path


def _rows():
    return [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]


@pytest.mark.parametrize(
    ("kind", "name"), [("parquet", "d.parquet"), ("csv", "d.csv"), ("csv", "d.tsv"), ("jsonl", "d.jsonl")]
)
def test_every_format_reads_the_same_records(files, kind, name):
    records = read(f"{kind}:{files / name}", COLUMNS)
    assert records.texts == ["good, film", "bad\nfilm", "it's fine"]
    assert records.labels == ["1", "0", "1"]
    assert records.clients == ["x", "y", "y"]
    assert records.pairs is None
    assert records.left_out == {"empty": 2}


def test_a_row_without_a_label_is_left_out_and_a_file_of_such_rows_is_refused(tmp_path):
    (tmp_path / "d.csv").write_text("sentence,label\na,1\nb,\nc, \n")
    records = read(f"csv:{tmp_path / 'd.csv'}", Reading(text_column="sentence"))
    assert (records.texts, records.labels, records.left_out) == (["a"], ["1"], {"without a label": 2})
    (tmp_path / "d.csv").write_text("sentence,label\na,\nb,\n")
    with pytest.raises(ValueError, match=r"no row can be used \(2 without a label\)"):
        read(f"csv:{tmp_path / 'd.csv'}", Reading(text_column="sentence"))


def test_pairs_and_selection(files):
    records = read(
        f"parquet:{files / 'd.parquet'}", Reading(text_column="other", text_pair_column="sentence", label_column="")
    )
    assert records.pairs == ["good, film", "bad\nfilm", "it's fine"]
    chosen = records.select([2, 0])
    assert (chosen.texts, chosen.pairs) == (["d", "a"], ["it's fine", "good, film"])
    assert chosen.keys() == [("d", "it's fine"), ("a", "good, film")]


def test_a_text_of_few_words_may_be_left_out(files):
    source = f"parquet:{files / 'd.parquet'}"
    assert read(source, Reading(text_column="sentence", least_words=2, label_column="")).texts == [
        "good, film",
        "bad\nfilm",
        "it's fine",
    ]
    with pytest.raises(ValueError, match=r"no text has 3 words \(data.least-words\)"):
        read(source, Reading(text_column="sentence", least_words=3, label_column=""))


def test_fingerprint_follows_the_content(files):
    before = fingerprint(f"csv:{files / 'd.csv'}", COLUMNS)
    assert before == fingerprint(f"csv:{files / 'd.csv'}", COLUMNS)
    (files / "d.csv").write_text((files / "d.csv").read_text().replace("good", "fair"))
    assert before != fingerprint(f"csv:{files / 'd.csv'}", COLUMNS)


def test_absent_column_lists_the_columns_and_the_nearest(files):
    with pytest.raises(ValueError, match=r"'sentense' \(data\.text-column\).* sentence, other, .*'sentence'\?"):
        read(f"csv:{files / 'd.csv'}", Reading(text_column="sentense", label_column=""))
    with pytest.raises(ValueError, match=r"no column 'target' \(data\.label-column\)"):
        read(f"csv:{files / 'd.csv'}", Reading(text_column="sentence", label_column="target"))
    rows = [{"sentence": "a", "turns": [{"role": "user"}]}, {"sentence": "b", "turns": None}]
    pandas.DataFrame(rows).to_parquet(files / "nested.parquet")
    (files / "nested.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in ("parquet", "jsonl"):
        with pytest.raises(ValueError, match=r"row 1: column 'turns' holds a list, not text.*: sentence$"):
            read(f"{kind}:{files / f'nested.{kind}'}", Reading(text_column="turns", label_column=""))


def test_missing_broken_and_empty_files_are_refused(files):
    with pytest.raises(ValueError, match=r"data\.test-source = .*d\.parquet\?"):
        read(f"parquet:{files / 'f.parquet'}", COLUMNS, "data.test-source")
    with pytest.raises(ValueError, match=r"folder; .*\(d\.csv, "):
        read(f"parquet:{files}", COLUMNS)
    with pytest.raises(ValueError, match="not a readable parquet file"):
        read(f"parquet:{files / 'd.csv'}", COLUMNS)
    with pytest.raises(ValueError, match="not a readable jsonl file"):
        read(f"jsonl:{files / 'd.csv'}", COLUMNS)
    (files / "empty.csv").write_text("sentence,label,author\n")
    with pytest.raises(ValueError, match="no rows"):
        read(f"csv:{files / 'empty.csv'}", COLUMNS)
    (files / "nothing.csv").write_text("")
    with pytest.raises(ValueError, match="not a readable csv file"):
        read(f"csv:{files / 'nothing.csv'}", COLUMNS)
    pandas.DataFrame({"sentence": [" ", ""], "label": [0, 1], "author": ["a", "b"]}).to_parquet(files / "blank.parquet")
    with pytest.raises(ValueError, match="all texts are empty"):
        read(f"parquet:{files / 'blank.parquet'}", COLUMNS)


def test_rows_without_client_are_refused(files):
    pandas.DataFrame({"sentence": ["a", "b"], "author": ["x", None]}).to_parquet(files / "orphans.parquet")
    with pytest.raises(ValueError, match=r"1 rows .*client .*'author'"):
        read(
            f"parquet:{files / 'orphans.parquet'}",
            Reading(text_column="sentence", client_column="author", label_column=""),
        )


def test_hub_out_of_reach_names_the_other_sources():
    with pytest.raises(ValueError, match=r"data\.source = 'some/corpus:sub@train': .*parquet:PATH"):
        read("some/corpus:sub@train", COLUMNS)
