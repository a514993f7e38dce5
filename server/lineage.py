"""The lineage of a run that went on from an adapter: what it started from, and what all of it guarantees together.

``start/`` in the run's folder keeps the start, so that the run can be resumed and verified without the place it came
from: the adapter as it was read, the ledgers of every earlier run (``start/0/`` of the first one), and
``lineage.json``, for the owner alone, since it names data sets by their digests. Every number is derived from those
ledgers anew; of what an earlier run wrote of itself only its name is taken, and that it guarantees nothing.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from privacy import durable
from privacy.accountants import composition
from privacy.errors import CorruptRun
from privacy.ledger import together
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import rounded_up

Json = dict[str, Any]

LINEAGE_FILE = "lineage.json"
OWN, UNKNOWN = "this run's", "unknown"
"""Data sets by whose they are; others are numbered."""
RELEASED, ADDED = "everything this run releases", "everything this run adds to what it went on from"


@dataclass(frozen=True)
class Ancestor:
    """An adapter that a run went on from, or that one of its ancestors did.

    Attributes:
        kind: ``run`` of Lacquer; ``export`` of one, without a ledger; ``base``, an export that is a whole model, and
            the base of the run; ``adapter`` of somebody else, taken as public.
        weights: SHA-256 of the file with its values; of a base model its fingerprint.
        not_private: why the run that made it guarantees nothing; None where it does, or is not known.
        data: digest of the run's data; "" where that is not known.
        debited: whether the new run's account has paid for the earlier run; None without an account.
    """

    kind: Literal["run", "export", "base", "adapter"]
    name: str
    weights: str
    not_private: str | None = None
    data: str = ""
    debited: bool | None = None


def keep_lineage(folder: Path, ancestors: Sequence[Ancestor], ledgers: Sequence[Sequence[Path]]) -> None:
    """Write the lineage of a run into its ``start`` folder.

    Args:
        ancestors: the oldest first.
        ledgers: files of each, none where it has none.
    """
    for number, files in enumerate(ledgers):
        for place, file in enumerate(files):
            target = folder / str(number) / f"{place}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    text = json.dumps([asdict(ancestor) for ancestor in ancestors], indent=1)
    durable.write(folder / LINEAGE_FILE, text + "\n", mode=0o600)


def read_lineage(folder: Path) -> list[Ancestor]:
    """Read the ancestors of a run, the oldest first; none where its ``start`` folder has none.

    Raises:
        CorruptRun: the file is not what a run writes.
    """
    path = folder / LINEAGE_FILE
    if not path.is_file():
        return []
    try:
        return [Ancestor(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise CorruptRun(f"{path} is not what a run writes ({error}); restore it") from error


def ledger_files(folder: Path, number: int) -> list[Path]:
    """The files of an ancestor's ledgers, by its place in the lineage."""
    return sorted((folder / str(number)).glob("*.jsonl"), key=lambda path: int(path.stem))


def with_lineage(statement: Json, folder: Path, own: Ledger | None, data: str | None) -> Json:
    """A copy of a run's statement that says what the run started from; the statement itself where that is the base.

    Args:
        statement: content of privacy.json, with or without what is added here.
        folder: the run's ``start``; in a copy that was given to others it holds ledgers only.
        own: the run's ledger; None where its sites keep theirs.
        data: digest of the run's data; None where that is not known.

    Raises:
        CorruptRun: a file there is damaged.
    """
    known = _labelled(statement, folder, data)
    if not known:
        return statement
    entries, prices = [], []
    for number, (ancestor, label) in enumerate(known):
        entry, price = _entry(ancestor, label, ledger_files(folder, number))
        entries.append(entry)
        prices.append(price)
    groups = _groups(statement, own, entries, prices)
    start = _told(entries, groups)
    sentence = str(statement["sentence"]).removesuffix(f" {statement.get('start')}").replace(RELEASED, ADDED)
    changed = {"sentence": f"{sentence} {start}", "start": start, "lineage": entries, "together": groups}
    if "not_covered" in statement:
        without = [f"what was trained before the run: {_named(entry)}" for entry in entries if not entry["covered"]]
        said = statement["not_covered"]
        changed["not_covered"] = [*said, *(text for text in without if text not in said)]
    return {**statement, **changed}


