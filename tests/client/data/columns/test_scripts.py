"""The script of a text: what its letters say, read back from tokens, in bins that are the same for everybody."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.data.columns.scripts import SCRIPTS, script_of

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
