"""Pairs of answers in the forms that TRL reads, and sentences made into pairs."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from client.data.catalog import consultations, corpora, restaurants
from client.data.columns.preferences import NO_PREFERENCE, pair_of
from client.data.conversations import from_text
from client.data.sources import Texts, read
from client.data.spec import Reading

READING = Reading(label_column="")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    kind = path.suffix[1:]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{kind}:{path}"


def found(path: Path, rows: list[dict[str, Any]], **changes: Any) -> Texts:
    return read(write(path, rows), READING.replace(**changes), task="preference")


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_texts_with_and_without_a_prompt(kind: str, tmp_path: Path) -> None:
    explicit = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green.", "who": "a"}
    texts = found(tmp_path / f"a.{kind}", [explicit] * 2, client_column="who")
    assert [pair_of(text) for text in texts.texts] == [["The sky is", " blue.", " green."]] * 2
    assert texts.clients == ["a", "a"]
    implicit = {"chosen": "The sky is blue.", "rejected": "The sky is bright."}
    (text,) = found(tmp_path / f"b.{kind}", [implicit]).texts
    assert pair_of(text) == ["The sky is b", "lue.", "right."]
    (text,) = found(tmp_path / f"c.{kind}", [{"chosen": "It is blue.", "rejected": "It is green."}]).texts
    assert pair_of(text) == ["It is", " blue.", " green."]  # as TRL's extract_prompt: the blank goes with the word


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_share_the_turns_before_the_answers(kind: str, tmp_path: Path) -> None:
    before = said("Hi", "Hello", "What colour is the sky?")
    good, bad = said("", "Blue.")[1:], said("", "Green.")[1:]
    expected = [*said("Hi"), {**said("", "Hello")[1], "train": False}, before[2]]
    for number, row in enumerate(
        (
            {"prompt": before, "chosen": good, "rejected": bad},
            {"chosen": before + good, "rejected": before + bad},
            {"prompt": "What colour is the sky?", "chosen": before + good, "rejected": before + bad},
        )
    ):
        (text,) = found(tmp_path / f"{number}.{kind}", [row]).texts
        assert [from_text(line) for line in pair_of(text)] == [expected + good, expected + bad]


def test_what_prefers_nothing_is_left_out_and_counted(tmp_path: Path) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    rows = [good, {**good, "rejected": "a"}, {**good, "chosen": " "}, {**good, "prompt": None}]
    texts = found(tmp_path / "a.jsonl", rows)
    assert len(texts) == 1
    assert texts.left_out == {NO_PREFERENCE: 1, "pairs with an empty text": 2}
    talk = said("Q", "A")
    rows = [
        {"chosen": talk, "rejected": said("Q", "B")},
        {"chosen": talk, "rejected": talk},
        {"chosen": talk, "rejected": said("Q")},
        {"chosen": talk, "rejected": said("other", "A")},
        {"chosen": talk, "rejected": [*talk, *said("more", "B")]},
    ]
    texts = found(tmp_path / "b.jsonl", rows)
    assert len(texts) == 1
    assert sorted(texts.left_out.values()) == [1, 1, 2]
    with pytest.raises(ValueError, match="no row can be used"):
        found(tmp_path / "c.jsonl", [{**good, "rejected": "a"}])
    assert len(found(tmp_path / "d.jsonl", [good, {**good, "chosen": "a long one"}], least_words=4)) == 1


def test_columns_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one column 'rejected'; it has prompt, chosen\."):
        found(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "a"}])


def test_a_rejected_sentence_is_of_a_meaning_that_differs_in_one_slot(tmp_path: Path) -> None:
    rows = [
        ("name[A], area[riverside]", "A is by the river."),
        ("name[A], area[city centre]", "A is in the centre."),
        ("name[A], area[city centre]", "In the centre, there is A."),
        ("name[B], area[riverside]", "B is by the river."),
    ]
    table = pyarrow.table({"mr": [mr for mr, _ in rows], "ref": [ref for _, ref in rows]})
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")
    found = corpora.read(f"e2e:{tmp_path}@test", "data.source").to_pylist()
    assert [row["chosen"] for row in found] == [ref for _, ref in rows[:3]]  # B has only its name's neighbours
    assert found[0]["rejected"] in (rows[1][1], rows[2][1])
    assert found[1]["rejected"] == found[2]["rejected"] == rows[0][1]
    assert found[0]["prompt"] == "name[A], area[riverside]\n"
    brief = corpora.read(f"e2e:{tmp_path}@brief-test", "data.source").to_pylist()
    assert [(row["chosen"], row["rejected"]) for row in brief] == [(rows[1][1], rows[2][1])]
    far = ["name[A], area[x], food[y]", "name[A], area[u], food[v]"]
    assert restaurants.near_misses(far) == {far[0]: [far[1]], far[1]: [far[0]]}


def test_a_wrong_answer_is_of_the_other_kind() -> None:
    for item in consultations.generate(20, 1, 0):
        order = ("urgent", "routine")[:: 1 if item.urgent else -1]
        kinds = [answer.split(".")[0] for answer in (item.answer, item.wrong)]
        assert kinds == [f"Assessment: {kind}" for kind in order]
        assert pair_of(item.pair) == [f"{item.question}\n", item.answer, item.wrong]
