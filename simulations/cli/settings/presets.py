"""``lacquer presets``: what can be run by name, and what it takes."""

import difflib
import itertools
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from server.config.load import ConfigError
from simulations.cli import completion
from simulations.cli.exits import refusals
from simulations.engines.speed import ONE_CORE, time_here
from simulations.presets.load import PURPOSES, describe, preset_files
from simulations.presets.needs import Needs, needs_of
from simulations.report.notation import plain_table
from simulations.sweep.cells import sweep_files

SWEEPS = "Sweeps"
_OF_THIS = "estimates for this machine's processor, by a training step that was timed on it"


@dataclass(frozen=True)
class Listed:
    """A preset or sweep as it is listed."""

    name: str
    kind: str
    about: str
    needs: Needs | None
    purpose: str

    @property
    def sentence(self) -> str:
        """The first sentence of what it is about, without how it is called."""
        return re.split(r"(?<=\.)\s", self.about, maxsplit=1)[0]


def presets_command(
    name: Annotated[
        str, typer.Argument(help="A preset: print its file, with what it needs.", autocompletion=completion.presets)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the presets and the sweeps, or show one with its expected time and needs."""
    with refusals():
        if name:
            _show(name, as_json)
            return
    every = [_preset(name, file) for name, file in preset_files().items()]
    every += [_sweep(name, describe(file, lines=1)) for name, file in sweep_files().items()]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in every], indent=2))
        return
    table = plain_table(gap=2)
    for column in ("Preset", "Time", "About"):
        table.add_column(column, no_wrap=column != "About")
    for purpose, listed in itertools.groupby(every, lambda one: one.purpose):
        if table.row_count:
            table.add_row()
        table.add_row(Text(purpose, "bold"), "", "for `lacquer sweep`" if purpose == SWEEPS else "")
        for one in listed:
            time = one.needs.time.partition(",")[0] if one.needs else ""  # the rest stands at the preset
            table.add_row(Text(one.name, "cyan"), Text(time.removesuffix(ONE_CORE)), Text(one.sentence))
    console = Console()
    console.print(table)
    hint = f"Times are {_OF_THIS}. One preset with what it needs: lacquer presets NAME"
    console.print(hint, style="dim", highlight=False, soft_wrap=True)


def _preset(name: str, file: Path) -> Listed:
    purpose = next(purpose for purpose, names in PURPOSES.items() if name in names)
    needs = needs_of(file)
    return Listed(name, "preset", describe(file), replace(needs, time=time_here(needs.time)), purpose)


def preset_time(name: str) -> str:
    """The time that a preset as it stands takes here, in words. Empty for a file, and where it was not measured."""
    file = preset_files().get(name)
    time = time_here(needs_of(file).time) if file else ""
    return f"{time}, {_OF_THIS}" if "minute" in time else ""


def _sweep(name: str, about: str) -> Listed:
    return Listed(name, "sweep", about, None, SWEEPS)


def _show(name: str, as_json: bool) -> None:
    files = {**preset_files(), **sweep_files()}
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        raise ConfigError(f"no preset is called {name!r}; " + (f"did you mean {near[0]}?" if near else "see the list"))
    file = files[name]
    one = _sweep(name, describe(file)) if name in sweep_files() else _preset(name, file)
    if as_json:
        typer.echo(json.dumps(asdict(one), indent=2))
        return
    if one.needs is not None:
        typer.echo(f"# Time: {one.needs.time} ({_OF_THIS}). Needs: {one.needs.text}.")
    typer.echo(file.read_text(encoding="utf-8"), nl=False)
