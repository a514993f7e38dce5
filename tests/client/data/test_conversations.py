"""All forms of conversation give the same turns; another shape is refused, what cannot be used is counted."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from client.data.conversations import from_text
from client.data.sources import Texts, read
from client.data.spec import Reading

QUESTION, ANSWER = "How long does a cold last?", "About a week."
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
READING = Reading(label_column="")


def records(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Texts:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(f"jsonl:{path}", READING.but(**changes), chat=True)


FORMS = {
    "messages": ({"messages": TURNS}, {}),
    "parts": (
        {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TURNS]},
        {},
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        {},
    ),
    "prompt-completion": ({"prompt": QUESTION, "completion": ANSWER}, {}),
    "conversational prompt-completion": ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {}),
    "alpaca": ({"instruction": QUESTION, "input": "", "output": ANSWER}, {}),
    "dolly": ({"instruction": QUESTION, "context": None, "response": ANSWER, "category": "qa"}, {}),
    "own names": ({"ask": QUESTION, "say": ANSWER}, {"text_column": "ask", "text_pair_column": "say"}),
    "own list": ({"talk": TURNS}, {"text_column": "talk"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_turns(tmp_path: Path, form: str) -> None:
    row, changes = FORMS[form]
    found = records(tmp_path, [row, row], **changes)
    assert [from_text(text) for text in found.texts] == [TURNS, TURNS]
    assert not found.left_out


def test_what_belongs_to_an_instruction_is_part_of_it(tmp_path: Path) -> None:
    row = {"instruction": "Translate.", "input": "Fieber", "output": "fever"}
    assert from_text(records(tmp_path, [row]).texts[0])[0]["content"] == "Translate.\n\nFieber"


def test_several_turns_and_a_system_message_stay(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be kind."}, *TURNS, *TURNS, {"role": "user", "content": "Thanks"}]
    assert from_text(records(tmp_path, [{"messages": talk}]).texts[0]) == talk[:-1], "nobody answered the last turn"


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"messages": [TURNS]}), tmp_path / "chat.parquet")
    assert from_text(read(f"parquet:{tmp_path / 'chat.parquet'}", READING, chat=True).texts[0]) == TURNS


USELESS = {
    "no answer": [TURNS[0]],
    "empty turn": [TURNS[0], {"role": "assistant", "content": " "}],
    "roles do not take turns": [TURNS[0], *TURNS],
}


def test_what_cannot_be_trained_on_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"messages": turns} for turns in (*USELESS.values(), TURNS, USELESS["no answer"], [])]
    found = records(tmp_path, rows)
    assert [from_text(text) for text in found.texts] == [TURNS]
    assert found.left_out == {"no answer": 3, "empty turn": 1, "roles do not take turns": 1}


def test_ids_stay_with_their_conversation(tmp_path: Path) -> None:
    rows = [{"messages": USELESS["no answer"], "user": "a"}, {"messages": TURNS, "user": "b"}]
    assert records(tmp_path, rows, client_column="user").clients == ["b"]


def test_rows_of_which_none_can_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 no answer"):
        records(tmp_path, [{"messages": USELESS["no answer"]}] * 2)


OTHER_SHAPES = {
    "role": ({"messages": [{"role": "judge", "content": "x"}]}, r"row 1: turn 1 of 'messages'.*'judge'"),
    "keys": ({"messages": [{"speaker": "user", "text": "x"}]}, "turn 1 of 'messages' has speaker, text"),
    "texts": ({"messages": ["hello"]}, "turn 1 of 'messages' is str"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images and tools"),
    "number": ({"prompt": {"a": 3}, "completion": "x"}, "'prompt' holds dict"),
    "columns": ({"body": "x"}, "it has body"),
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_another_shape_is_refused_with_its_place(tmp_path: Path, shape: str) -> None:
    row, message = OTHER_SHAPES[shape]
    with pytest.raises(ValueError, match=message):
        records(tmp_path, [row])
