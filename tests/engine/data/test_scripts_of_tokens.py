"""The script of records, read back from their tokens by the tokenizer that made them."""

import numpy as np

from client.data.columns.scripts import SCRIPTS, scripts_of
from client.data.columns.shares import parts_of, share_row
from client.data.records import Records
from client.models.base import load_tokenizer
from tests.client.data.columns.test_scripts import TEXTS


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
