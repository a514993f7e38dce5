"""Texts that are no English prose become the tokens, types and scores that the reference libraries give."""

from typing import Any

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from client.data.sources import Texts
from client.data.tokenise import tokenise
from client.generation import rouge
from client.models.base import load_base, load_tokenizer, token_types
from client.models.export import save_tokenizer

TEXTS = [
    "Grüße aus Köln: naïve Öl, Ａｌｐｈａ",
    "Rene\u0301 und Ren\u00e9",
    "你好，世界。今天天气很好！",
    "日本語のテキスト、カタカナ。",
    "안녕하세요 세계",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם (abc) ‏123",
    "Привет, мир! Как дела?",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ✈️",
    "می‌خواهم",
    "a [SEP] b [CLS] [MASK] [PAD]",
    "a </s> b <s> <unk> <pad> <|im_end|> <|endoftext|>",
    "\0NUL\0 \x07bell \x1b[31mred",
    "\ufeffbom \u200b \u00a0 \u2028 \u202eright to left\u202c",
    "half \ufffd character",
    "tab\tline\r\nend \\u0041 {{ template }} {% raw %}",
    "x" * 100_000,
    "word " * 20_000,
    "é" * 5_000,
]
NAMES = ("minilm", "smollm2", "lacquer-small", "random:bert")


def rows(made: object) -> list[list[int]]:
    records = made.records  # type: ignore[attr-defined]
    return [row.tolist() for row in np.split(records.tokens, records.offsets[1:-1])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("paired", [False, True])
def test_a_classifiers_tokens_are_those_of_its_tokenizer(name: str, paired: bool) -> None:
    tokenizer = load_tokenizer(name)
    pairs = TEXTS[::-1] if paired else None
    made = tokenise(Texts(TEXTS, pairs), None, tokenizer, "classification", 48)
    for number, row in enumerate(rows(made)):
        second = TEXTS[-1 - number] if paired else None
        reference = tokenizer(TEXTS[number], second, truncation=True, max_length=48, split_special_tokens=True)
        assert row == reference["input_ids"]
        if tokenizer.sep_token_id is not None:
            assert row.count(tokenizer.sep_token_id) == 1 + paired
            types = token_types(torch.tensor([row]), tokenizer.sep_token_id)[0].tolist()
            assert types == reference["token_type_ids"]


@pytest.mark.parametrize("name", ["smollm2", "lacquer-small", "random:llama"])
@pytest.mark.parametrize("longest", [4, 24, 64])
def test_an_end_token_stands_where_a_text_ends_and_nowhere_else(name: str, longest: int) -> None:
    tokenizer = load_tokenizer(name)
    made = tokenise(Texts(TEXTS), None, tokenizer, "causal-lm", longest)
    cut = 0
    for text, row in zip(TEXTS, rows(made), strict=True):
        whole = tokenizer(text, split_special_tokens=True)["input_ids"]
        if whole[-1] == tokenizer.eos_token_id:
            whole.pop()
        assert row == [*whole, tokenizer.eos_token_id][:longest]
        assert (
            tokenizer.decode(row, skip_special_tokens=True)
            == tokenizer.decode(whole[:longest])[
                len(tokenizer.bos_token or "") if whole[0] == tokenizer.bos_token_id else 0 :
            ]
        )
        cut += len(whole) > longest
    assert made.truncated == cut > 0


@pytest.mark.parametrize("name", ["smollm2", "lacquer-small", "random:llama"])
def test_a_summary_that_is_cut_has_no_end(name: str) -> None:
    tokenizer = load_tokenizer(name)
    made = tokenise(Texts(TEXTS, TEXTS), None, tokenizer, "summarisation", 32)
    ended = [row[-1] == tokenizer.eos_token_id for row in rows(made)]
    assert len(ended) - sum(ended) == made.answers_cut > 0
    assert all(row.count(tokenizer.eos_token_id) <= 1 + (row[0] == tokenizer.eos_token_id) for row in rows(made))


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_tokenizer_encodes_as_the_records_were(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = load_tokenizer(name)
    for task, split in (("classification", True), ("causal-lm", True), ("instruction", False)):
        save_tokenizer(tokenizer, task, tmp_path / task)
        saved: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tmp_path / task)
        for text in TEXTS[:18]:
            assert saved(text)["input_ids"] == tokenizer(text, split_special_tokens=split)["input_ids"]
    assert not tokenizer.split_special_tokens, "what is loaded stays as it is"


def test_a_classifier_gives_a_spelled_separator_what_transformers_gives_it() -> None:
    model: Any
    model, tokenizer = load_base("minilm", "classification", 2)
    with torch.no_grad():
        torch.nn.init.normal_(model.classifier.weight)
        for paired in (False, True):
            texts = Texts(TEXTS, TEXTS[::-1] if paired else None)
            for number, row in enumerate(rows(tokenise(texts, None, tokenizer, "classification", 32))):
                second = TEXTS[-1 - number] if paired else None
                options = {"truncation": True, "max_length": 32, "split_special_tokens": True}
                tokens = tokenizer(TEXTS[number], second, return_tensors="pt", **options)
                served = model.head(model.encoder(**tokens).last_hidden_state, tokens["attention_mask"])
                torch.testing.assert_close(model(torch.tensor([row])), served, atol=1e-6, rtol=0)


ENGLISH = ["The cats' running wasn't over: 3.5% of snake_case", "cat runs 3 5 of a case", "A-b c", "?!", "x"]


def test_rouge_is_that_of_rouge_score_in_english() -> None:
    kinds = ["rouge1", "rouge2", "rougeL"]
    reference = RougeScorer(kinds, use_stemmer=True)
    for first in ENGLISH:
        for second in ENGLISH:
            wanted = reference.score(second, first)
            assert rouge([first], [second]) == {kind: wanted[kind].fmeasure for kind in kinds}


@pytest.mark.parametrize(
    "text", [text for text in TEXTS if any(char.isalpha() or ord(char) > 0x1F000 for char in text)]
)
def test_rouge_of_equal_texts_is_1_in_every_script(text: str) -> None:
    assert rouge([text[:400]], [text[:400]])["rouge1"] == 1.0


@pytest.mark.parametrize(
    ("first", "second", "score"),
    [
        ("Bär", "Bör", 0.0),
        ("naïve Öl", "na ve l", 0.0),
        ("Rene\u0301", "REN\u00c9", 1.0),
        ("你好世界", "你好朋友", 0.5),
        ("привет мир", "привет всем", 0.5),
        ("नमस्ते दुनिया", "नमस्ते भारत", 0.5),
    ],
)
def test_words_of_other_scripts_are_words(first: str, second: str, score: float) -> None:
    assert rouge([first], [second])["rouge1"] == score
