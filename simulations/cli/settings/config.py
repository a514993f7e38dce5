"""``lacquer config``: every key of a configuration, with its type, default, limits and meaning."""

import difflib
import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from server.config.reference import Setting, json_schema, settings
from simulations.cli.exits import MISUSED, fail
from simulations.report.notation import plain_table


def config_command(
    prefix: Annotated[str, typer.Argument(help="A key, or how keys begin, such as privacy.")] = "",
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of a file, for editors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List every setting: its type, default and limits, and what it means.

    An editor checks a file against `lacquer config --schema > lacquer.schema.json`.
    """
    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    every = settings()
    found = [one for one in every if one.key == prefix] or [one for one in every if one.key.startswith(prefix)]
    if not found:
        near = difflib.get_close_matches(prefix, [one.key for one in every], n=1, cutoff=0.5)
        fail(f"no setting is called {prefix!r}" + (f"; did you mean {near[0]}?" if near else ""), MISUSED)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    console = Console()
    if len(found) == 1:
        _print_one(console, found[0])
    elif console.is_terminal:
        _print_table(console, found)
    else:  # whole lines, for grep
        for one in found:
            console.print(f"{one.key}  {default_text(one.default)}  {_kind(one)}  {one.line}", **_PLAIN)


def default_text(default: Any) -> str:
    """The default of a setting as it stands in a TOML file."""
    return "{}" if default is None else json.dumps(default, ensure_ascii=False)


_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def _print_one(console: Console, setting: Setting) -> None:
    console.print(Text.assemble((setting.key, "bold"), f" = {default_text(setting.default)}"))
    console.print(f"  {_kind(setting)}", style="dim", markup=False, highlight=False)
    console.print(f"  {setting.meaning}", markup=False, highlight=False)


def _print_table(console: Console, found: list[Setting]) -> None:
    table = plain_table(gap=2)
    table.add_column("Setting", no_wrap=True, style="cyan")
    table.add_column("Default", max_width=14, overflow="ellipsis", no_wrap=True)
    table.add_column("Values", max_width=26)
    table.add_column("Meaning", min_width=20)
    for one in found:
        table.add_row(one.key, Text(default_text(one.default)), Text(_kind(one), "dim"), Text(one.line))
    console.print(table)


def _kind(setting: Setting) -> str:
    if "|" in setting.limits:
        return setting.limits
    return f"{setting.type} {setting.limits}".strip()
