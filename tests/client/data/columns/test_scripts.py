"""The script of a text: what its letters say, read back from tokens, in bins that are the same for everybody."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.data.columns.scripts import SCRIPTS, script_of, scripts_of
from client.data.columns.shares import parts_of, share_row
from client.data.records import Records
from client.models.base import load_tokenizer

TEXTS = {
    "Grüße aus Köln": "Latin",
    "Καλημέρα κόσμε": "Greek",
    "Привет, world!!": "Cyrillic",
    "שלום": "Hebrew",
    "مرحبا بالعالم": "Arabic",
    "नमस्ते दुनिया": "Devanagari",
    "সুপ্রভাত": "Bengali",
    "வணக்கம்": "Tamil",
    "สวัสดี": "Thai",
    "你好,世界": "Han",
    "こんにちは世界": "Kana",
    "안녕하세요": "Hangul",
    "Բարեւ": "another",
    "12:30, 4 × 5 = 20 ☎": "no letters",
    "": "no letters",
}


@pytest.mark.parametrize(("text", "script"), TEXTS.items())
def test_a_text_is_in_the_script_of_most_of_its_letters(text: str, script: str) -> None:
    assert script_of(text) == script
    assert script_of(unicodedata.normalize("NFD", text)) == script


@given(st.text(max_size=50))
def test_any_text_lies_in_one_bin(text: str) -> None:
    assert script_of(text) in SCRIPTS


def test_scripts_are_read_back_from_tokens_and_a_row_has_their_shares() -> None:
    tokenizer, texts = load_tokenizer("random:bert"), [text for text in TEXTS if text]
    records = Records.from_lists(tokenizer(texts)["input_ids"], labels=[0] * len(texts))
    assert [SCRIPTS[i] for i in scripts_of(records, "random:bert")] == [TEXTS[text] for text in texts]
    assert [SCRIPTS[i] for i in scripts_of(records.span(3, 5), "random:bert")] == ["Hebrew", "Arabic"]
    row, parts = share_row(records.select([0, 0, 2, 13]), 2, "random:bert"), parts_of(2)
    start = parts["records"] + parts["tokens"]
    assert len(row) == sum(parts.values())
    shares = dict(zip(SCRIPTS, row[start : start + len(SCRIPTS)], strict=True))
    assert {name: share for name, share in shares.items() if share} == {
        "Latin": 0.5,
        "Cyrillic": 0.25,
        "no letters": 0.25,
    }
    empty = share_row(records.select([]), 2, "random:bert")
    assert np.flatnonzero(empty).tolist() == [0]