def together_with_start(statement: Json) -> tuple[float, float] | None:
    """The epsilon and delta of a run and its ancestors on its own data; None without such, infinite without a bound."""
    for group in statement.get("together", ()):
        if group["data"] == OWN:
            return float("inf") if group["epsilon"] is None else group["epsilon"], group["delta"]
    return None


def _labelled(statement: Json, folder: Path, data: str | None) -> list[tuple[Ancestor, str]]:
    """The ancestors, each with the name of its data set that others are told."""
    ancestors, told = read_lineage(folder), statement.get("lineage")
    if told is not None and (data is None or not ancestors):
        names = {field.name for field in fields(Ancestor)} - {"data"}
        return [
            (Ancestor(**{key: value for key, value in entry.items() if key in names}), entry["data"]) for entry in told
        ]
    others = [each for each in dict.fromkeys(ancestor.data for ancestor in ancestors) if each and each != data]
    return [(each, _label(each, data, others)) for each in ancestors]


def _label(ancestor: Ancestor, data: str | None, others: Sequence[str]) -> str:
    if ancestor.kind == "adapter":
        return "public"
    if not ancestor.data or data is None:
        return UNKNOWN
    return OWN if ancestor.data == data else f"other {others.index(ancestor.data) + 1}"


def _entry(ancestor: Ancestor, label: str, files: Sequence[Path]) -> tuple[Json, together.Price | None]:
    """What is told of an ancestor, and its price where it has a verified guarantee."""
    entry: Json = {**asdict(ancestor), "data": label, "covered": False}
    if ancestor.kind != "run":
        return entry, None
    ledgers = []
    for path in files:
        with Ledger.open(path, read_only=True) as ledger:
            ledgers.append(ledger)
    reasons = [ancestor.not_private, *(ledger.not_private for ledger in ledgers)]
    entry["not_private"] = next((reason for reason in reasons if reason), None)
    entry["ledgers"] = [ledger.head for ledger in ledgers]
    if entry["not_private"] or not ledgers:
        return entry, None
    first = ledgers[0].commitment
    epsilon, delta = max(map(_epsilon, ledgers)), max(ledger.commitment.delta for ledger in ledgers)
    entry |= {"covered": True, "unit": first.unit, "adjacency": first.adjacency}
    entry |= {"epsilon": rounded_up(epsilon, 4), "delta": delta}
    if len(ledgers) > 1:  # of sites, each of which has units of its own
        return entry, together.Price(epsilon, delta)
    return entry, together.price_of(first, None, epsilon)


def _epsilon(ledger: Ledger) -> float:
    """Epsilon as the statement of the ledger has it, not rounded."""
    commitment = ledger.commitment
    if commitment.order is None and commitment.tuning is None:
        return composition.tightest_bound(commitment.floor, commitment.delta, adjacency=commitment.adjacency)[0]
    return ledger.epsilon_guaranteed()


def _groups(
    statement: Json, own: Ledger | None, entries: Sequence[Json], prices: Sequence[together.Price | None]
) -> list[Json]:
    """Runs that used the same data, or may have: what those of each data set guarantee together."""
    terms = statement.get("ledger", {}) if "unit" not in statement else statement
    epsilon = statement.get("epsilon", statement.get("record_epsilon"))
    mine: Json = {"name": OWN, "covered": True, **{key: terms.get(key) for key in ("unit", "adjacency", "delta")}}
    price = None
    if statement["not_private"] is None and epsilon is not None:
        price = together.Price(epsilon, mine["delta"])
        price = price if own is None else together.price_of(own.commitment, None, epsilon)
    labels = dict.fromkeys(entry["data"] for entry in entries if entry["kind"] != "adapter")
    found = []
    for label in [OWN, *(each for each in labels if each not in (OWN, UNKNOWN))]:
        member = [entry["data"] in (label, UNKNOWN) for entry in entries]
        runs = [entry for entry, inside in zip(entries, member, strict=True) if inside]
        costs = [cost for cost, inside in zip(prices, member, strict=True) if inside]
        if label == OWN:
            runs, costs = [*runs, mine], [*costs, price]
        if len(runs) < 2 or (label == OWN and price is None):
            continue
        found.append({"data": label, "runs": [run["name"] for run in runs], **_bound(runs, costs)})
    return found


