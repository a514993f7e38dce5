"""What each detector of sensitive text takes for sensitive, what it misses, and what it costs.

Run: `python -m simulations.benchmarks papers.detectors --data FOLDER`, the folder that holds wikitext2/. Minutes.

Two corpora: paragraphs of WikiText-2, where nobody says what is sensitive, so only the share that is taken for it is
told; and generated clinical notes, whose personal data are known span by span. A span is found where the detector
covers all of its letters and digits.
"""

from pathlib import Path
from time import process_time
from typing import Annotated, Any

import typer

from client.data.catalog import corpora, notes
from client.data.sensitive import make_detector
from privacy.sensitive_text import TIERS, Detector, Span
from simulations.benchmarks.harness import markdown
from simulations.benchmarks.harness.markdown import Columns, Row
from simulations.benchmarks.harness.results import say, write

NAMES = ("regex", *TIERS, "presidio")
PARAGRAPHS, NOTES, SEED = 400, 600, 0


def covered(spans: tuple[Span, ...]) -> set[int]:
    """Characters of a text that are sensitive."""
    return {place for span in spans for place in range(span.start, span.stop)}


def shares(detector: Detector, texts: list[str]) -> dict[str, float]:
    """Share of the words that are touched, of the texts without any, and CPU seconds for a thousand words."""
    detector.spans(texts[:2])  # loads what it needs
    started = process_time()
    found = detector.spans(texts)
    seconds = process_time() - started
    words = touched = 0
    for text, spans in zip(texts, found, strict=True):
        places, at = covered(spans), 0
        for word in text.split():
            at = text.index(word, at)
            words += 1
            touched += any(place in places for place in range(at, at + len(word)))
            at += len(word)
    return {
        "words": touched / words,
        "untouched_texts": sum(not spans for spans in found) / len(texts),
        "seconds_per_thousand_words": 1000 * seconds / words,
    }


def recall(detector: Detector, written: list[notes.Note]) -> dict[str, float]:
    """Share of the known spans of personal data that are covered, by kind and of all."""
    hits: dict[str, list[bool]] = {}
    found = detector.spans([note.text for note in written])
    for note, spans in zip(written, found, strict=True):
        places = covered(spans)
        for gold in note.spans:
            letters = [place for place in range(gold.start, gold.end) if note.text[place].isalnum()]
            hits.setdefault(gold.kind, []).append(all(place in places for place in letters))
    everything = [hit for kind in hits.values() for hit in kind]
    return {kind: sum(found) / len(found) for kind, found in sorted(hits.items())} | {
        "all": sum(everything) / len(everything)
    }


def main(data: Annotated[Path, typer.Option(help="Folder that holds wikitext2/.")]) -> None:
    """Measure and write the results."""
    paragraphs = corpora.read(f"wikitext2:{data / 'wikitext2'}@validation", "--data")["text"].to_pylist()[:PARAGRAPHS]
    written = notes.generate(NOTES, SEED)
    lines: list[dict[str, Any]] = []
    for name in NAMES:
        detector = make_detector(name)
        found, in_notes = recall(detector, written), shares(detector, [note.text for note in written])
        line = {"detector": name, "name": detector.name, **shares(detector, paragraphs), "recall": found}
        line["notes_words"] = in_notes["words"]
        say(f"{name:16} {line['words']:6.1%} of words, finds {found['all']:6.1%} of personal data")
        lines.append(line)
    write("detectors", {"paragraphs": len(paragraphs), "notes": NOTES, "seed": SEED, "detectors": lines})


def table(results: Row) -> str:
    """Shares, what is found of known personal data, and time, by detector."""
    columns: Columns = {
        "detector": "`{detector}`",
        "words of WikiText-2": lambda row: f"{row['words']:.1%}",
        "paragraphs without any": lambda row: f"{row['untouched_texts']:.1%}",
        "words of notes": lambda row: f"{row['notes_words']:.1%}",
        "personal data found": lambda row: f"{row['recall']['all']:.1%}",
        "least of a kind": lambda row: _least(row["recall"]),
        "CPU time, 1,000 words": lambda row: f"{1000 * row['seconds_per_thousand_words']:.0f} ms",
    }
    counts = f"{results['paragraphs']} paragraphs of WikiText-2 (validation), {results['notes']} generated notes."
    return markdown.table(results["detectors"], columns) + f"\n{counts}" + markdown.provenance(results)


def _least(recall: dict[str, float]) -> str:
    kind = min(recall, key=recall.__getitem__)
    return f"{kind.lower()} {recall[kind]:.0%}"


if __name__ == "__main__":
    typer.run(main)
