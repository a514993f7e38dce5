"""Lacquer in Python: start a run, look at one, put several beside each other.

    from simulations import compare, load_run, resume, run

    result = run("quickstart", {"rounds": 5}, callbacks=print)
    result.metrics                       # a DataFrame, one row a release
    result.epsilon, result.adapter
    compare("runs").table

A run trains in processes of its own, as `lacquer run` starts them, on either engine; so it works in a notebook too.
Callbacks see the records of ``metrics.jsonl``, which hold released and public values only; no private value reaches
this process.
"""

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.config.load import ConfigError, flatten, parse, unflatten, with_overrides
from server.config.schema import RunConfig
from server.run_folder.names import ADAPTER_FOLDER, LAUNCH_LOCK, new_run_folder
from server.run_folder.progress import hold_folder
from server.run_folder.resume import check_resumable
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Telemetry, read_metrics
from simulations.engines import launcher
from simulations.engines.flower import RunFailed
from simulations.history.compare import Comparison, compare_folders
from simulations.history.compare_page import write_comparison
from simulations.history.folders import run_folders, true_state
from simulations.history.unfinished import earlier_run
from simulations.notebook import NotebookProgress, in_notebook
from simulations.preflight import check_run
from simulations.presets.asked import Asked, ask, ask_again, count_clients
from simulations.presets.load import absolute_paths
from simulations.report.figures import report_figures
from simulations.report.judgement import judgements
from simulations.report.outcome import guaranteed_pair
from simulations.report.page import attempt_report, write_report
from simulations.report.read_run import Run, read_run
from simulations.report.summary import summary_lines

if TYPE_CHECKING:
    from pandas import DataFrame

Callback = Callable[[RoundRecord], object]
Value = str | int | float | bool


@dataclass(frozen=True)
class RunResult:
    """A run as its folder holds it, verified; finished or not.

    Attributes:
        folder: of the run.
        records: one for each release, behind that of the model before round 1.
        state: completed, stopped-budget, failed, interrupted, running or preparing.
    """

    folder: Path
    records: tuple[RoundRecord, ...]
    state: str

    @property
    def metrics(self) -> "DataFrame":
        """A table with one row a record, by its field names, and what a controller tells under its own names.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [record.to_json() for record in self.records]
        return _frame([{**{k: v for k, v in row.items() if k != "extra"}, **row["extra"]} for row in rows])

    @property
    def config(self) -> RunConfig | None:
        """The settings of the run; None before it has written them."""
        return self._run.config

    @property
    def epsilon(self) -> float | None:
        """The epsilon that the run guarantees, at :attr:`delta`; None where it guarantees nothing."""
        pair = guaranteed_pair(self._run)
        return None if pair is None else pair[0]

    @property
    def delta(self) -> float | None:
        """The delta of the run's guarantee; None where it guarantees nothing."""
        pair = guaranteed_pair(self._run)
        return None if pair is None else pair[1]

    @property
    def not_private(self) -> str | None:
        """The reason why there is no guarantee; None where there is one."""
        return self._run.not_private

    @property
    def results(self) -> Mapping[str, Any]:
        """The content of results.json; empty before the run has ended."""
        return self._run.results or {}

    @property
    def warnings(self) -> list[str]:
        """Warnings about what the run has learnt, see :mod:`simulations.report.judgement`."""
        return judgements(self._run)

    @property
    def adapter(self) -> Path | None:
        """The folder that PEFT loads; None before the run has ended."""
        folder = self.folder / ADAPTER_FOLDER
        return folder if (folder / "adapter_config.json").is_file() else None

    @property
    def report(self) -> Path:
        """The path of the report page, which is written anew."""
        return write_report(self.folder)

    @cached_property
    def figures(self) -> dict[str, str]:
        """The figures of the report as SVG text, by name: accuracy (or perplexity), loss, epsilon, clip, norms, ..."""
        return {figure.name: figure.svg for figure in report_figures(self._run)}

    @cached_property
    def _run(self) -> Run:
        return read_run(self.folder)

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line.plain)}</p>" for line in summary_lines(self._run))
        shown = [self.figures[name] for name in ("perplexity", "accuracy", "epsilon") if name in self.figures]
        return lines + "".join(f'<div style="max-width: 32rem">{svg}</div>' for svg in shown)


