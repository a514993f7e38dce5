"""A preview of what the model will see of a file of records: how much is cut, and the first three records."""

import json
import tomllib
from collections.abc import Iterator

import numpy as np

from client.data import sources
from client.data.records import Records
from client.data.sources import Texts
from client.data.tokenise import Tokenised, tokenise
from client.models.base import load_tokenizer
from server.config.load import parse
from simulations.presets.template import Looked

_LOOKED_AT = 1000
"""Number of records that are tokenised."""
_SHOWN = 3
_MOST_CHARACTERS = 300


def describe_records(found: Looked, content: str) -> Iterator[str]:
    """Describe how a file of records is understood, in lines for a person.

    What the loss is on is in double angle brackets where it is not all of a record.

    Raises:
        ValueError: the records cannot be read so, or none of them can be used.
    """
    config = parse(tomllib.loads(content))
    reading = found.reading if found.task == "classification" else found.reading.replace(label_column="")
    whole = sources.read(f"{found.kind}:{found.path}", reading, "DATA", task=found.task)
    return _lines(found, config.model.name, config.model.max_length, whole)


def _lines(found: Looked, model: str, longest: int, whole: Texts) -> Iterator[str]:
    for reason, count in whole.left_out.items():
        yield f"left out: {count:,} {reason}"
    for what, count in whole.noted.items():
        yield f"{count:,} {what}"
    some = whole.select(range(min(_LOOKED_AT, len(whole))))
    try:
        tokenizer = load_tokenizer(model)
    except ValueError as error:  # a model that is not here yet; its settings are written all the same
        yield f"records are not shown as tokens: {error}"
        return
    made = tokenise(some, None, tokenizer, found.task, longest)
    yield (
        f"tokens: {int(np.median(made.records.lengths))} a record (median), {made.truncated:,} of "
        f"{len(made.records):,} are cut at {longest} (model.max-length)"
    )
    labels = made.of(some).labels
    for row in range(min(_SHOWN, len(made.records))):
        label = f" -> {labels[row]}" if labels is not None else ""
        yield f"record {row + 1}: {_shown(made, row, tokenizer)}{label}"


def _shown(made: Tokenised, row: int, tokenizer: object) -> str:
    records: Records = made.records
    span = slice(int(records.offsets[row]), int(records.offsets[row + 1]))
    tokens = records.tokens[span].tolist()
    weights = [1.0] * len(tokens) if records.token_weights is None else records.token_weights[span].tolist()
    text, start = "", 0
    while start < len(tokens):
        stop = start
        while stop < len(tokens) and bool(weights[stop]) == bool(weights[start]):
            stop += 1
        piece = tokenizer.decode(tokens[start:stop])  # type: ignore[attr-defined]
        marked = records.token_weights is not None and weights[start]
        text, start = text + (f"\u00ab{piece}\u00bb" if marked else piece), stop
    line = json.dumps(text, ensure_ascii=False)[1:-1]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]} ..."
