"""``lacquer sweep``: a grid of runs from one file, resumable, with what may be compared kept in one results file."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from server.config.load import ConfigError
from server.run_folder.names import RESULTS_FILE
from simulations.cli import completion
from simulations.cli.exits import FAILED, INTERRUPTED, end_on_signals, refusals, say
from simulations.cli.progress import say_working
from simulations.presets.load import named_file
from simulations.report.notation import table_console
from simulations.sweep.cells import choose_cells, count_cell, read_cells, sweep_files

if TYPE_CHECKING:
    from simulations.preflight import Checked


def sweep_command(
    preset: Annotated[
        str,
        typer.Argument(help=f"A TOML file, or one of {', '.join(sweep_files())}.", autocompletion=completion.sweeps),
    ],
    data: Annotated[Path, typer.Option(help="Folder in which relative data files are looked for.")] = Path(),
    output: Annotated[Path, typer.Option(help="Run folders go to OUTPUT/NAME/CELL.")] = Path("runs/sweeps"),
    results: Annotated[
        Path | None, typer.Option(help="Results file, read and continued.", show_default="OUTPUT/NAME/results.json")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells at a time, each a process of one thread and, on several GPUs, one of them.",
            show_default="1; of a cluster as many as it has GPUs, or cores",
        ),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Run the cells on this Ray cluster. See docs/scale.md.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Cells to run, such as 'default-sst2/dp-lac*'. Repeatable."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most cells to run now.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the cells; run nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: no progress; one object with the table at the end.")
    ] = False,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Tuning and training under one guarantee: privacy.epsilon is that of both, only the best run is "
            "released. See docs/tuning.md.",
        ),
    ] = False,
    tries: Annotated[
        float | None,
        typer.Option(help="With --private: expected number of tries.", show_default="as many as there are cells"),
    ] = None,
    draw: Annotated[
        str, typer.Option(help="With --private: law of the number of tries: poisson, geometric, logarithmic, a shape.")
    ] = "poisson",
) -> None:
    """Run what is missing of a sweep. What is done is skipped; a failed cell is reported and the others continue."""
    from simulations.cli.private_sweep import private_sweep, tries_of
    from simulations.preflight import check_accounts, check_cells
    from simulations.sweep.display import Progress, print_cells, run_shown, summary_line
    from simulations.sweep.runner import Store

    here = Path.cwd()
    sys.path.append(str(here))  # a user's own methods are found beside their work, and shadow nothing
    with refusals(ValueError):
        name, every = read_cells(named_file(preset, sweep_files(), "sweep"), data.expanduser().resolve())
        cells = [count_cell(cell) for cell in choose_cells(every, only or [])]
        if private:
            if as_json:
                raise ConfigError("--json does not go with --private, which releases one run: lacquer runs --json")
            if results is not None or limit is not None or ray_address is not None:
                raise ConfigError(
                    "--private goes with none of --results, --limit, --ray-address: it is one event, with one result"
                )
            law, place = tries_of(tries, draw, len(cells)), (output / f"{name}-private").resolve()
            private_sweep(name, cells, place, law, jobs or 1, here, dry_run=dry_run)
            return
        if tries is not None or draw != "poisson":
            raise ConfigError("--tries and --draw need --private")
        folder = (output / name).resolve()
        store = Store(name, folder, results or folder / RESULTS_FILE, every)
        missing = {cell.digest: cell for cell in reversed(cells) if cell.key not in store.done}
        todo = list(reversed(missing.values()))[:limit]
        with say_working("checking the cells"):
            checked = check_cells(cells if dry_run else todo)
        check_accounts([checked[cell.key] for cell in todo])
        warnings = _together([checked[cell.key] for cell in todo], output)
    console = Console(quiet=True) if as_json else table_console()
    if dry_run and as_json:
        listed = [
            {"cell": cell.key, "noise_multipliers": checked[cell.key].multipliers, "done": cell.key in store.done}
            for cell in cells
        ]
        typer.echo(json.dumps({"cells": listed, "warnings": warnings}, indent=2))
        return
    if dry_run:
        print_cells(console, cells, {key: known.multipliers for key, known in checked.items()}, store.done)
    for warning in warnings:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if dry_run:
        return
    store.save()
    launch = None
    if ray_address is not None and todo:
        from simulations.sweep.cluster import OnCluster

        with refusals(ValueError):
            folder.mkdir(parents=True, exist_ok=True)
            launch = OnCluster(ray_address, todo, jobs or 0, folder)
            jobs = launch.plan.workers
    progress = Progress(len(cells), sum(cell.key in store.done for cell in cells))
    try:
        with end_on_signals():
            run_shown(todo, {cell.key for cell in cells}, store, jobs or 1, here, progress, console, launch)
    except KeyboardInterrupt:
        say("Interrupted; what was running is stopped, its ledgers are kept. The same command continues.", "yellow")
        raise typer.Exit(INTERRUPTED) from None
    console.print(f"{summary_line(progress)}; results: {store.file}", markup=False, highlight=False, soft_wrap=True)
    compared = _show_comparison(folder, console) if store.done else []
    if as_json:
        said = {"folder": str(folder), "results": str(store.file), "groups": compared, "failed": dict(progress.failed)}
        said["warnings"] = warnings
        typer.echo(json.dumps(said, indent=2))
    for key, error in progress.failed:
        say(f"\n{key} failed: {error}")
    if progress.failed:
        raise typer.Exit(FAILED)


def _together(checked: Sequence["Checked"], output: Path) -> list[str]:
    """Warn of what the cells to run, and earlier runs here and where they would go, have cost together."""
    from simulations.history.earlier import planned_costs, warn_together

    new = [run for cell in checked for run in planned_costs(cell.config, cell.source, cell.noise)]
    places = [output, *dict.fromkeys(Path(cell.config.output) for cell in checked)]
    return warn_together(new, places, "the {count} cells to run" if len(new) > 1 else "the cell to run")


def _show_comparison(folder: Path, console: Console) -> list[dict[str, object]]:
    """Print the table of all cells that are done, also for programs, and write the page with their curves."""
    from simulations.history.compare import compare_folders
    from simulations.history.compare_page import PAGE, comparison_table, write_comparison
    from simulations.history.folders import run_folders
    from simulations.report.read_run import NoRunFolder

    try:
        found = compare_folders(run_folders([folder], finished=True))
    except NoRunFolder:  # all cells were done elsewhere: their rows are known, their folders are not here
        return []
    if found.groups:
        console.print(comparison_table(found))
        page = write_comparison(found, folder / PAGE)
        console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    return found.to_json()
