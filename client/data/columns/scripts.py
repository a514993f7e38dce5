"""The script that a text is written in, by the Unicode names of its letters: bins that are the same for everybody."""

import unicodedata
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from client.data.records import Records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCRIPTS: Final = (
    *("Latin", "Greek", "Cyrillic", "Hebrew", "Arabic", "Devanagari", "Bengali", "Tamil", "Thai", "Han", "Kana"),
    *("Hangul", "another", "no letters"),
)
"""Names of the bins; a text lies in the one that most of its letters are of."""
_WORDS = {name.upper(): name for name in SCRIPTS[:-2]} | {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}


def script_of(text: str) -> str:
    """Name the script of most letters of a text, one of :data:`SCRIPTS`."""
    if text.isascii():
        return "Latin" if any(map(str.isalpha, text)) else "no letters"
    counts = Counter(_script(letter) for letter in text if letter.isalpha())
    return counts.most_common(1)[0][0] if counts else "no letters"


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return _WORDS.get(unicodedata.name(letter, "").split(" ")[0], "another")


def scripts_of(records: Records, model: str) -> np.ndarray:
    """Find the script of every record, int64 ``[n]`` places in :data:`SCRIPTS`.

    Texts are read back from their tokens: letters that a tokenizer does not know are in no script.

    Args:
        model: base model whose tokenizer made the records.
    """
    if not len(records):
        return np.zeros(0, dtype=np.int64)
    tokens = np.asarray(records.tokens[records.offsets[0] : records.offsets[-1]])
    rows: list[list[int]] = [row.tolist() for row in np.split(tokens, np.cumsum(records.lengths)[:-1])]
    texts = _tokenizer(model).batch_decode(rows, skip_special_tokens=True)
    return np.array([SCRIPTS.index(script_of(text)) for text in texts], dtype=np.int64)


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> "PreTrainedTokenizerBase":
    from client.models.base import load_tokenizer  # loads PEFT, which reading records need not pay for

    return load_tokenizer(model)