def _bound(runs: Sequence[Json], costs: Sequence[together.Price | None]) -> Json:
    sound = [cost for cost in costs if cost is not None]
    nothing: Json = {"epsilon": None, "delta": max((cost.delta for cost in sound), default=0.0)}
    if len(sound) < len(costs):
        names = ", ".join(repr(run["name"]) for run in runs if not run["covered"])
        return {**nothing, "how": f"{names} has no verified guarantee"}
    units = {(run["unit"], run["adjacency"]) for run in runs}
    if len(units) > 1:
        words = " and ".join(sorted(f"one {unit.removeprefix('group:')} ({adjacency})" for unit, adjacency in units))
        return {**nothing, "how": f"they protect {words}, which do not add up"}
    epsilon, delta, how = _composed(tuple(sound))
    return {"epsilon": rounded_up(epsilon, 4), "delta": delta, "how": how}


@lru_cache(maxsize=64)
def _composed(costs: tuple[together.Price, ...]) -> tuple[float, float, str]:
    """Epsilon and delta of all together and how they were had: some seconds of work, done once a process."""
    found = together.least_bound(costs)
    return *found, together.how(costs, found)


def _told(entries: Sequence[Json], groups: Sequence[Json]) -> str:
    """The start in words, the newest ancestor first."""
    newest, *older = [_named(entry) for entry in reversed(entries)]
    sentences = [f"It went on from {newest}{''.join(f', and that from {name}' for name in older)}."]
    for group in groups:
        these = f"{len(group['runs'])} runs on {_data(group['data'])}"
        if group["epsilon"] is None:
            sentences.append(f"The {these} have no common guarantee: {group['how']}.")
        else:
            said = f"epsilon at most {rounded_up(group['epsilon'], 2):.2f} at delta {group['delta']:g}"
            sentences.append(f"The {these} together have {said} ({group['how']}).")
    if not all(entry["covered"] for entry in entries):
        sentences.append("The guarantee covers only what this run adds to what is not covered.")
    return " ".join(sentences)


def _named(entry: Json) -> str:
    name = f"{entry['name']!r} (digest {entry['weights'][:12]})"
    if entry["kind"] == "adapter":
        return f"the adapter {name}, taken as public and not covered"
    if entry["kind"] == "export":
        return f"the exported adapter {name}, which has no ledger and is not covered"
    if entry["kind"] == "base":
        return f"the base model {name}, the export of an earlier run, which has no ledger and is not covered"
    unpaid = {False: "; the account has not paid for it", True: "; the account has paid for it"}
    account = unpaid.get(entry["debited"], "")
    if entry["not_private"]:
        return f"the run {name}, which is NOT PRIVATE ({entry['not_private']}) and not covered{account}"
    if not entry["covered"]:
        return f"the run {name}, whose ledgers are not here, so that it is not covered{account}"
    said = f"epsilon at most {rounded_up(entry['epsilon'], 2):.2f} at delta {entry['delta']:g}"
    ledgers = ", ".join(head[:24] for head in entry["ledgers"])
    unit = entry["unit"].removeprefix("group:")
    return f"the run {name} on {_data(entry['data'])} ({said} for one {unit} by its ledger {ledgers}{account})"


def _data(label: str) -> str:
    if label == OWN:
        return "this run's data"
    return "data that may be this run's" if label == UNKNOWN else f"other data ({label.removeprefix('other ')})"
