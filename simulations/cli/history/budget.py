"""``lacquer budget``: what all runs on the same data have cost together."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from simulations.cli.exits import refusals, say_damaged
from simulations.cli.progress import say_working
from simulations.report.notation import delta_text, epsilon_text

CAVEAT = (
    "Neighbouring data sets differ by one unit more or less. Whole commitments are counted, also of runs that stopped "
    "early. Clients that a simulation deals from a file are dealt anew by other seeds: the sum holds for whoever is "
    "one and the same unit in every run. Runs elsewhere, and runs whose folders were deleted, are not known here and "
    "add to it."
)


def budget_command(
    places: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Add up epsilon over all runs on the same data, sweeps included."""
    with refusals(ValueError):
        from simulations.history.folders import run_folders
        from simulations.report.budget import Spending, spendings

        console = Console()
        with say_working("composing"):
            found = [(spending, spending.bound) for spending in spendings(run_folders(places or [Path("runs")]))]
    damaged = [run.damage for spending, _ in found for run in spending.runs if run.damage]
    if as_json:
        typer.echo(json.dumps([_plain(spending, bound) for spending, bound in found], indent=2))
        say_damaged(damaged)
        return

    def show(spending: Spending, bound: tuple[float, float]) -> None:
        count = len(spending.runs)
        heading = f"{spending.source or 'data'} ({spending.data}), {spending.unit}: {count} run{'s' * (count > 1)}"
        console.print(heading, style="bold", markup=False, highlight=False)
        for run in spending.runs:
            cost = f"epsilon {epsilon_text(run.epsilon)}"
            if run.not_private:
                cost = "damaged" if run.damage else "no guarantee"
            console.print(
                f"  {cost} at delta {delta_text(run.delta)}  {run.folder}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if not math.isfinite(bound[0]):
            console.print("  together: no guarantee", style="red")
            return
        console.print(
            f"  together: epsilon at most {epsilon_text(bound[0])} at delta {delta_text(bound[1])} "
            f"({spending.how(bound)})",
            markup=False,
            highlight=False,
        )

    for spending, bound in found:
        show(spending, bound)
    if not found:
        console.print("No run has charged anything.")
    console.print(CAVEAT, style="dim", markup=False, highlight=False)
    say_damaged(damaged)


def _plain(spending: Any, bound: tuple[float, float]) -> dict[str, Any]:
    def number(value: float) -> float | str:
        return value if math.isfinite(value) else "infinite"

    return {
        "data": spending.data,
        "source": spending.source,
        "unit": spending.unit,
        "epsilon": number(bound[0]),
        "delta": bound[1],
        "epsilon_added": number(spending.added[0]),
        "delta_added": spending.added[1],
        "adjacency": "add_remove",
        "runs": [
            {
                "folder": str(run.folder),
                "epsilon": number(run.epsilon),
                "delta": run.delta,
                "not_private": run.not_private,
            }
            for run in spending.runs
        ],
    }
