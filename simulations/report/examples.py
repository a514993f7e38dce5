"""What a run's adapter answered at its end, beside what the base model says; shortened for a terminal."""

from collections.abc import Iterator
from typing import NamedTuple

from simulations.report.read_run import Run

SHORT = 160
"""Characters of a text in the summary of a run."""


class Example(NamedTuple):
    """One test record: what was asked, what it holds as the answer, and the answers without and with the adapter."""

    prompt: str
    reference: str
    before: str
    after: str


def examples(run: Run) -> list[Example]:
    """The examples in results.json; none where it has none, or is of an earlier version."""
    rows = (run.results or {}).get("examples")
    if not isinstance(rows, list):
        return []
    return [
        Example(*(str(row[name]) for name in Example._fields))
        for row in rows
        if isinstance(row, dict) and row.keys() >= set(Example._fields)
    ]


def shortened(run: Run) -> Iterator[tuple[str, str]]:
    """The first example in three lines with their labels; of a prompt the end, where the question is."""
    for example in examples(run)[:1]:
        yield "asked", _end(example.prompt)
        yield "before", _beginning(example.before)
        yield "after", _beginning(example.after)


def _beginning(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else f"{text[: SHORT - 3].rstrip()}..."


def _end(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else f"...{text[3 - SHORT :].lstrip()}"