@dataclass(frozen=True)
class Compared:
    """A comparison of runs, as a table or a page.

    Attributes:
        comparison: groups of runs that differ in their seed alone.
    """

    comparison: Comparison

    @property
    def table(self) -> "DataFrame":
        """One row a group: label, seeds, epsilon, and mean and half interval of every measure.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = []
        for group in self.comparison.groups:
            row: dict[str, Any] = {"runs": group.label, "seeds": len(group.seeds), "epsilon": group.epsilon}
            for name, _, _ in self.comparison.measures:
                estimate, difference = group.estimate(name), self.comparison.difference(group, name)
                row[name] = None if estimate is None else estimate.mean
                row[f"{name}_half"] = None if estimate is None else estimate.half
                row[f"{name}_difference"] = None if difference is None else difference.mean
            rows.append(row)
        return _frame(rows)

    def write(self, page: str | Path) -> Path:
        """Write the page with the table and the curves."""
        return write_comparison(self.comparison, Path(page))

    def _repr_html_(self) -> str:
        return str(self.table.to_html())


def run(
    config: str | Path | Mapping[str, Any] | RunConfig = "quickstart",
    settings: Mapping[str, Value] | None = None,
    *,
    start: "str | Path | RunResult | None" = None,
    callbacks: Callback | Iterable[Callback] = (),
    resume_or_start: bool = False,
) -> RunResult:
    """Train, and return what came of it.

    Args:
        config: a preset, a TOML file, a table (nested, or with dotted keys) or a configuration.
        settings: dotted keys that are changed, such as ``{"privacy.epsilon": 2.0}``.
        start: adapter to go on from (``model.adapter``): a run that has ended, its folder, or one that PEFT has saved.
        callbacks: called with every :class:`RoundRecord`, in order; ``print`` prints a sentence for each. An exception
            of theirs ends the run, which can be resumed. Without one, a notebook shows a bar.
        resume_or_start: resume the unfinished run of the same name and settings in ``output``, if there is one; return
            the run at once that is done.

    Raises:
        ValueError: a setting that cannot work (ConfigError), before anything is started or spent.
        RunFailed: the run did not complete; its folder is named.
    """
    changed = dict(settings or {})
    if start is not None:
        changed["model.adapter"] = str(Path(start.folder if isinstance(start, RunResult) else start).resolve())
    asked = _asked(config, changed)
    if resume_or_start and (earlier := earlier_run(asked)) is not None:
        return load_run(earlier.folder) if earlier.ended else _resumed(earlier.folder, lambda: asked, callbacks)
    checked = check_run(asked)
    folder = new_run_folder(asked.run)
    asked.write(folder)
    checked.hand_on(folder)
    return _launched(asked.run, folder, callbacks)


def resume(folder: str | Path, *, other_code: bool = False, callbacks: Callback | Iterable[Callback] = ()) -> RunResult:
    """Resume an interrupted run from its last checkpoint, within the budget it has left; returns what came of it.

    Args:
        folder: of the run.
        other_code: although the code has changed since the run was started.
        callbacks: see :func:`run`; records of before the interruption come first.

    Raises:
        CannotResume, CorruptRun, ValueError: why it cannot be resumed; nothing was started or spent.
        RunFailed: it did not complete this time either.
    """
    folder = Path(folder).resolve()
    return _resumed(folder, lambda: ask_again(folder, {}), callbacks, other_code=other_code)


def _resumed(
    folder: Path, asks: Callable[[], Asked], callbacks: Callback | Iterable[Callback], *, other_code: bool = False
) -> RunResult:
    """Go on with a run; ``asks`` for its settings once nobody else can."""
    with hold_folder(folder, LAUNCH_LOCK):
        asked = asks()
        check_resumable(folder, other_code=other_code, phases=asked.phase_tables)
        return _launched(asked.run, folder, callbacks, {"resume": str(folder), "other-code": other_code})


def _launched(
    config: RunConfig,
    folder: Path,
    callbacks: Callback | Iterable[Callback],
    keys: Mapping[str, str | bool] | None = None,
) -> RunResult:
    launch = launcher.run_child if config.is_single_site or config.engine.kind == "inprocess" else launcher.run_flower
    try:
        launch(config, folder, follow=_follower(folder, callbacks), plugins=Path.cwd(), keys=keys)
    except BaseException as error:
        if not isinstance(error, RunFailed | ConfigError):
            with Telemetry(folder, tensorboard=False) as telemetry:
                telemetry.status("failed", "interrupted")
        raise
    finally:
        attempt_report(folder)
    return load_run(folder)


def load_run(folder: str | Path) -> RunResult:
    """Load a run that was made, from its folder.

    Raises:
        NoRunFolder: there is none.
        CorruptRun: naming a file of it that is damaged or gone.
    """
    found = read_run(Path(folder))
    return RunResult(found.path, tuple(found.metrics), true_state(found))


def compare(*runs: str | Path | RunResult) -> Compared:
    """Compare finished runs, the same settings over seeds as one row.

    Args:
        runs: results, run folders, or folders of them such as that of a sweep.

    Raises:
        ValueError: none of them has finished.
        CorruptRun: naming a file of one that is damaged or gone.
    """
    places = [each.folder if isinstance(each, RunResult) else Path(each) for each in runs]
    folders = run_folders(places, finished=True)
    if not folders:
        raise ValueError(f"{', '.join(map(str, places)) or 'no folder'}: no run there has finished")
    return Compared(compare_folders(folders))


def _asked(config: str | Path | Mapping[str, Any] | RunConfig, settings: Mapping[str, Value]) -> Asked:
    here = Path.cwd()
    if isinstance(config, str | Path):
        return ask(str(config), [], settings, here, here, chosen_engine=False)
    table = config.to_table() if isinstance(config, RunConfig) else unflatten(flatten(config))
    return count_clients(Asked(absolute_paths(parse(with_overrides(table, settings)), here, here)))


def _follower(folder: Path, callbacks: Callback | Iterable[Callback]) -> launcher.Follow:
    """Make a function that calls back with what is new of the records until the run has ended."""
    every = [callbacks] if callable(callbacks) else list(callbacks)
    bar = NotebookProgress(folder) if not every and in_notebook() else None
    seen: set[tuple[str, int]] = set()

    def tell() -> None:
        records = read_metrics(folder)
        if bar is not None:
            bar.show(records)
        for record in records:
            if (record.phase, record.round) not in seen:
                seen.add((record.phase, record.round))
                for callback in every:
                    callback(record)

    def follow(is_alive: Callable[[], bool]) -> None:
        def alive() -> bool:
            tell()
            return is_alive()

        launcher.wait_quietly(alive)
        tell()

    return follow


def _frame(rows: list[dict[str, Any]]) -> "DataFrame":
    try:
        import pandas
    except ImportError as error:
        raise ImportError("a DataFrame needs pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame(rows)
