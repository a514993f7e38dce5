"""Pairs of answers as tokens: texts and conversations, cut alike, prepared, dealt and found again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.data import conversations
from client.data.columns import preferences
from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.data.records import Records
from client.data.sources import Texts
from client.data.spec import DataSpec
from client.data.tokenise import Tokenised, tokenise
from client.models.base import load_base, load_tokenizer

LONG = "a b c d e f g h i j k l m n o p "
SPEC = DataSpec(
    tokenizer="lacquer-small", clients=4, task="preference", partition="iid", validation_records=3, test_records=3
)


def made(*lines: str, longest: int = 128, tokenizer: Any = None) -> Tokenised:
    tokenizer = tokenizer or load_tokenizer("lacquer-small")
    return tokenise(Texts(list(lines)), None, tokenizer, "preference", longest)


def both(records: Records, row: int = 0) -> list[tuple[list[int], list[float]]]:
    low, high = records.offsets[row], records.offsets[row + 1]
    middle = low + records.splits[row]
    spans = (slice(low, middle), slice(middle, high))
    return [(records.tokens[span].tolist(), records.token_weights[span].tolist()) for span in spans]


def test_an_answer_is_compared_with_its_end_and_the_prompt_is_given() -> None:
    tokenizer: Any = load_tokenizer("lacquer-small")
    chosen, rejected = both(made(preferences.to_text("The sky is", " blue.", " a green one.")).records)
    for (tokens, weights), text in ((chosen, " blue."), (rejected, " a green one.")):
        assert tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(tokens[:-1], skip_special_tokens=True) == "The sky is" + text
        answer = [token for token, weight in zip(tokens, weights, strict=True) if weight]
        assert tokenizer.decode(answer[:-1]) == text
        assert set(weights[: -len(answer)]) == {0.0}
    # where the last token of a prompt goes on in an answer, the answer begins with that token, as in TRL
    merged, _ = both(made(preferences.to_text("The sk", "y", "ill")).records)
    whole = tokenizer("The sky")["input_ids"]
    assert [t for t in merged[0] if t != tokenizer.eos_token_id][-2:] == [
        t for t in whole if t != tokenizer.eos_token_id
    ][-2:]


def test_conversations_are_rendered_and_earlier_answers_are_read_only() -> None:
    def line(answer: str) -> str:
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello", "train": False},
            {"role": "user", "content": "Which colour?"},
            {"role": "assistant", "content": answer},
        ]
        return conversations.to_text(turns)

    tokenizer: Any = load_tokenizer("lacquer-small")
    for (tokens, weights), answer in zip(
        both(made(preferences.to_text(line("Blue."), line("Green it is."))).records),
        ("Blue.", "Green it is."),
        strict=True,
    ):
        compared = [token for token, weight in zip(tokens, weights, strict=True) if weight]
        assert compared[-1] == tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(compared[:-1]) == answer
        assert "Hello" in tokenizer.decode(tokens)


def test_a_long_prompt_loses_its_beginning_in_both_texts_alike() -> None:
    found = made(preferences.to_text(LONG * 20, "yes", "no no no no"), longest=40)
    assert (found.truncated, found.answers_cut) == (1, 0)
    (first, weights), (second, others) = both(found.records)
    prompts = [tokens[: w.index(1.0)] for tokens, w in ((first, weights), (second, others))]
    assert prompts[0] == prompts[1]
    assert max(len(first), len(second)) == 40
    found = made(preferences.to_text(LONG, LONG * 20, "no " + LONG * 20), longest=40)
    assert found.answers_cut == 1
    assert all(len(tokens) == 40 and any(weights) for tokens, weights in both(found.records))
    found = made(
        preferences.to_text("", "x " * 90 + "a", "x " * 90 + "b"), preferences.to_text("p", "a", "b"), longest=20
    )
    assert found.left_out == {"pairs with equal answers, once they are cut": 1}
    assert len(found.records) == 1


def test_pairs_are_prepared_dealt_and_opened(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} plus {i} is", "chosen": f" {2 * i}.", "rejected": f" {2 * i + 1}."} for i in range(30)]
    source = tmp_path / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(SPEC.replace(source=f"jsonl:{source}", cache=str(tmp_path / "cache")))
    again = PreparedData.open(data.folder, verify=True)
    assert data.meta["records"] == {"train": 24, "validation": 3, "test": 3}
    assert data.predicted_tokens("test", 0, 3) is None  # metrics are over pairs
    tokenizer: Any = load_tokenizer("lacquer-small")
    seen = set()
    for client in range(4):
        records = again.client(client)
        for row in range(len(records)):
            (chosen, _), (rejected, _) = both(records, row)
            seen.add(tokenizer.decode(chosen, skip_special_tokens=True))
            assert chosen != rejected
    assert len(seen) == 24
    picked = again.train.select([5, 5, 0])
    assert both(picked, 1) == both(again.train, 5)


def test_generated_consultations_become_pairs(tmp_path: Path) -> None:
    spec = SPEC.replace(partition="natural", records_per_client=2, cache=str(tmp_path), max_length=160)
    data = prepare(spec)
    assert data.meta["records"] == {"train": 8, "validation": 3, "test": 3}
    assert (np.asarray(data.train.splits) > 0).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"canaries": 2}, "model.task = 'preference' has none"),
        ({"sensitive": "redaction"}, "data.sensitive = 'redaction'"),
        ({"text_pair_column": "answer"}, "data.text-pair-column = 'answer'"),
        ({"partition": "dirichlet"}, "skews labels"),
    ],
)
def test_settings_that_pairs_do_not_have(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(SPEC.replace(**changes))


def test_no_pair_can_be_rendered() -> None:
    tokenizer: Any = load_base("random:llama", "preference")[1]
    line = conversations.to_text([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}])
    with pytest.raises(ValueError, match="none of 1 pairs can be used"):
        tokenise(
            Texts([preferences.to_text(line, line.replace("x", "y"))]),
            None,
            tokenizer,
            "preference",
            64,
            chat_template="{{ raise_exception('never') }}",
        )
