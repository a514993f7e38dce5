"""Near-copies: do synthetic texts repeat private ones more than they repeat texts that the run has never seen?

A text repeats another where both have the same :data:`WORDS` words in a row, or are equal; words are compared in the
normal form, without case. Private training texts are compared with as many test texts, which are public and were not
trained on: language that everybody uses repeats both. Only what goes beyond the test texts speaks of memory. Test texts
must be drawn as the private ones are for that; where they are not (other restaurants, another year), the difference
holds that, too.

It reads private records: what it finds is not covered by the guarantee and stays with the owner.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client.data.columns.normal_form import normal_form
from client.data.prepared import PreparedData
from client.data.records import Records
from client.generation import text_of
from privacy import durable
from server.evaluation.finished import FinishedRun
from server.evaluation.private import NORMAL_95
from server.run_folder.names import AUDIT_FOLDER
from simulations.audit.findings import read_records

WORDS = 8
NEAR_COPIES_FILE = "near-copies.json"
_WORD = re.compile(r"\w+")
_BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that runs of words are told apart by their hash; two that are not collide with probability about 2^-64."""


@dataclass(frozen=True)
class NearCopies:
    """How many synthetic texts repeat private texts, and how many repeat as many texts that nobody trained on.

    Attributes:
        texts: synthetic texts that were looked at.
        compared: private texts, and test texts, that they were compared with.
        private, unseen: synthetic texts with a run of words that is in a private text, in a test text.
        copies, unseen_copies: synthetic texts that are equal to a private text, to a test text.
        difference, within: share of `private` above that of `unseen`, and half its 95 % interval.
        longest: most words in a row that a synthetic text shares with a private one.
    """

    texts: int
    compared: int
    private: int
    unseen: int
    copies: int
    unseen_copies: int
    difference: float
    within: float
    longest: int

    @property
    def sentence(self) -> str:
        """The finding in words."""
        found = "more than" if self.difference > self.within else "no more than"
        return (
            f"{self.private:,} of {self.texts:,} texts share {WORDS} words in a row with one of {self.compared:,} "
            f"private texts, {self.unseen:,} with one of as many that the run has not seen: {found} chance explains "
            f"({100 * self.difference:+.2f} +-{100 * self.within:.2f} points, 95 %). {self.copies:,} are equal to a "
            f"private text, {self.unseen_copies:,} to an unseen one. The longest shared run has {self.longest} words."
        )


def near_copies(run: FinishedRun, texts: Sequence[str], seed: int = 0) -> NearCopies:
    """Compare synthetic texts with the private training records of a run and with its test records.

    Args:
        seed: draws which records are compared, where there are more of one kind than of the other.

    Raises:
        ValueError: the records are not here, are not those of the run, or there are none to compare with.
    """
    data: PreparedData = read_records(run)
    count = min(len(data.train), len(data.test))
    if not count or not texts:
        raise ValueError(f"{run.folder}: there are no texts, or no test records beside the private ones")
    draws = np.random.default_rng(seed)
    tokenizer = run.tokenizer()
    private, unseen = (
        _texts(tokenizer, part.select(np.sort(draws.choice(len(part), size=count, replace=False))))
        for part in (data.train, data.test)
    )
    return compare_texts(texts, private, unseen)


def compare_texts(texts: Sequence[str], private: Sequence[str], unseen: Sequence[str]) -> NearCopies:
    """Count the texts that repeat one of `private` or of `unseen`, which are equally many."""
    known: dict[str, int] = {}
    rows, secret, others = ([_numbers(text, known) for text in part] for part in (texts, private, unseen))
    near = [_repeats(rows, among, WORDS) for among in (secret, others)]
    equal = [{row.tobytes() for row in among} for among in (secret, others)]
    copies = [sum(row.tobytes() in among for row in rows) for among in equal]
    excess = near[0].astype(float) - near[1].astype(float)
    within = NORMAL_95 * float(excess.std(ddof=1)) / len(rows) ** 0.5 if len(rows) > 1 else 1.0
    return NearCopies(
        texts=len(rows),
        compared=len(private),
        private=int(near[0].sum()),
        unseen=int(near[1].sum()),
        copies=copies[0],
        unseen_copies=copies[1],
        difference=float(excess.mean()),
        within=within,
        longest=_longest(rows, secret),
    )


def write_near_copies(run_folder: Path, found: NearCopies) -> Path:
    """Write the finding into the run's audit folder, for its owner alone; returns the file."""
    folder = run_folder / AUDIT_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / NEAR_COPIES_FILE
    durable.write(file, json.dumps({**asdict(found), "words": WORDS}, indent=2) + "\n", mode=0o600)
    return file


def read_texts(run: FinishedRun, file: Path) -> list[str]:
    """Read what the model of a run has written into a file of :mod:`server.evaluation.synthetic`: of answers, these."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if run.task == "instruction":
        return [row["messages"][-1]["content"] for row in rows]
    data = run.config.data
    return [row[data.text_pair_column if run.task == "summarisation" else data.text_column] for row in rows]


def _texts(tokenizer: Any, records: Records) -> list[str]:
    """The records as people read them."""
    return [text_of(tokenizer, row.tolist()) for row in np.split(np.asarray(records.tokens), records.offsets[1:-1])]


def _numbers(text: str, known: dict[str, int]) -> np.ndarray:
    """The words of a text as numbers; new words are added to `known`."""
    words = _WORD.findall(normal_form(text).casefold())
    return np.array([known.setdefault(word, len(known) + 1) for word in words], np.uint64)


def _runs(row: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` words in a row."""
    if len(row) < length:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(row, length)
    powers = np.multiply.accumulate(np.full(length, _BASE, np.uint64))
    found: np.ndarray = (_mixed(windows) * powers).sum(axis=1, dtype=np.uint64)
    return found


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers spread over 64 bits (the finaliser of SplitMix64), so that sums of a few of them differ."""
    found = numbers.copy()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
    found ^= found >> np.uint64(31)
    return found


def _repeats(rows: Sequence[np.ndarray], among: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Which of the rows have `length` words in a row that one of the others has."""
    theirs = np.unique(np.concatenate([np.zeros(0, np.uint64), *(_runs(row, length) for row in among)]))
    return np.array([bool(np.isin(_runs(row, length), theirs).any()) for row in rows])


def _longest(rows: Sequence[np.ndarray], among: Sequence[np.ndarray]) -> int:
    """Most words in a row that a row shares with one of the others."""
    low, high = 0, max(map(len, rows), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if _repeats(rows, among, middle).any():
            low = middle
        else:
            high = middle - 1
    return low
