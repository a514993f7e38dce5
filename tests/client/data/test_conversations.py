"""All forms of conversation give the same turns; another shape is refused, what cannot be used is counted."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from client.data.conversations import from_text, map_texts, to_text
from client.data.sources import Texts, read
from client.data.spec import Reading

QUESTION, ANSWER = "How long does a cold last?", "About a week."
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
READING = Reading(label_column="")


def records(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Texts:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read(f"jsonl:{path}", READING.replace(**changes), task="instruction")


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
    assert from_text(read(f"parquet:{tmp_path / 'chat.parquet'}", READING, task="instruction").texts[0]) == TURNS


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


def said(folder: Path, *messages: dict[str, Any], **row: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The conversation that is read, beside a plain one, and what was noted of it."""
    found = records(folder, [{"messages": TURNS}, {"messages": list(messages), **row}])
    return from_text(found.texts[1]), dict(found.noted)


@pytest.mark.parametrize("key", ["weight", "train", "training"])
@pytest.mark.parametrize("form", [("role", "content"), ("from", "value")])
def test_an_answer_is_not_trained_on_where_its_author_says_so(tmp_path: Path, key: str, form: tuple[str, str]) -> None:
    no, yes = (0, 1) if key == "weight" else (False, True)
    turns = [dict(zip(form, (m["role"], m["content"]), strict=True)) for m in (*TURNS, *TURNS)]
    turns[0][key], turns[1][key], turns[3][key] = no, no, yes
    assert said(tmp_path, *turns) == (
        [TURNS[0], {**TURNS[1], "train": False}, *TURNS],
        {f"answers are not trained on, as their {key} says": 1},
    )


def test_marks_that_cannot_be_honoured_are_counted(tmp_path: Path) -> None:
    rows = [
        [TURNS[0], {**TURNS[1], "weight": 0}],
        [TURNS[0], {**TURNS[1], "weight": 0.5}],
        [{**TURNS[0], "train": True, "mood": "sad"}, TURNS[1]],
    ]
    found = records(tmp_path, [{"messages": turns} for turns in rows])
    assert found.left_out == {"no answer that is to be trained on": 1, "with a weight that is neither 0 nor 1": 1}
    assert found.noted == {
        "answers are not trained on, as their weight says": 1,
        "turns of role user are marked for training (train); only answers are trained on": 1,
        "turns have a key that is not used: 'mood'": 1,
    }


def test_made_up_names_are_counted_together(tmp_path: Path) -> None:
    rows = [{"messages": [{**TURNS[0], f"key{n}": 1}, TURNS[1]]} for n in range(9)]
    noted = records(tmp_path, rows).noted
    assert (len(noted), noted["turns have a key that is not used: others"]) == (6, 4)


CALL = {"id": "c1", "type": "function", "function": {"name": "dose", "arguments": '{"mg": 5, "days": 2.5}'}}
TOOLS = [{"type": "function", "function": {"name": "dose", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("result", ["tool", "function", "ipython", "observation"])
@pytest.mark.parametrize("form", ["tool_calls", "function_call"])
def test_tools_are_part_of_a_conversation(tmp_path: Path, result: str, form: str) -> None:
    call = {"tool_calls": [CALL]} if form == "tool_calls" else {"function_call": CALL["function"]}
    talk = [TURNS[0], {"role": "assistant", "content": None, **call}, {"role": result, "content": "ok"}, TURNS[1]]
    read_back, noted = said(tmp_path, {"role": "developer", "content": "Be kind."}, *talk, tools=TOOLS)
    assert [turn["role"] for turn in read_back] == ["system", "user", "assistant", "tool", "assistant"]
    assert read_back[0] == {"role": "system", "content": "Be kind.", "tools": TOOLS}
    assert read_back[2]["tool_calls"][0]["function"] == {"name": "dose", "arguments": {"mg": 5, "days": 2.5}}
    assert not noted


def test_tools_are_the_same_in_parquet(tmp_path: Path) -> None:
    talk = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "ok"}]
    row = {"messages": [*talk, TURNS[1]], "tools": json.dumps(TOOLS)}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "chat.parquet")
    found = read(f"parquet:{tmp_path / 'chat.parquet'}", READING, task="instruction")
    assert found.texts == records(tmp_path, [row]).texts
    assert not found.noted


def test_contents_are_texts_or_parts_in_one_file(tmp_path: Path) -> None:
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TURNS]
    image = [{"role": "user", "content": [{"type": "image_url"}]}, TURNS[1]]
    found = records(tmp_path, [{"messages": turns} for turns in (TURNS, parts, image)])
    assert [from_text(text) for text in found.texts] == [TURNS, TURNS]
    assert found.left_out == {"with a part that is no text: 'image_url'": 1}


def test_sensitive_words_are_changed_in_calls_too() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"who": ["Ann"]}}}
    text = to_text([{"role": "user", "content": "Ann"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert "Ann" not in map_texts(text, lambda turn: turn.replace("Ann", "X"))


OTHER_SHAPES = {
    "role": ({"messages": [{"role": "judge", "content": "x"}]}, r"1 with a turn of the unknown role 'judge'"),
    "keys": ({"messages": [{"speaker": "user", "text": "x"}]}, "turn 1 of 'messages' has speaker, text"),
    "texts": ({"messages": ["hello"]}, "turn 1 of 'messages' is str"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "1 with a part that is no text: 'image'",
    ),
    "number": ({"prompt": {"a": 3}, "completion": "x"}, "'prompt' holds dict"),
    "columns": ({"body": "x"}, "it has body"),
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_another_shape_is_refused_with_its_place(tmp_path: Path, shape: str) -> None:
    row, message = OTHER_SHAPES[shape]
    with pytest.raises(ValueError, match=message):
        records(tmp_path, [row])
