"""Runs beside each other: the same settings over seeds are one row, with means and 95 % intervals over seeds.

Differences against the first row are paired by seed and corrected for their number (:mod:`simulations.history.paired`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from server.config.load import flatten
from server.run_folder.round_record import RoundRecord
from server.run_folder.verify import read_object
from simulations.history.paired import Estimate, number_tested, paired_difference, told_apart
from simulations.report.notation import number_text, percent_text
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import Run, read_run
from simulations.sweep.cells import CELL_FILE

IGNORED = ("seed", "name", "output", "data.cache", "engine.workers", "engine.kind", "privacy.account")
"""Settings in which runs of one row may differ."""

_MEASURED_ON = ("model.task", "data.source", "data.test-source")

MOST_NAMED = 6
"""Settings that a row's label names; runs that differ in more are told apart by their names first."""

MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("test_accuracy", "test accuracy", percent_text),
    ("test_macro_f1", "macro-F1", percent_text),
    ("test_perplexity", "test perplexity", number_text),
    ("validation_accuracy", "validation", percent_text),
    ("start_validation_accuracy", "before round 1", percent_text),
    ("test_rougeL", "ROUGE-L", lambda value: f"{value:.3f}"),
)


@dataclass
class Group:
    """A group of runs that differ in their seed alone."""

    label: str
    runs: list[Run] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def add(self, run: Run, seed: int) -> None:
        """Add the run of one more seed."""
        self.runs.append(run)
        self.seeds.append(seed)

    @property
    def epsilon(self) -> float | None:
        """The largest epsilon of the runs; None if one of them guarantees nothing."""
        pairs = [guaranteed_pair(run) for run in self.runs]
        return None if None in pairs else max(pair[0] for pair in pairs if pair is not None)

    def values_by_seed(self, name: str) -> dict[int, float]:
        """A number of results.json by seed; of several runs of one seed, whose noise differs, their mean."""
        found: dict[int, list[float]] = {}
        for seed, run in zip(self.seeds, self.runs, strict=True):
            if (value := run.result(name)) is not None:
                found.setdefault(seed, []).append(value)
        return {seed: mean(values) for seed, values in found.items()}

    def estimate(self, name: str) -> Estimate | None:
        """Estimate a number of results.json over the runs; None where none has it."""
        values = [value for run in self.runs if (value := run.result(name)) is not None]
        return Estimate.of(values) if values else None

    def curve(self, name: str) -> dict[int, Estimate]:
        """Estimate a field of the records, by round, over seeds."""
        told: dict[int, list[float]] = {}
        for run in self.runs:
            for record in _shown(run):
                value = getattr(record, name)
                if value is not None and math.isfinite(value):
                    told.setdefault(record.round, []).append(value)
        return {number: Estimate.of(values) for number, values in sorted(told.items())}


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups of runs with the first of them."""

    groups: list[Group]

    @property
    def unlike(self) -> str:
        """The differences between the runs' tests that make their numbers incomparable, in words; else empty."""
        tables = [flatten(run.config.to_table()) for group in self.groups for run in group.runs if run.config]
        found = {key: list(dict.fromkeys(str(table[key]) for table in tables)) for key in _MEASURED_ON}
        told = [f"{key} = {', '.join(values)}" for key, values in found.items() if len(values) > 1]
        return f"The runs were not tested on the same: {'; '.join(told)}." if told else ""

    @property
    def measures(self) -> list[tuple[str, str, Callable[[float], str]]]:
        """The measures that any group has; token accuracy of language models is none."""
        texts = any(group.estimate("test_perplexity") for group in self.groups)
        return [
            measure
            for measure in MEASURES
            if any(group.estimate(measure[0]) for group in self.groups)
            and not (texts and measure[0].endswith("accuracy"))
        ]

    def difference(self, group: Group, name: str) -> Estimate | None:
        """The difference of a group from the first one, paired by the seeds that both have."""
        if group is self.groups[0]:
            return None
        return paired_difference(group.values_by_seed(name), self.groups[0].values_by_seed(name))

    def differences(self, name: str) -> list[tuple[Estimate | None, bool, float | None]]:
        """List for each group its difference, whether it is significant, the smallest that would show.

        Both are corrected for the number of groups.
        """
        found = [self.difference(group, name) for group in self.groups]
        count = number_tested(found)
        smallest = [None if each is None else each.smallest(count) for each in found]
        return list(zip(found, told_apart(found), smallest, strict=True))

    def to_json(self) -> list[dict[str, object]]:
        """The comparison as plain values for programs."""
        told = {name: self.differences(name) for name, _, _ in self.measures}
        return [
            {
                "label": group.label,
                "seeds": group.seeds,
                "epsilon": group.epsilon,
                "folders": [str(run.path) for run in group.runs],
                **{name: _plain(group.estimate(name)) for name, _, _ in self.measures},
                "difference": {name: _difference(*each[place]) for name, each in told.items()},
            }
            for place, group in enumerate(self.groups)
        ]


def compare_folders(folders: Sequence[Path]) -> Comparison:
    """Group the runs in these folders for a comparison; of the attempts at a sweep's cell the last.

    Raises:
        CorruptRun: naming a file of one that is damaged or gone.
    """
    cells: dict[str, tuple[Path, str]] = {}
    for folder in folders:
        key = str((read_object(folder / CELL_FILE) or {}).get("cell", ""))
        cells[str(folder.parent) if key else str(folder)] = (folder, key)
    groups: dict[str, Group] = {}
    plain: list[Run] = []
    for folder, key in cells.values():
        run = read_run(folder)
        if key:
            label, _, seed = key.rpartition("/seed=")
            groups.setdefault(label, Group(label)).add(run, int(seed))
        else:
            plain.append(run)
    for label, run in zip(_labels(plain), plain, strict=True):
        groups.setdefault(label, Group(label)).add(run, run.config.seed if run.config else 0)
    return Comparison(list(groups.values()))


def _labels(runs: Sequence[Run]) -> list[str]:
    """Name what tells each run from the others, in settings.

    The run's name stands where nothing does, or where too many do.
    """
    tables = [flatten(run.config.to_table()) if run.config else {} for run in runs]
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key not in IGNORED]
    differing = [key for key in keys if len({str(table.get(key)) for table in tables}) > 1]
    names = dict.fromkeys(run.name for run in runs)
    if len(differing) <= MOST_NAMED or len(names) == 1:
        return [_label(run, table, differing) for run, table in zip(runs, tables, strict=True)]
    labels: dict[Path, str] = {}
    for name in names:
        alike = [run for run in runs if run.name == name]
        for run, label in zip(alike, _labels(alike), strict=True):
            labels[run.path] = name if label == name else f"{name}: {label}"
    return [labels[run.path] for run in runs]


def _label(run: Run, table: Mapping[str, object], keys: Sequence[str]) -> str:
    said = [f"{key.rpartition('.')[2]}={table[key]}" for key in keys if key in table]
    return ", ".join(said) or run.name


def _shown(run: Run) -> list[RoundRecord]:
    return [record for record in run.metrics if record.phase != "histogram"]


def _plain(estimate: Estimate | None) -> dict[str, object] | None:
    return None if estimate is None else {"mean": estimate.mean, "half": estimate.half, "values": list(estimate.values)}


def _difference(estimate: Estimate | None, told: bool, smallest: float | None) -> dict[str, object] | None:
    plain = _plain(estimate)
    if estimate is None or plain is None:
        return None
    return {**plain, "p": estimate.p_value, "told_apart": told, "smallest_found": smallest}
