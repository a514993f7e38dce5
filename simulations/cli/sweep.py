"""``lacquer sweep``: a grid of runs from one file, resumable, with what may be compared kept in one results file."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from server.config.load import ConfigError
from server.run_folder.names import RESULTS_FILE
from simulations.cli.exits import FAILED, INTERRUPTED, interruptible, refusals, say
from simulations.presets.load import named_file
from simulations.sweep.cells import Cell, chosen, read_cells, sweep_files

if TYPE_CHECKING:
    from simulations.sweep.display import Progress
    from simulations.sweep.runner import Store


def sweep_command(
    preset: Annotated[str, typer.Argument(help=f"A TOML file, or one of {', '.join(sweep_files())}.")],
    data: Annotated[Path, typer.Option(help="Folder in which relative data files are looked for.")] = Path(),
    output: Annotated[Path, typer.Option(help="Run folders go to OUTPUT/NAME/CELL.")] = Path("runs/sweeps"),
    results: Annotated[
        Path | None, typer.Option(help="Results file, read and continued.", show_default="OUTPUT/NAME/results.json")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time, each a process of one thread.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Cells to run, such as 'default-sst2/dp-lac*'. Repeatable."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most cells to run now.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the cells; run nothing.")] = False,
) -> None:
    """Run what is missing of a sweep. What is done is skipped; a failed cell is reported and the others continue."""
    from simulations.sweep.display import Progress, print_cells, summary_line
    from simulations.sweep.runner import Store

    here = Path.cwd()
    sys.path.append(str(here))  # a user's own methods are found beside their work, and shadow nothing
    with refusals():
        name, every = read_cells(named_file(preset, sweep_files(), "sweep"), data.expanduser().resolve())
        cells = chosen(every, only or [])
        folder = (output / name).resolve()
        store = Store(name, folder, results or folder / RESULTS_FILE, every)
        missing = {cell.digest: cell for cell in reversed(cells) if cell.key not in store.done}
        todo = list(reversed(missing.values()))[:limit]
        multipliers = _check(cells if dry_run else todo)
    console = Console()
    if dry_run:
        print_cells(console, cells, multipliers, store.done)
        return
    store.save()
    progress = Progress(len(cells), sum(cell.key in store.done for cell in cells))
    try:
        with interruptible():
            _run(todo, {cell.key for cell in cells}, store, jobs, here, progress, console)
    except KeyboardInterrupt:
        say("Interrupted; what was running is stopped, its ledgers are kept. The same command continues.", "yellow")
        raise typer.Exit(INTERRUPTED) from None
    console.print(f"{summary_line(progress)}; results: {store.file}", markup=False, highlight=False, soft_wrap=True)
    for key, error in progress.failed:
        say(f"\n{key} failed: {error}")
    if progress.failed:
        raise typer.Exit(FAILED)


def _check(cells: list[Cell]) -> dict[str, tuple[float, ...]]:
    """Refuse all cells if one of them cannot run; their calibrated noise multipliers.

    Raises:
        ConfigError: every distinct problem, with the first cell that has it.
    """
    from simulations.cli.preflight import check_adapter, check_data, check_noise, check_silo, check_silos
    from simulations.engines.public_only import check_public_only

    _check_sources(cells)
    multipliers: dict[str, tuple[float, ...]] = {}
    problems: dict[str, str] = {}
    adapters: set[str] = set()  # loading a model for every cell would take longer than the rest
    calibrated: dict[str, tuple[float, ...]] = {}  # seeds and data do not change the noise, and some take seconds
    for cell in cells:
        config = cell.config
        federated = cell.kind == "run" and config.privacy.unit != "client"
        noise = repr((config.privacy, config.strategy, config.rounds, config.clients, config.sampling_rate))
        if cell.kind == "silo":  # its noise depends on how many units there are, and on what is trained
            noise = repr((noise, config.silo, config.data, config.model))
        try:
            if cell.kind == "public-only":
                check_public_only(config)
            elif federated:  # every site calibrates for its own records
                check_silos(config)
            elif noise not in calibrated:
                calibrated[noise] = (check_silo if cell.kind == "silo" else check_noise)(config).multipliers
            multipliers[cell.key] = () if federated or cell.kind == "public-only" else calibrated[noise]
            if cell.kind != "silo" and not federated:
                check_data(config)
                adapter = repr((config.model, config.strategy, config.rounds, config.clients))
                if adapter not in adapters:
                    adapters.add(adapter)
                    check_adapter(config)
        except ValueError as error:  # ConfigError is one
            problems.setdefault(str(error), cell.key)
    _refuse(problems)
    return multipliers


def _check_sources(cells: list[Cell]) -> None:
    """Before anything is calibrated, which takes minutes; the data sets are read after it.

    Raises:
        ConfigError: files that are not there, with the first cell that reads them.
    """
    from simulations.cli.preflight import check_sources

    problems: dict[str, str] = {}
    for cell in cells:
        try:
            check_sources(cell.config)
        except ValueError as error:
            problems.setdefault(str(error), cell.key)
    _refuse(problems)


def _refuse(problems: dict[str, str]) -> None:
    """ConfigError if there are problems; they name the first cell that has them."""
    if problems:
        raise ConfigError("\n".join(f"{key}: {problem}" for problem, key in problems.items()))


def _run(
    cells: list[Cell],
    counted: set[str],
    store: "Store",
    jobs: int,
    plugins: Path,
    progress: "Progress",
    console: Console,
) -> None:
    from simulations.sweep.display import progress_table, row_cells, summary_line
    from simulations.sweep.runner import Outcome, run_cells

    drawn = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    live = Live(console=console, refresh_per_second=2) if drawn else None

    def ended(outcome: Outcome) -> None:
        key = outcome.cell.key
        del progress.running[key]
        if outcome.row is None:
            progress.failed.append((key, outcome.error))
            line = f"{key} FAILED: {outcome.error.partition(chr(10))[0]}"
        else:
            wanted = [entry for entry in store.add(outcome.row) if entry["cell"] in counted]
            progress.rows += wanted
            line = "\n".join("  ".join(row_cells(entry)) for entry in wanted)
        if live is None:
            console.print(f"{line}  ({summary_line(progress)})", markup=False, highlight=False, soft_wrap=True)

    def look() -> None:
        if live is not None:
            live.update(progress_table(progress))

    if live is None:
        run_cells(cells, store.folder, jobs, plugins, progress.start, ended, look)
        return
    with live:
        run_cells(cells, store.folder, jobs, plugins, progress.start, ended, look)
