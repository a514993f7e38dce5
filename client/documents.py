"""WikiText-2 as documents: articles, their paragraphs, and the third of the articles no base model has been trained on.

The tokenised WikiText-2 (Merity et al. 2016, arXiv 1609.07843) is a stream of lines. An article opens with a line
`` = Title = `` between two blank ones, as its sections do with more equals signs.

:mod:`simulations.pretrain` trains ``lacquer-small`` on the training split without the articles that
:func:`held_back` names, about a third of them. An experiment that calls WikiText-2 private data takes those: a model
that was pre-trained on the records to protect would measure nothing.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
