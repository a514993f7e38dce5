"""Pairs of sentences about restaurants: E2E NLG (Novikova et al. 2017, arXiv 1706.09254) made into preferences.

A row of E2E is a meaning representation, such as ``name[Blue Spice], area[riverside]``, and what somebody wrote for it.
The prompt is the representation, the chosen answer that person's sentence. The rejected one is a person's sentence too,
and which one follows from a hash of the row.

- ``train``, ``validation``, ``test``: a sentence for a representation of the same part that differs in the values of
  one slot, or where there is none of two, and never in the name. What is learnt is to say what is asked for.
- ``brief-train`` and so on: a sentence for the same representation, longer by a quarter or more. What is learnt is to
  say it in few words.

A sentence may so stand in pairs of several clients. What a client's guarantee covers is its own pairs.
"""

import hashlib
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

BRIEF = "brief-"
LONGER = 1.25
"""How much longer, in characters, the rejected one of two sentences is where the brief one is preferred."""
PARTS = tuple(f"{kind}{part}" for kind in ("", BRIEF) for part in ("train", "validation", "test"))
_SLOT = re.compile(r"([^,\[\]]+)\[([^\]]*)\]")

Slots = dict[str, str]


def slots_of(meaning: str) -> Slots:
    """The values of a meaning representation by slot."""
    return {slot.strip(): value.strip() for slot, value in _SLOT.findall(meaning)}


def pairs(folder: Path, part: str) -> pyarrow.Table:
    """Columns ``prompt``, ``chosen``, ``rejected``, ``mr``."""
    table = pyarrow.parquet.read_table(folder / f"{part.removeprefix(BRIEF) or 'train'}.parquet")
    meanings, sentences = table["mr"].to_pylist(), table["ref"].to_pylist()
    written = defaultdict[str, list[str]](list)
    for meaning, sentence in zip(meanings, sentences, strict=True):
        written[meaning].append(sentence)
    brief = part.startswith(BRIEF)
    others = {meaning: [meaning] for meaning in written} if brief else near_misses(list(written))
    rows = []
    for meaning, sentence in zip(meanings, sentences, strict=True):
        wrong = [other for near in others[meaning] for other in written[near] if other != sentence]
        if brief:
            wrong = [other for other in wrong if len(other) >= LONGER * len(sentence)]
        if wrong:
            drawn = hashlib.sha256(f"{meaning}\n{sentence}".encode()).digest()
            rejected = wrong[int.from_bytes(drawn[:8]) % len(wrong)]
            rows.append((f"{meaning}\n", sentence, rejected, meaning))
    names = ("prompt", "chosen", "rejected", "mr")
    return pyarrow.table({name: [row[i] for row in rows] for i, name in enumerate(names)})


def near_misses(meanings: Sequence[str]) -> dict[str, list[str]]:
    """Representations like each one but for one slot, else two; with the same slots and the same name."""
    slots = {meaning: slots_of(meaning) for meaning in meanings}
    found: dict[str, list[str]] = {meaning: [] for meaning in meanings}
    for count in (1, 2):
        alike = defaultdict[object, list[str]](list)
        for meaning, values in slots.items():
            for left_out in _choices(values, count):
                alike[_rest(values, left_out), left_out].append(meaning)
        for meaning in [meaning for meaning, near in found.items() if not near]:
            values = slots[meaning]
            groups = [alike[_rest(values, left_out), left_out] for left_out in _choices(values, count)]
            found[meaning] = list(dict.fromkeys(near for group in groups for near in group if near != meaning))
    return found


def _choices(values: Slots, count: int) -> list[tuple[str, ...]]:
    return list(itertools.combinations(sorted(set(values) - {"name"}), count))


def _rest(values: Slots, left_out: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in values.items() if item[0] not in left_out)
