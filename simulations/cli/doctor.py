"""``lacquer doctor``: what this host can do, and the settings that fit it."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simulations.cli.exits import FAILED
from simulations.cli.progress import say_working


def doctor_command(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Say what this host can do: GPUs, memory, packages, models without a network; recommend settings.

    Ends with 1 where something is wrong.
    """
    with say_working("looking at this host"):
        from simulations.engines.host import inspect_host

        host = inspect_host()
    if as_json:
        typer.echo(json.dumps(asdict(host), indent=2))
        raise typer.Exit(FAILED if host.problems else 0)
    console = Console()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    gpus = [
        f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}"
        for gpu in host.gpus
    ]
    rows = {
        "python": f"{host.python} on {host.system}",
        "cores": str(host.cores),
        "memory": f"{host.memory[0]:.1f} GiB, {host.memory[1]:.1f} free",
        "gpus": "\n".join(gpus) or "none that torch can use",
        "packages": ", ".join(f"{name} {text}" for name, text in host.packages.items()),
        "containers": ", ".join(host.containers) or "neither docker nor podman",
        "models": ", ".join(f"{name} {'here' if here else 'missing'}" for name, here in host.models.items()),
        "extras": ", ".join(f"{name} {'yes' if here else 'no'}" for name, here in host.extras.items()),
        "recommended": " ".join(f"--set {key}={value}" for key, value in host.advice.items()),
    }
    for label, text in rows.items():
        table.add_row(label, Text(text))
    console.print(table)
    for problem in host.problems:
        console.print(f"Problem: {problem}", style="yellow", markup=False, highlight=False)
    if host.problems:
        raise typer.Exit(FAILED)
    console.print("No problem found.", style="green")
