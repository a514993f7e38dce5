"""A configuration file to start from: every setting with its meaning, or those that a file of records asks for.

What is chosen for a file of records is a guess from its columns, which the written file says. Where two guesses are as
good, or a column cannot be what it seems, it is refused with the columns there are, and the choice is the caller's.
Nothing is trained.
"""

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from client.data.columns.labels import NUMBER, count_missing
from client.data.columns.normal_form import differ_in_case, normal_form
from client.data.columns.preferences import CHOSEN, PROMPT, REJECTED
from client.data.columns.tables import SUFFIXES, Columns
from client.data.sources import read_file
from client.data.spec import Reading
from server.config.reference import Setting, settings

MOST_CLASSES = 200
_LABELS = ("label", "labels", "category", "class", "target", "intent", "sentiment", "product", "emotion")
_OWNERS = tuple(
    "user user_id userid username client client_id author author_id customer customer_id patient patient_id person "
    "person_id people member participant subject speaker account account_id employee student device_id".split()
)
_LISTS = ("messages", "conversations", "conversation")
_FORMS = (("instruction", "input", "output"), ("instruction", "context", "response"))
"""Conversations in columns of their own, which are read by their names."""
_PAIRS = (("prompt", "completion"), ("instruction", "response"), ("instruction", "output"), ("question", "answer"))
NONE = "none"
"""What a caller names in place of a column where there is none."""
_FEW = 20
"""Clients below which noise drowns what they say, whatever the settings."""
_FEWEST = 5
"""Clients below which a column is not taken for theirs unless a person says so: some of them are held out, too."""
_COHORT = 50
"""Clients expected in a round, where there are enough."""


def full_template() -> str:
    """Write every setting with its default, commented out, under its meaning. The text is a valid file as it stands."""
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
    """The findings of a look at a file of records.

    Attributes:
        rows: in the file.
        columns: names.
        reading: how it is read, the chosen columns included.
        chosen: columns by the key they are given to.
        notes: why, one for each choice, and what is not read.
        warnings: what may not be meant.
        clients: different names in the column of clients; 0 without one.
    """

    path: Path
    kind: str
    rows: int
    columns: list[str]
    reading: Reading
    chosen: dict[str, str]
    notes: list[str]
    warnings: list[str]
    clients: int
    task: str


