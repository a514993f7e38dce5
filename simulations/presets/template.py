"""A configuration file to start from: every setting with its meaning, or those that a file of records asks for.

What is chosen for a file of records is a guess from its columns, which the written file says; nothing is trained.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from client.data.columns.labels import NUMBER
from client.data.columns.tables import SUFFIXES
from client.data.sources import read_file
from client.data.spec import Reading
from server.config.reference import Setting, settings

MOST_CLASSES = 200
_LABELS = ("label", "labels", "category", "class", "target", "intent", "sentiment", "product", "emotion")
_OWNERS = (
    "user",
    "user_id",
    "userid",
    "client",
    "client_id",
    "author",
    "customer",
    "customer_id",
    "patient",
    "speaker",
)
_PAIRS = (("prompt", "completion"), ("instruction", "response"), ("instruction", "output"), ("question", "answer"))
_COHORT = 50
"""Clients expected in a round, where there are enough."""


def full_template() -> str:
    """Every setting with its default, commented out, under its meaning; it is a valid file as it stands."""
    lines = [
        "# Settings of a run. Lines that begin with # are defaults; take the # away to change one.",
        "# One setting with its whole meaning: lacquer config KEY",
    ]
    table = ""
    for one in settings():
        parent, _, key = one.key.rpartition(".")
        if parent != table:
            lines += ["", f"[{parent}]"]
            table = parent
        values = one.limits if "|" in one.limits else f"{one.type} {one.limits}".strip()
        lines += [f"# {one.line} ({values})", f"# {key} = {_toml(one)}"]
    return "\n".join(lines) + "\n"


def _toml(one: Setting) -> str:
    if one.default is None:
        return "{}"
    return json.dumps(one.default, ensure_ascii=False)


@dataclass(frozen=True)
class Looked:
    """What a file of records holds.

    Attributes:
        rows: in the file.
        columns: names.
        reading: how it is read.
        chosen: columns by the key they are given to.
        notes: why, one for each choice.
    """

    path: Path
    kind: str
    rows: int
    columns: list[str]
    reading: Reading
    chosen: dict[str, str]
    notes: list[str]
    clients: int
    task: str


def look(path: Path) -> Looked:
    """Read a file of records and guess what its columns are.

    Raises:
        ValueError: another kind of file, one that cannot be read, or none of whose columns holds texts.
    """
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"{path}: its ending must be one of {', '.join(SUFFIXES)}, or .toml for all settings")
    reading = Reading(label_column="") if kind != "csv" else _csv_reading(path)
    table = read_file(f"{kind}:{path}", reading, "DATA")
    names, chosen, notes = table.names, dict[str, str](), list[str]()
    values = {name: table.cells(name)[:5000] for name in names}
    if not table.rows:
        raise ValueError(f"{path} has no rows")
    lower = {name.lower(): name for name in names}

    def choose(key: str, name: str, why: str) -> None:
        chosen[key] = name
        notes.append(f"{key} = {name!r}: {why}")

    pair = next(((lower[a], lower[b]) for a, b in _PAIRS if a in lower and b in lower), None)
    texts = {name: _words(column) for name, column in values.items() if _is_text(column)}
    owner = next((lower[name] for name in _OWNERS if name in lower), None)
    label = next((lower[name] for name in _LABELS if name in lower), None)
    task = "causal-lm"
    if "messages" in lower or "conversations" in lower:
        task = "instruction"
        choose("text-column", lower.get("messages") or lower["conversations"], "it holds conversations")
    elif pair:
        task = "instruction"
        choose("text-column", pair[0], "a column of prompts")
        choose("text-pair-column", pair[1], "a column of answers")
    elif not texts:
        raise ValueError(f"{path}: no column holds texts; it has {', '.join(names)}")
    else:
        label = label or _likely_label(values, texts, owner)
        candidates = {name: words for name, words in texts.items() if name not in (label, owner)} or texts
        choose("text-column", max(candidates, key=lambda name: candidates[name]), "its texts are the longest")
        if label is not None:
            task = "classification"
            count = len({str(value) for value in values[label]})
            choose("label-column", label, f"{count} different values in the first {min(5000, table.rows):,} rows")
    clients = 0
    if owner is not None:
        clients = len(set(table.names_of(owner, str(path))))
        choose("client-column", owner, f"{clients:,} different values; every one is a client that is protected")
    return Looked(path, kind, table.rows, names, reading, chosen, notes, clients, task)


def data_template(found: Looked, base: Path) -> str:
    """The settings for a file of records, with why each was chosen.

    Args:
        base: folder of the file to be written; the path of the records is relative to it where it lies below.
    """
    held_out = max(20, min(1000, found.rows // 10))
    left = found.rows - 2 * held_out
    natural = bool(found.clients)
    members = max(1, round(found.clients * left / found.rows)) if natural else max(1, min(1000, left // 10))
    rate = min(1.0, float(f"{_COHORT / members:.2g}"))
    delta = 1.0
    while delta * 10 * max(members, found.clients) > 1:
        delta /= 10
    where = found.path.resolve()
    shown = where.relative_to(base.resolve()) if where.is_relative_to(base.resolve()) else where
    language = found.task != "classification"
    model = {"causal-lm": "lacquer-small", "instruction": "smollm2"}.get(found.task, "minilm")
    lines = [
        f"# Written after a look at {found.path.name}: {found.rows:,} rows, columns {', '.join(found.columns)}.",
        "# What was guessed says why; check it. All settings: lacquer config",
        f"name = {json.dumps(found.path.stem)}",
        "rounds = 40",
        f"clients = {0 if natural else members}"
        + ("  # as many as the column of clients names" if natural else "  # simulated: records are dealt to them"),
        f"sampling-rate = {rate:g}  # about {round(rate * members)} clients expected in a round",
        "",
        "[privacy]",
        "epsilon = 8.0",
        f"delta = {delta:g}  # below 1 / clients",
        "",
        "[model]",
        f'name = "{model}"',
        f'task = "{found.task}"',
        'targets = "auto"',
        "",
        "[data]",
        f"source = {json.dumps(f'{found.kind}:{shown}')}",
    ]
    lines += [f"# {note}" for note in found.notes]
    lines += [f"{key} = {json.dumps(name)}" for key, name in found.chosen.items()]
    for key in ("separator", "encoding"):
        value, default = getattr(found.reading, key), Reading.model_fields[key].default
        if value != default:
            lines.append(f"{key} = {json.dumps(value)}")
    partition = "natural" if natural else "iid" if language else "dirichlet"
    lines += [f'partition = "{partition}"', f"validation-records = {held_out}", f"test-records = {held_out}"]
    lines += ["", "[local]", f"learning-rate = {0.3 if language else 0.1}"]
    return "\n".join(lines) + "\n"


def _csv_reading(path: Path) -> Reading:
    """Separator and encoding, from the first lines."""
    start = path.read_bytes()[: 1 << 16]
    encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    try:
        start.decode(encoding, "strict") if len(start) < 1 << 16 else start[: start.rfind(b"\n")].decode(encoding)
    except UnicodeDecodeError:
        encoding = "latin-1"
    separator = ""
    if ".tsv" not in path.suffixes:
        lines = start.decode(encoding, "replace").splitlines()
        header = next(csv.reader(islice(lines, 1)), [""])
        if len(header) == 1:
            separator = next((each for each in ";\t|" if each in lines[0]), "") if lines else ""
    return Reading(label_column="", separator=separator, encoding=encoding)


def _is_text(column: Sequence[Any]) -> bool:
    words = [value for value in column if isinstance(value, str)]
    return not all(map(NUMBER.fullmatch, words)) and all(isinstance(value, str | None) for value in column)


def _words(column: Sequence[Any]) -> float:
    return sum(len(str(value).split()) for value in column) / max(1, len(column))


def _likely_label(values: dict[str, list[Any]], texts: dict[str, float], owner: str | None) -> str | None:
    """A column of few different short values."""
    found = []
    for name, column in values.items():
        different = len({str(value) for value in column})
        short = name not in texts or texts[name] < 4
        whole = all(isinstance(value, str | None) for value in column)
        if name != owner and short and whole and 2 <= different <= min(MOST_CLASSES, len(column) // 5):
            found.append((different, name))
    return min(found)[1] if found else None
