"""``lacquer runs``: which runs there are and how each stands."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from simulations.cli.exits import refusals, say_damaged
from simulations.cli.progress import say_working
from simulations.report.notation import epsilon_text, number_text, percent_text, plain_table, table_console

_COLORS = {"completed": "green", "stopped-budget": "yellow", "running": "cyan", "preparing": "cyan"}


def runs_command(
    places: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders of them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List runs: state, quality, what clients added, epsilon. A run whose process is gone is shown as interrupted."""
    with refusals(ValueError), say_working("reading the runs"):
        from simulations.history.folders import DAMAGED, overview, run_folders

        rows = overview(run_folders(places or [Path("runs")]))
    damaged = [str(row["message"]) for row in rows if row["state"] == DAMAGED]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        say_damaged(damaged)
        return
    console, table = table_console(), plain_table(gap=2)
    wide = console.width >= 110 or not console.is_terminal
    for name in ("Run", "State", "Rounds", "Test", "Added", "Epsilon", *(("Controller", "Seed") if wide else ())):
        table.add_column(name, no_wrap=True, justify="right" if name in ("Rounds", "Seed") else "left")
    for row in rows:
        state = str(row["state"])
        rounds = f"{row['rounds']}/{row['rounds_planned']}" if row["rounds_planned"] else str(row["rounds"])
        table.add_row(
            Text(str(row["folder"]), "cyan"),
            Text(state, _COLORS.get(state, "red")),
            rounds,
            _quality(row),
            _added(row),
            Text("none", "red") if row["not_private"] else Text(_epsilon(row["epsilon"], row["epsilon_spent"])),
            *((str(row["controller"] or ""), "" if row["seed"] is None else str(row["seed"])) if wide else ()),
        )
    console.print(table)
    say_damaged(damaged)


def _quality(row: dict[str, Any]) -> str:
    if row["test_perplexity"] is not None:
        return f"ppl {number_text(row['test_perplexity'])}"
    return "" if row["test_accuracy"] is None else percent_text(row["test_accuracy"])


def _added(row: dict[str, Any]) -> str:
    if row["added"] is None:
        return ""
    if row["test_perplexity"] is not None:
        return f"{row['added']:+.3g}"
    return f"{100 * row['added']:+.1f} points"


def _epsilon(committed: Any, spent: Any) -> str:
    """What the run stays within, behind what it has spent if that is less."""
    if committed is None:
        return ""
    text = epsilon_text(committed)
    return text if spent is None or epsilon_text(spent) == text else f"{epsilon_text(spent)} of {text}"
