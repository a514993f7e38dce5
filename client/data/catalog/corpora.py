"""Named public data sets read from a folder: ``data.source = "KIND:FOLDER"``, or ``"KIND:FOLDER@PART"`` for a part.

- ``diabetes130``: narratives of hospital encounters (:mod:`client.data.catalog.diabetes130`), with ``patient_nbr`` and
  ``readmitted``.
  Parts: ``attack`` (20 % of the patients, for membership attacks), and of the rest ``eval`` (10 %) and ``train``.
  The parts are cut by patient whatever the unit of privacy, so nobody is on two sides of a comparison.
- ``wikitext2``: paragraphs of WikiText-2 with the ``article`` they are from.
  Parts: ``train``, ``validation``, ``test``, and ``held-back``, the articles of ``train`` that ``lacquer-small`` never
  saw.
- ``sgd``: conversations of a user with an assistant that books and looks up, with ``dialogue_id`` (Rastogi et al. 2020,
  arXiv 1909.05855). Parts: ``train``, ``validation``, ``test``.
- ``e2e``: pairs of sentences about restaurants, for ``model.task = "preference"``
  (:mod:`client.data.catalog.restaurants`). Parts: ``train``, ``validation``, ``test``, and each as ``brief-``.
- ``abstracts``: every distinct text of the parquet files in the folder, in order (PE-SGD's PubMed, bioRxiv and
  congressional texts). No parts.

Files: as ``lacquer data`` writes them (:mod:`client.data.catalog.published`).

The tokenised WikiText-2 (Merity et al. 2016, arXiv 1609.07843) is a stream of lines. An article opens with a line
`` = Title = `` between two blank ones, as its sections do with more equals signs. The benchmarks train
``lacquer-small`` on the training split without the articles that :func:`held_back` names, about a third of them. An
experiment that calls WikiText-2 private data takes those: a model that was pre-trained on the records to protect would
measure nothing.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from client.data.catalog import restaurants
from client.data.catalog.diabetes130 import narratives
from client.data.catalog.published import origin_hint

SHARES = {"attack": 0.2, "eval": 0.1}
"""Of the patients, and of the patients left."""

SHORTEST_PARAGRAPH = 100
"""Characters; shorter lines of WikiText-2 are lists, tables' remains and formulas."""

_ENCOUNTERS, _MAPPING = "full.parquet", "ids_mapping.parquet"


def diabetes130(folder: Path, part: str) -> pyarrow.Table:
    """Columns ``text``, ``patient_nbr``, ``readmitted``, ``medical_specialty``."""
    encounters = pyarrow.parquet.read_table(folder / _ENCOUNTERS)
    patients = [str(number) for number in encounters["patient_nbr"].to_pylist()]
    if part:
        chosen = patients_of(part, patients)
        rows = [row for row, patient in enumerate(patients) if patient in chosen]
        encounters, patients = encounters.take(rows), [patients[row] for row in rows]
    kept = {name: encounters[name] for name in ("readmitted", "medical_specialty")}
    texts = list(narratives(encounters, pyarrow.parquet.read_table(folder / _MAPPING)))
    return pyarrow.table({"text": texts, "patient_nbr": patients, **kept})


def patients_of(part: str, patients: list[str]) -> set[str]:
    """The patients of ``"attack"``, ``"eval"`` or ``"train"``; the same on every machine and in any order of rows."""
    order = sorted(set(patients), key=lambda patient: hashlib.sha256(patient.encode()).digest())
    start = 0
    for name, share in SHARES.items():
        stop = start + round(share * (len(order) - start))
        if name == part:
            return set(order[start:stop])
        start = stop
    return set(order[start:])


def wikitext2(folder: Path, part: str) -> pyarrow.Table:
    """Columns ``text`` (a paragraph) and ``article`` (number and title; titles alone are not unique)."""
    split = "train" if part == "held-back" else part or "train"
    lines = pyarrow.parquet.read_table(folder / f"{split}.parquet")["text"].to_pylist()
    found = articles(lines)
    rows = [
        (paragraph, f"{number:03} {article.title}")
        for number, article in enumerate(found)
        if part != "held-back" or held_back(article.title)
        for paragraph in article.paragraphs
        if len(paragraph) >= SHORTEST_PARAGRAPH
    ]
    return pyarrow.table({"text": [text for text, _ in rows], "article": [article for _, article in rows]})


def sgd(folder: Path, part: str) -> pyarrow.Table:
    """Columns ``messages`` and ``dialogue_id``; lines open with ``USER:`` or ``SYSTEM:``, who is the assistant."""
    table = pyarrow.parquet.read_table(folder / f"{part or 'train'}.parquet")
    messages = [[_spoken(line) for line in text.splitlines()] for text in table["text"].to_pylist()]
    return pyarrow.table({"messages": messages, "dialogue_id": table["dialogue_id"]})


