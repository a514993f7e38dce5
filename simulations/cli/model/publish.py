"""``lacquer publish``: the copy of a run that may be given to others."""

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli.exits import refusals
from simulations.cli.model.export import refuse_taken, replace_folder
from simulations.cli.progress import say_working


def publish_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or an empty folder.")],
) -> None:
    """Copy what the guarantee covers, and nothing that tells more, into a folder that others can verify."""
    with refusals(ValueError), say_working("writing the copy"):
        from server.evaluation.finished import read_finished
        from server.evaluation.published import publish

        run = read_finished(run_folder)
        refuse_taken(folder)
        with replace_folder(folder) as draft:
            publish(run, draft)
    typer.echo(folder)
