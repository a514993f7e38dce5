"""``lacquer init``: a configuration file to start from."""

from pathlib import Path
from typing import Annotated

import typer

from server.run_folder.names import shell_quoted
from simulations.cli.exits import refusals
from simulations.cli.progress import say_working


def init_command(
    target: Annotated[Path, typer.Argument(metavar="FILE|DATA", help="A .toml to write, or a file of records.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write for DATA.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    text: Annotated[str, typer.Option(help="Column of the texts.", show_default="guessed")] = "",
    label: Annotated[str, typer.Option(help="Column of the labels, or none.", show_default="guessed")] = "",
    client: Annotated[str, typer.Option(help="Column that names people, or none.", show_default="guessed")] = "",
    columns: Annotated[str, typer.Option(help="Names of a CSV file's columns, if it has no header.")] = "",
    public: Annotated[Path | None, typer.Option(help="Public records in the same columns, to start from.")] = None,
) -> None:
    """Write a commented configuration: all settings, or those that fit a CSV, JSON, JSONL or Parquet file.

    Given records it looks at the columns, says what it took for what and shows three records as the model will see
    them. Where it is not sure it asks: say which columns are meant. With public records, which are nobody's to
    protect, the run validates on them and starts where training on half of them ends.
    """
    with refusals(ValueError):
        from simulations.presets.template import data_template, full_template, look, look_at_public
        from simulations.presets.understood import describe_records

        records = target.suffix.lower() != ".toml"
        path = (output or Path(f"{target.stem}.toml")) if records else target
        if path.exists() and not force:
            raise ValueError(f"{path} is there already; name another file by --output, or replace it by --force")
        if public and not records:
            raise ValueError(f"--public {public} goes with a file of records, and {target} is to hold all settings")
        if not records:
            path.write_text(full_template(), encoding="utf-8")
            typer.echo(f"{path}: every setting, each at its default. Run it: lacquer run {shell_quoted(path)}")
            return
        if not target.is_file():
            raise ValueError(f"{target}: there is no such file")
        with say_working("reading the records"):
            found = look(target, {"text": text, "label": label, "client": client, "columns": columns})
            content = data_template(found, path.parent, look_at_public(public, found) if public else None)
            seen = list(describe_records(found, content))
        path.write_text(content, encoding="utf-8")
    typer.echo(f"{target}: {found.rows:,} rows, {found.task}")
    for note in [*found.notes, *seen]:
        typer.echo(f"  {note}")
    for warning in found.warnings:
        typer.echo(f"Warning: {warning}.")
    if not public:
        typer.echo(
            "Held-out records validate and test in the open: whose they are is not protected. With records that are "
            "nobody's to protect (--public FILE) the run validates on those, and starts from them."
        )
    typer.echo(f"Wrote {path}. Check it: lacquer run {shell_quoted(path)} --dry-run")