def look(path: Path, told: Mapping[str, str] | None = None) -> Looked:
    """Read a file of records and guess what its columns are.

    Args:
        told: columns by the option that names them: ``text``, ``label``, ``client`` (:data:`NONE` for none), and the
            ``columns`` of a CSV file without a header.

    Raises:
        ValueError: another kind of file, one that cannot be read, or columns that leave the choice open.
    """
    told = {key: value for key, value in (told or {}).items() if value}
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"{path}: its ending must be one of {', '.join(SUFFIXES)}, or .toml for all settings")
    reading = Reading(label_column="", columns=told.get("columns", ""))
    if kind == "csv":
        reading = _csv_reading(path, reading)
    table = read_file(f"{kind}:{path}", reading, "DATA")
    if not table.rows:
        raise ValueError(f"{path} has no rows")
    _check_names(
        path, table, reading, {option: told[option] for option in ("text", "label", "client") if option in told}
    )
    names = [name for name in table.names if table.names.count(name) == 1]
    flat = {name: table.cells(name) for name in names if table.is_flat(name)}
    first = {name: [normal_form(cell) for cell in cells[:5000]] for name, cells in flat.items()}
    lower = {name.lower(): name for name in names}
    chosen, notes, warnings = dict[str, str](), list[str](), list[str]()

    def choose(key: str, name: str, why: str) -> None:
        chosen[key] = name
        notes.append(f"{key} = {name!r}: {why}")

    def named(option: str, usual: Sequence[str]) -> str | None:
        if option in told:
            return None if told[option] == NONE else told[option]
        return next((lower[name] for name in usual if name in lower and lower[name] in flat), None)

    owner, label = named("client", _OWNERS), named("label", _LABELS)
    form = next((form for form in _FORMS if form[0] in flat and form[2] in flat), None)
    nested = [name for name in names if name not in flat]
    lists = next((name for name in nested if name.lower() in _LISTS or _are_turns(table.cells(name))), None)
    pair = next(((lower[a], lower[b]) for a, b in _PAIRS if a in lower and b in lower), None)
    task, used = "instruction", set[str]()
    if "text" not in told and {CHOSEN, REJECTED} <= set(names):
        task, used = "preference", {PROMPT, CHOSEN, REJECTED} & set(names)
        notes.append(f"{', '.join(name for name in names if name in used)}: pairs of answers, the chosen one preferred")
    elif "text" not in told and lists:
        choose("text-column", lists, "it holds conversations")
    elif "text" not in told and form:
        used = set(form) & set(names)
        notes.append(f"{', '.join(name for name in form if name in used)}: read together as a question and its answer")
    elif "text" not in told and pair:
        choose("text-column", pair[0], "a column of prompts")
        choose("text-pair-column", pair[1], "a column of answers")
    else:
        text, why = _text_column(path, table, first, {label, owner}, told.get("text"))
        choose("text-column", text, why)
        if label is None and "label" not in told:
            label = _likely_label(path, first, {text, owner}, names)
        task = "classification" if label is not None else "causal-lm"
        if label is not None:
            choose("label-column", label, _classes(path, label, flat[label], asked="label" in told))
    clients = 0
    if owner is not None:
        people = table.names_of(owner, str(path))
        if absent := count_missing(people):
            raise ValueError(
                f"{path}: {absent} of {table.rows} rows have no name in column {owner!r}, the first of them row "
                f"{_first_missing(people)}; fill them in, remove them, or take --client {NONE}"
            )
        clients = len(set(people))
        choose("client-column", owner, f"{clients:,} different values; every one is a client that is protected")
        if same := differ_in_case(people):
            warnings.append(f"{same} names in {owner!r} differ in upper and lower case only and are different clients")
        if clients < _FEWEST and "client" not in told:
            raise ValueError(
                f"{path}: column {owner!r} names {clients} clients, and nobody is hidden among so few; name another "
                f"column by --client, take simulated clients (--client {NONE}), or say that it is meant: "
                f"--client {owner}"
            )
        if clients < _FEW:
            warnings.append(f"{clients} clients are too few: below {_FEW} the noise drowns what they say")
    else:
        warnings.append(_nobody(first, {*chosen.values(), *used}))
    if rest := [name for name in table.names if name not in {*chosen.values(), *used}]:
        notes.append(f"not read: {', '.join(dict.fromkeys(rest))}")
    keys = {key.replace("-", "_"): name for key, name in chosen.items()}
    return Looked(path, kind, table.rows, table.names, reading.replace(**keys), chosen, notes, warnings, clients, task)


def _check_names(path: Path, table: Columns, reading: Reading, told: Mapping[str, str]) -> None:
    """Refuse columns that are not there, and a CSV file whose first line is no header."""
    for option, name in told.items():
        if name != NONE and name not in table.names:
            raise ValueError(f"{path}: there is no column {name!r} (--{option}); it has {', '.join(table.names)}")
        if name != NONE and not table.is_flat(name) and option != "text":
            raise ValueError(f"{path}: column {name!r} (--{option}) holds lists or objects, not text")
    if reading.columns or SUFFIXES[path.suffix.lower()] != "csv":
        return
    for name in table.names:
        among = table.names.count(name) == 1 and name in table.cells(name)[:1000]
        if not name.strip() or NUMBER.fullmatch(name) or len(name.split()) > 5 or among:
            raise ValueError(
                f"{path}: its first line looks like a record and not like names of columns ({name[:40]!r}); name the "
                f"{len(table.names)} columns: --columns {','.join('text label user more'.split()[: len(table.names)])}"
            )


