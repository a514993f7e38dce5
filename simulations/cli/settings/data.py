"""``lacquer data``: the published form of a public data set, turned into the files that presets read."""

import json
from pathlib import Path
from typing import Annotated

import typer

from simulations.cli.exits import refusals
from simulations.cli.progress import say_working


def data_command(
    name: Annotated[str, typer.Argument(help="A data set; without one all are listed.", show_default=False)] = "",
    source: Annotated[
        Path | None, typer.Option("--from", help="Folder, zip archive or file, as it was fetched from its publisher.")
    ] = None,
    folder: Annotated[Path, typer.Option("--to", help="Folder for `lacquer run PRESET --data FOLDER`.")] = Path("data"),
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: files and rows, or names and commands.")
    ] = False,
) -> None:
    """Turn a public data set, as its publisher gives it, into the files that presets read.

    It fetches nothing: without --from it says which command does.
    """
    from client.data.catalog.published import PUBLISHED, convert

    with refusals(ValueError, FileExistsError):
        if name and name not in PUBLISHED:
            raise ValueError(f"NAME must be one of {', '.join(PUBLISHED)}, got {name!r}")
        if not name and source is not None:
            raise ValueError(f"--from needs the name of its data set, one of {', '.join(PUBLISHED)}")
        if source is None:
            commands = {one: PUBLISHED[one].fetch for one in ([name] if name else PUBLISHED)}
            lines = [commands[name]] if name else [f"{one:<14} {fetch}" for one, fetch in commands.items()]
            typer.echo(json.dumps(commands, indent=2) if as_json else "\n".join(lines))
            return
        with say_working("writing the files"):
            written = convert(name, source, folder)
    if as_json:
        typer.echo(json.dumps({str(file): rows for file, rows in written.items()}, indent=2))
        return
    for file, rows in written.items():
        typer.echo(f"{file}: {rows:,} rows")
    typer.echo(f"Presets find it with --data {folder}")
