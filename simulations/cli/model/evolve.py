"""``lacquer evolve``: synthetic texts by votes of private units, without training; the price comes first."""

from pathlib import Path
from typing import Annotated

import typer

from privacy import durable
from privacy.errors import AccountRefused
from server.run_folder.names import LEDGER_FILE
from simulations.cli.calibrate.ask import agree
from simulations.cli.exits import refusals, say
from simulations.cli.progress import say_working


def evolve_command(
    preset: Annotated[str, typer.Argument(help="A preset (see `lacquer presets`) or a TOML file: whose data vote.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as model.name=smollm2. Repeatable."),
    ] = None,
    samples: Annotated[int, typer.Option("--n", min=2, help="Number of texts, even.")] = 200,
    generations: Annotated[int, typer.Option(min=1, help="Votes that are taken, one after the other.")] = 5,
    epsilon: Annotated[float, typer.Option(help="Price of all votes, for each unit.")] = 4.0,
    delta: Annotated[float, typer.Option(help="Its failure probability; 0 takes that of the settings.")] = 0.0,
    method: Annotated[
        str, typer.Option(help="What votes do: aug-pe varies the winners, popri tunes the model by DPO on them.")
    ] = "aug-pe",
    openings: Annotated[str, typer.Option(help="Public beginnings of texts, with | between.")] = "The|In this|A",
    form: Annotated[
        str, typer.Option(help="Of variations: continuation, or instruction for a model that follows them.")
    ] = "continuation",
    folder: Annotated[
        Path | None, typer.Option(help="New folder of texts and ledger.", show_default="runs/evolve-NAME")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder in which relative data files are looked for.", show_default=".")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Spend without asking.")] = False,
) -> None:
    """Let a public model write texts, private units vote for those like their own, and vary what is voted for.

    Aug-PE trains nothing, POPri the model that writes. Votes have a guarantee of their own; what follows is free.
    """
    here = Path.cwd()
    with refusals(ValueError, AccountRefused):
        from simulations.presets.asked import ask

        run = ask(preset, settings or [], {}, here, data or here).run
        place = (folder or Path(run.output) / f"evolve-{run.name}").absolute()
        if (place / LEDGER_FILE).exists():
            raise ValueError(
                f"{place / LEDGER_FILE}: its votes were paid for; --folder OTHER asks again, and costs as much again"
            )
        if run.is_deployed or run.several_sites:
            raise ValueError(
                "votes are taken of records that are here: of a simulation's clients, or of one site (clients = 1); "
                f"got data.held-by = {run.data.held_by!r}, clients = {run.clients}"
            )
        if run.model.task != "causal-lm":
            raise ValueError(f"model.task = {run.model.task!r}: votes are for whole texts; set model.task=causal-lm")
        with say_working("reading the records"):
            from client.data.prepare import prepare
            from client.record_level.preferred_texts import TEXTS, check_groups
            from client.record_level.statistics import Source
            from client.record_level.synthetic_texts import Synthesis
            from privacy import checks
            from server.config.account import account_of, check_account
            from server.evaluation import evolution
            from server.runs.assembly import data_spec

            checks.one_of(tuple(evolution.WAYS), method=method)
            if method == "popri":
                check_groups(samples)
            synthesis = Synthesis(samples, run.model.max_length, tuple(openings.split("|")), form=form)
            source = Source.of(prepare(data_spec(run)), run.privacy.unit, run.model.name)
            price = evolution.price_votes(
                source, run, epsilon, delta or run.privacy.delta, samples=samples, generations=generations,
                votes=samples // TEXTS if method == "popri" else 1,
            )  # fmt: skip
            check_account(run, [price.commitment])
        agree(price.price, yes=yes)
        with say_working("writing texts and voting"):
            writer: evolution.Writer = (
                evolution.preferring_writer(run, synthesis, price.noise)
                if method == "popri"
                else evolution.public_writer(run, synthesis)
            )
            embed = evolution.sentence_embedding()
            durable.new_folder(place)
            column, account = run.data.text_column, account_of(run)
            file = evolution.evolve(source, price, writer, embed, place, column, run.model.name, account, say_plainly)
    typer.echo(file)


def say_plainly(text: str) -> None:
    """Say what is done next, on the error output."""
    say(text, style="dim")