def _text_column(
    path: Path, table: Columns, first: Mapping[str, list[str]], taken: set[str | None], told: str | None
) -> tuple[str, str]:
    """Choose the column of texts, and say why."""
    if told is not None:
        return told, "as you said"
    words = {name: _words(cells) for name, cells in first.items() if name not in taken}
    texts = {name: count for name, count in words.items() if count > 1 and not all(map(NUMBER.fullmatch, first[name]))}
    nested = [name for name in table.names if name not in first]
    if not texts:
        inside = f"; {', '.join(nested)} hold lists or objects, which are no texts" if nested else ""
        raise ValueError(
            f"{path}: no column holds texts; it has {', '.join(table.names)}{inside}; name one: --text NAME"
        )
    return max(texts, key=lambda name: texts[name]), "its texts are the longest"


def _classes(path: Path, label: str, cells: Sequence[Any], *, asked: bool) -> str:
    """Describe the classes in a column of labels.

    They are refused where they may not be meant, unless they were asked for.
    """
    written = [normal_form(cell) for cell in cells]
    few = 2 * written.count("") <= len(written)  # rows without a label are then left out and counted
    names = [name for name in written if name or not few]
    if absent := count_missing(names):
        first = next(row for row, name in enumerate(written, 1) if (name or not few) and count_missing([name]))
        raise ValueError(
            f"{path}: {absent} of {len(written)} rows have no label in column {label!r}, the first of them row "
            f"{first}; remove them, fill them in, or train without labels (--label {NONE})"
        )
    counts = Counter(names)
    doubt = ""
    if differ_in_case(counts):
        alike = Counter(name.casefold() for name in counts)
        doubt = f"{', '.join(repr(n) for n in counts if alike[n.casefold()] > 1)} differ in upper and lower case only"
    elif all(map(NUMBER.fullmatch, counts)) and any(not float(name).is_integer() for name in counts):
        doubt = f"its labels are numbers with fractions ({', '.join(islice(counts, 3))})"
    elif len(counts) > MOST_CLASSES:
        doubt = f"it has {len(counts):,} different values"
    if doubt and not asked:
        raise ValueError(
            f"{path}: column {label!r} may hold no classes, {doubt}; write them alike, name another column, or "
            f"say that it is meant: --label {label} (--label {NONE} for none)"
        )
    shown = ", ".join(f"{name} ({count:,})" for name, count in counts.most_common(6))
    return f"{len(counts):,} classes: {shown}{', ...' if len(counts) > 6 else ''}"


def _are_turns(cells: Sequence[Any]) -> bool:
    """Whether a column holds lists of turns."""
    turns = next((cell for cell in cells if isinstance(cell, list) and cell), [None])
    return isinstance(turns[0], dict) and bool({"role", "from"} & set(turns[0]))


def _first_missing(names: Sequence[str]) -> int:
    """The row of the first missing name, from 1; there is one."""
    return (
        names.index("") + 1 if "" in names else next(row for row, name in enumerate(names, 1) if count_missing([name]))
    )


def _nobody(first: Mapping[str, list[str]], taken: set[str]) -> str:
    """Say what it means that no column names people, with the columns that may: short, each value in several rows."""
    likely = {
        name: len(set(cells))
        for name, cells in first.items()
        if name not in taken and _words(cells) <= 3 and 10 <= len(set(cells)) <= 2 * len(cells) // 3
    }
    text = "no column names people, so the guarantee is for invented clients to whom records are dealt, not for people"
    if likely:
        found = ", ".join(f"{name} ({count:,} different values)" for name, count in likely.items())
        text += f"; columns that may name them: {found}. If one does: --client NAME"
    return text


@dataclass(frozen=True)
class PublicRecords:
    """A file of records that are nobody's to protect, as its owner says.

    Attributes:
        path, kind: the file, and the name of its format in a source.
        rows: records in it.
    """

    path: Path
    kind: str
    rows: int


