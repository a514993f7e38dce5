"""Prompts and references out of prepared records, and the scores of what a model answers."""

import pytest
from transformers import LlamaConfig

from client.data.records import Records
from client.data.sources import Texts
from client.data.tokenise import BEFORE_SUMMARY, tokenise
from client.generation import answer_scores, answer_tasks
from client.models.base import load_tokenizer

TEXTS = Texts(["Ann: tea?\nBob: yes", "A much longer text about tea, and more of it."], ["Bob wants tea.", "Tea, Äh!"])


def records(max_length: int, tokenizer: str = "random:llama") -> Records:
    return tokenise(TEXTS, None, load_tokenizer(tokenizer), "summarisation", max_length).records


@pytest.mark.parametrize("name", ["random:llama", "lacquer-small"])
def test_references_are_the_summaries_and_prompts_end_where_they_begin(name):
    tokenizer = load_tokenizer(name)
    found = answer_tasks(records(100, name), tokenizer, 100, "summarisation")
    assert found.references == TEXTS.pairs
    assert found.cut == 0
    said = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in found.prompts]
    assert said == [text + BEFORE_SUMMARY for text in TEXTS.texts]


def test_a_prompt_without_room_loses_the_end_of_its_text_and_a_cut_reference_is_counted():
    tokenizer = load_tokenizer("random:llama")
    found = answer_tasks(records(24), tokenizer, 16, "summarisation")
    assert [len(prompt) for prompt in found.prompts] == [12, 13]  # 24 less 12, and less a whole summary of 11
    short = answer_tasks(records(100), tokenizer, 16, "summarisation")
    assert [tokenizer.decode(prompt[1:]) for prompt in short.prompts] == ["Ann: t\nSummary:", "A much\nSummary:"]
    assert [bool(part) for part in (found.cut, short.cut)] == [True, False]
    assert found.cut == sum(len(f" {pair}".encode()) + 1 > 12 for pair in TEXTS.pairs or [])


def test_other_records_are_refused():
    with pytest.raises(ValueError, match="token weights"):
        answer_tasks(Records.from_lists([[1, 2]]), load_tokenizer("random:llama"), 9, "instruction")


def test_the_scores_are_of_what_the_model_says(monkeypatch):
    tokenizer = load_tokenizer("random:llama")
    said = [tokenizer(" Bob wants tea.", add_special_tokens=False)["input_ids"], []]
    monkeypatch.setattr("client.generation.continuations", lambda *_: said)

    class Model:
        config = LlamaConfig(max_position_embeddings=130)

    found = answer_scores(Model, tokenizer, records(100), 20, "summarisation")
    assert found.rouge == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}
    assert (found.records, found.most_tokens, found.references_cut) == (2, 20, 0)
