"""``lacquer synthesise``: texts that a run's model writes, with the guarantee of the run."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from simulations.cli.exits import refusals, say
from simulations.cli.progress import say_working
from simulations.report.notation import is_drawable


def synthesise_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    count: Annotated[int, typer.Option("--n", min=1, help="Number of texts.")] = 1000,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where they are written; a folder that is unfinished is gone on with.", show_default="RUN-synthetic"
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Public prompts, one a line.", show_default="first tokens of public records")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a text; 0 takes what the run was trained with.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="1 samples from the model as it is; above 0.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample from the most probable tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the samples.")] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Look for near-copies of private texts too; what is found stays in RUN/audit, not covered."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: texts, number, near-copies.")] = False,
) -> None:
    """Write synthetic texts with a run's adapter: they have the guarantee of the run, however many there are."""
    with refusals(ValueError):
        from server.evaluation.finished import read_finished
        from server.evaluation.synthetic import Synthesis, read_prompts, refuse_what_cannot_write, synthesise
        from server.runs.public_data import public_first_tokens

        run = read_finished(run_folder)
        longest = tokens or (run.config.model.max_length if run.task == "causal-lm" else run.most_tokens)
        asked = Synthesis(count, longest, temperature, top_p, seed, read_prompts(prompts) if prompts else ())
        refuse_what_cannot_write(run, asked)
        begin = None if prompts else public_first_tokens(run.config)
        place = folder or run_folder.resolve().with_name(f"{run_folder.resolve().name}-synthetic")
        console = Console(stderr=True, quiet=as_json)
        status = console.status("loading the model") if is_drawable(console) else None

        def tell(done: int) -> None:
            text = f"{done:,} of {count:,} texts"
            if status is not None:
                status.update(text)
            else:
                console.print(text, markup=False, highlight=False)

        with status or say_working("writing texts"):
            file = synthesise(run, asked, place, begin, tell)
        found = None
        if check:
            from simulations.audit.near_copies import near_copies, read_texts, write_near_copies

            with say_working("looking for near-copies"):
                found = near_copies(run, read_texts(run, file))
            say(f"{found.sentence}\nFor the owner alone: {write_near_copies(run_folder, found)}", style="yellow")
    if as_json:
        typer.echo(json.dumps({"texts": str(file), "count": count, "near_copies": None if not found else vars(found)}))
    else:
        typer.echo(file)
