"""`lacquer ask`: what the private units of a run are like, in public bins and with noise; the price comes first."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from privacy import durable
from privacy.errors import AccountRefused
from server.run_folder.names import LEDGER_FILE
from simulations.cli.exits import refusals

ANSWERS_FILE = "answers.json"


def ask_command(
    preset: Annotated[str, typer.Argument(help="A preset (see `lacquer presets`) or a TOML file.")] = "quickstart",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, such as clients=500. Repeatable."),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Price of the answers, for each unit.")] = 0.5,
    delta: Annotated[float, typer.Option(help="Its failure probability; 0 takes that of the settings.")] = 0.0,
    folder: Annotated[
        Path | None, typer.Option(help="Ledger and answers; read again for free.", show_default="runs/ask-NAME")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder in which relative data files are looked for.", show_default=".")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Spend without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; needs --yes.")] = False,
) -> None:
    """Records of a unit, lengths of texts, shares of labels and advice, with noise, before a run.

    Bins are public and fixed: bins chosen from the data, and questions of one's own, have no known price.
    """
    here = Path.cwd()
    with refusals(ValueError, AccountRefused):
        from simulations.presets.asked import ask

        run = ask(preset, settings or [], {}, here, data or here).run
        place = (folder or Path(run.output) / f"ask-{run.name}").absolute()
        if not (place / ANSWERS_FILE).is_file():
            if (place / LEDGER_FILE).exists():
                raise ValueError(
                    f"{place / LEDGER_FILE}: its answers were paid for and lost; --folder OTHER asks again, and "
                    "costs as much again"
                )
            from client.data.prepare import prepare
            from server.config.account import account_of, check_account
            from server.evaluation.statistics import Source, answer, price, uncut
            from server.runs.assembly import data_spec

            source = Source.of(run, prepare(data_spec(uncut(run))))
            question = price(source, run, epsilon, delta or run.privacy.delta)
            check_account(run, [question.commitment])
            agree(question.price, yes=yes, quiet=as_json)
            durable.new_folder(place)
            found = answer(source, question, place / LEDGER_FILE, account_of(run))
            durable.write(place / ANSWERS_FILE, json.dumps(found, indent=2) + "\n")
        found = json.loads((place / ANSWERS_FILE).read_text())
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_page(found, preset)))


def agree(price: str, *, yes: bool, quiet: bool = False) -> None:
    """Tell the price, and ask whether to spend it.

    Raises:
        ValueError: nobody can be asked.
        typer.Exit: the answer is no.
    """
    if not quiet:
        typer.echo(price)
    if not yes and (quiet or not sys.stdin.isatty()):
        raise ValueError("nothing was spent: whoever cannot be asked says --yes")
    if not yes and not typer.confirm("Spend it?"):
        raise typer.Exit(0)


def _page(found: Mapping[str, Any], preset: str) -> list[str]:
    """The answers in lines."""
    unit, units = found["unit"].removeprefix("group:"), found["units_with_records"]
    lines = [
        f"{units['value']:,} +-{units['within']:,} of {found['units']:,} {unit}s have records (epsilon "
        f"{found['epsilon']:g} was spent; shares are known to +-{100 * found['share_within']:.2g} points, 95 %)."
    ]
    for name, title in (("records_per_unit", f"Records of a {unit}"), ("tokens_per_text", "Tokens of a text")):
        told = [f"{100 * float(level):.0f} %: {_end(value)}" for level, value in found[name]["quantiles"].items()]
        lines.append(f"{title}, at most, of  " + ",  ".join(told))
    cut = [f"{edge}: {100 * share:.1f} %" for edge, share in found["tokens_per_text"]["cut_at"].items() if share > 1e-3]
    lines.append("Texts that a max-length cuts  " + ",  ".join(cut))
    if found["labels"]:
        shares = [f"{name}: {100 * share:.1f} %" for name, share in found["labels"].items()]
        lines.append(f"Labels, a mean over {unit}s  " + ",  ".join(shares))
    of_clients = ("clients", "sampling-rate", "model.max-length")
    fits = of_clients if found["unit"] == "client" else ("model.max-length", "site.records-per-unit")
    changed = " ".join(f"--set {key}={value}" for key, value in found["advice"].items() if key in fits and value)
    return [*lines, f"  lacquer run {preset} {changed}"]


def _end(value: Mapping[str, Any]) -> str:
    """A quantile with the ends of its interval."""
    most = "more" if value["most"] is None else value["most"]
    return f"{'more' if value['value'] is None else value['value']} ({value['least']} to {most})"
