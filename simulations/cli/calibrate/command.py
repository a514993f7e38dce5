"""`lacquer calibrate`: what a privacy budget costs in noise, and what more clients, rounds or sampling would buy."""

import json
import warnings
from typing import Annotated, Literal

import typer
from rich.console import Console

from simulations.cli.exits import MISUSED, fail


def calibrate_command(
    epsilon: Annotated[float, typer.Option(help="The guarantee to reach.")] = 4.0,
    delta: Annotated[float, typer.Option(help="Its failure probability, below 1/clients.")] = 1e-5,
    clients: Annotated[int, typer.Option(help="Number of clients (or records), N.")] = 1000,
    rate: Annotated[float, typer.Option(help="Sampling rate q of each round.")] = 0.05,
    rounds: Annotated[int, typer.Option(help="Number of rounds, T.")] = 200,
    dimension: Annotated[int | None, typer.Option(help="Number of trained parameters, d.")] = None,
    histogram: Annotated[
        float | None, typer.Option(help="Noise multiplier of a first histogram over all clients (DP-LAC: 10).")
    ] = None,
    query: Annotated[
        list[float] | None,
        typer.Option(help="Noise multiplier of a query beside the update in every round. Repeatable."),
    ] = None,
    adjacency: Annotated[
        Literal["add_remove", "replace_one"], typer.Option(help="What neighbouring data sets differ in.")
    ] = "add_remove",
    trust: Annotated[
        Literal["server", "secagg"],
        typer.Option(help="Who makes the noise: a trusted server, or the clients together."),
    ] = "server",
    survivors: Annotated[
        int, typer.Option(help="With secagg: least number of clients left in a round; 0 is four fifths.")
    ] = 0,
    colluding: Annotated[int, typer.Option(help="With secagg: clients that may collude with the server.")] = 0,
    correlated: Annotated[
        bool, typer.Option(help="What noise correlated over rounds buys against independent noise.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: the noise of this way to run, without alternatives.")
    ] = False,
) -> None:
    """Noise for a privacy budget, and what more clients, rounds or sampling would buy."""
    from privacy.accountants.scenarios import Scenario
    from simulations.cli.calibrate import page as calibrate_page

    console, notes = Console(), list[warnings.WarningMessage]()
    try:
        if correlated:
            if histogram or query or trust == "secagg" or adjacency != "add_remove":
                raise ValueError(
                    "correlated goes with epsilon, delta, clients, rate and rounds only: nothing but the update is "
                    "released, under add_remove, and the server adds the noise"
                )
            from simulations.cli.calibrate import correlated as correlated_page

            if as_json:
                typer.echo(json.dumps(correlated_page.plain_prices(epsilon, delta, clients, rate, rounds), indent=2))
                return
            with console.status("Calibrating"):
                console.print(correlated_page.page(epsilon, delta, clients, rate, rounds))
            return
        if as_json and trust == "secagg":
            raise ValueError("--json prices plain rounds; leave out trust")
        if dimension is not None and dimension < 1:
            raise ValueError(f"dimension must be an integer >= 1, got {dimension}")
        if trust == "secagg":
            if histogram or query or adjacency != "add_remove":
                raise ValueError(
                    "trust secagg goes with epsilon, delta, clients, rate, rounds, survivors and colluding only: every "
                    "client takes part in every round, and one kind of sum is priced"
                )
            with console.status("Calibrating"):
                page = calibrate_page.secagg(epsilon, delta, clients, rate, rounds, survivors, colluding)
        else:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always", UserWarning)
                scenario = Scenario(epsilon, delta, clients, rate, rounds, histogram, tuple(query or ()), adjacency)
            if as_json:
                typer.echo(json.dumps(calibrate_page.plain_price(scenario, dimension), indent=2))
                return
            with console.status("Calibrating"):
                page = calibrate_page.advice(scenario, dimension, console.width)
    except ValueError as error:
        fail(str(error), MISUSED)
    for note in dict.fromkeys(str(note.message) for note in notes):
        console.print(f"Note: {note}", style="yellow", markup=False, highlight=False)
    console.print(page)