_SPEAKERS = {"USER": "user", "SYSTEM": "assistant"}


def _spoken(line: str) -> dict[str, str]:
    speaker, _, words = line.partition(": ")
    return {"role": _SPEAKERS[speaker], "content": words}


def abstracts(folder: Path, part: str) -> pyarrow.Table:
    """Read abstracts into the column ``text``."""
    texts: dict[str, None] = {}
    for path in sorted(folder.glob("*.parquet")):
        texts |= dict.fromkeys(text.strip() for text in pyarrow.parquet.read_table(path)["text"].to_pylist() if text)
    texts.pop("", None)
    return pyarrow.table({"text": list(texts)})


CORPORA: dict[str, tuple[Callable[[Path, str], pyarrow.Table], tuple[str, ...]]] = {
    "diabetes130": (diabetes130, ("train", "eval", "attack")),
    "wikitext2": (wikitext2, ("train", "validation", "test", "held-back")),
    "sgd": (sgd, ("train", "validation", "test")),
    "e2e": (restaurants.pairs, restaurants.PARTS),
    "abstracts": (abstracts, ()),
}
"""What reads each of them, and the parts it can be asked for."""


def read(source: str, option: str) -> pyarrow.Table:
    """The table of a ``KIND:FOLDER[@PART]`` source.

    Raises:
        ValueError: no such folder or part, or the folder does not hold the data set's files.
    """
    kind, folder, part = locate(source, option)
    try:
        table = CORPORA[kind][0](folder, part)
    except (OSError, KeyError, pyarrow.ArrowInvalid) as error:
        raise ValueError(f"{option} = {source!r}: {folder} does not hold the files of {kind}: {error}") from error
    if not len(table):
        raise ValueError(f"{option} = {source!r}: {folder} holds no texts")
    return table


def files(source: str, option: str) -> list[Path]:
    """Every file a source may read, for its fingerprint."""
    return sorted(locate(source, option)[1].glob("*.parquet"))


def locate(source: str, option: str) -> tuple[str, Path, str]:
    """Kind, folder and part (empty for all) of a source.

    Raises:
        ValueError: no such folder or part.
    """
    kind, _, rest = source.partition(":")
    parts = CORPORA[kind][1]
    path, found, part = rest.rpartition("@")
    if not found:
        path, part = rest, ""
    if part and part not in parts:
        known = f"the parts are {', '.join(parts)}" if parts else f"{kind} has no parts"
        raise ValueError(f"{option} = {source!r}: there is no part {part!r}; {known}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{option} = {source!r}: there is no folder {folder}; {origin_hint(folder)}")
    return kind, folder, part


_TITLE = re.compile(r" = ([^=].*?) = \n?")


@dataclass(frozen=True)
class Article:
    """One article: its title and its lines below the title, section headings included, blank lines left out."""

    title: str
    lines: tuple[str, ...]

    @property
    def paragraphs(self) -> list[str]:
        """The lines that are text, without headings and without blanks at their ends."""
        return [line.strip() for line in self.lines if not line.startswith(" =")]

    @property
    def text(self) -> str:
        """The article as one text in the layout of the source: its title, then its lines."""
        return "".join([f" = {self.title} = \n", *self.lines])


def articles(lines: Sequence[str]) -> list[Article]:
    """The articles of a split of WikiText-2, given its lines in order.

    Raises:
        ValueError: text before the first title; this is not the tokenised WikiText-2.
    """
    found: list[tuple[str, list[str]]] = []
    for number, line in enumerate(lines):
        between_blanks = (
            not "".join(lines[max(0, number - 1) : number]).strip()
            and not "".join(lines[number + 1 : number + 2]).strip()
        )
        title = _TITLE.fullmatch(line)
        if title and between_blanks:
            found.append((title[1], []))
        elif line.strip():
            if not found:
                raise ValueError(f"line {number} is before the first article's title: {line[:60]!r}")
            found[-1][1].append(line)
    return [Article(title, tuple(body)) for title, body in found]


def held_back(title: str) -> bool:
    """Whether the article of this title was kept out of the pre-training of ``lacquer-small`` (one in three)."""
    return hashlib.sha256(title.encode()).digest()[0] % 3 == 0


def for_pretraining(found: Iterable[Article]) -> list[Article]:
    """The articles ``lacquer-small`` was trained on."""
    return [article for article in found if not held_back(article.title)]
