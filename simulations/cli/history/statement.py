"""``lacquer statement``: the guarantee of a run for those who must sign for its data."""

import json
from pathlib import Path
from typing import Annotated

import typer

from simulations.cli.exits import refusals
from simulations.cli.progress import say_working


def statement_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", exists=True, file_okay=False)],
    prior: Annotated[
        float, typer.Option(help="How probable an attacker holds it, before the release, that somebody was there.")
    ] = 0.5,
    pdf: Annotated[bool, typer.Option("--pdf", help="Write PDF beside each page; needs the extra pdf.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: one object with what the page says, and its path.")
    ] = False,
) -> None:
    """Say what a run guarantees to those who must sign: a page in plain words, with the risks in numbers.

    Of a run that was audited, a second page in RUN/audit has what was measured beside the risks, for its owner alone.
    """
    with refusals(ValueError), say_working("writing the statement"):
        from simulations.history.statement import write_statement

        pages, said = write_statement(run_folder, prior, pdf=pdf)
    if as_json:
        typer.echo(json.dumps({"pages": list(map(str, pages)), **said}, indent=2))
    else:
        typer.echo("\n".join(map(str, pages)))