def look_at_public(path: Path, found: Looked) -> PublicRecords:
    """Read a file of public records in the columns of the private ones.

    Raises:
        ValueError: one that cannot be read, has no rows, or lacks a column; naming it.
    """
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"--public {path}: its ending must be one of {', '.join(SUFFIXES)}")
    table = read_file(f"{kind}:{path}", found.reading, "--public")
    wanted = {key: name for key, name in found.chosen.items() if key not in ("client-column", "unit-column")}
    lacking = {key: name for key, name in wanted.items() if name not in table.names}
    if lacking or not table.rows:
        what = " and ".join(f"{name!r} ({key})" for key, name in lacking.items())
        said = (
            f"lacks the column {what} of {found.path.name}; it has {', '.join(table.names)}" if what else "has no rows"
        )
        raise ValueError(f"--public {path} {said}")
    return PublicRecords(path, kind, table.rows)


def data_template(found: Looked, base: Path, public: PublicRecords | None = None) -> str:
    """Write the settings for a file of records, with why each was chosen.

    Args:
        base: folder of the file to be written; paths of records are relative to it where they lie below.
        public: records to validate on and to start from; None holds them out of the file.
    """
    held_out = max(20, min(1000, found.rows // 10))
    left = found.rows - (2 if public is None else 1) * held_out
    natural = bool(found.clients)
    members = max(1, round(found.clients * left / found.rows)) if natural else max(1, min(1000, left // 10))
    rate = min(1.0, float(f"{_COHORT / members:.2g}"))
    delta = 1.0
    while delta * 10 * max(members, found.clients) > 1:
        delta /= 10
    language = found.task != "classification"
    model = {"causal-lm": "lacquer-small", "instruction": "smollm2", "preference": "smollm2"}.get(found.task, "minilm")
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
        f"source = {_place(found.kind, found.path, base)}",
    ]
    lines += [f"# {' '.join(note.split())}" for note in [*found.notes, *found.warnings]]
    lines += [f"{key} = {json.dumps(name)}" for key, name in found.chosen.items()]
    for key in ("separator", "encoding", "columns"):
        value, default = getattr(found.reading, key), Reading.model_fields[key].default
        if value != default:
            lines.append(f"{key} = {json.dumps(value)}")
    partition = "natural" if natural else "iid" if language else "dirichlet"
    lines.append(f'partition = "{partition}"')
    if public:
        lines.append(f"validation-source = {_place(public.kind, public.path, base)}  # public, as --public says")
    lines += [f"validation-records = {min(1000, public.rows) if public else held_out}", f"test-records = {held_out}"]
    if public:
        lines += [
            "",
            "[public]",
            "# Private training starts where half of the public records end, which costs no privacy.",
            "warm-start-epochs = 20",
            "warm-start-learning-rate = 0.005",
            'warm-start-factors = "both"',
        ]
    lines += ["", "[local]", f"learning-rate = {0.3 if language else 0.1}"]
    return "\n".join(lines) + "\n"


def _place(kind: str, path: Path, base: Path) -> str:
    where, start = path.resolve(), base.resolve()
    return json.dumps(f"{kind}:{where.relative_to(start) if where.is_relative_to(start) else where}")


def _csv_reading(path: Path, reading: Reading) -> Reading:
    """Guess separator and encoding from the first lines."""
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
    return reading.replace(separator=separator, encoding=encoding)


def _words(cells: Sequence[str]) -> float:
    return sum(len(cell.split()) for cell in cells) / max(1, len(cells))


def _likely_label(
    path: Path, first: Mapping[str, list[str]], taken: set[str | None], names: Sequence[str]
) -> str | None:
    """Find the one column of few different short values; refused where there are several."""
    found = [
        name
        for name, cells in first.items()
        if name not in taken and _words(cells) < 4 and 2 <= len(set(cells)) <= min(MOST_CLASSES, len(cells) // 5)
    ]
    if len(found) > 1:
        counts = ", ".join(f"{name} ({len(set(first[name])):,} different values)" for name in found)
        raise ValueError(
            f"{path}: several columns may be labels: {counts}; say which: --label NAME, or --label {NONE} for a "
            "language model"
        )
    return found[0] if found else None
