"""``lacquer compare``: runs beside each other, with seeds and intervals, and one page to show."""

import json
from pathlib import Path
from typing import Annotated

import typer

from simulations.cli.exits import refusals
from simulations.cli.progress import say_working
from simulations.report.notation import table_console


def compare_command(
    places: Annotated[list[Path], typer.Argument(metavar="RUN...|SWEEP", help="Run folders, or folders of them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("compare.html"),
    as_json: Annotated[bool, typer.Option("--json", help="For programs; writes no page.")] = False,
) -> None:
    """Compare finished runs: a table with seeds and 95 % intervals, and a page with the curves."""
    with refusals(ValueError), say_working("comparing the runs"):
        from simulations.history.compare import compare_folders
        from simulations.history.compare_page import comparison_table, write_comparison
        from simulations.history.folders import run_folders

        folders = run_folders(places, finished=True)
        if not folders:
            raise ValueError(f"{', '.join(map(str, places))}: no run there has finished; there is nothing to compare")
        found = compare_folders(folders)
        page = None if as_json else write_comparison(found, output)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    console = table_console()
    console.print(comparison_table(found))
    if found.unlike:
        console.print(f"Warning: {found.unlike}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Page: {page}", markup=False, highlight=False, soft_wrap=True)
