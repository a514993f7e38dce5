"""``lacquer account``: the lifetime budget of a data set, which its owner keeps and every run on it debits."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from client.settings import state_folder
from simulations.cli.exits import Command, Commands, refusals

account_app = typer.Typer(cls=Commands, help="The lifetime budget of a data set.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="ACCOUNT", help="File of the account.")]
Head = Annotated[str | None, typer.Option(metavar="LINES:HASH", help="Its last line as it was seen before.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@account_app.command("create", cls=Command)
def create(
    file: File,
    data: Annotated[str, typer.Option(help="What you call the data set.")],
    unit: Annotated[str, typer.Option(help="client, record or group:COLUMN.")],
    epsilon: Annotated[float, typer.Option(help="Of all runs together.")],
    delta: Annotated[float, typer.Option(help="Of all runs together.")],
    adjacency: Annotated[str, typer.Option(help="zero_out is that of secure sums.")] = "add_remove",
    rule: Annotated[str, typer.Option(help="renyi: a filter at one order. sum: epsilons and deltas add up.")] = "renyi",
    order: Annotated[int | None, typer.Option(help="Of renyi.", show_default="best for the lifetime")] = None,
) -> None:
    """Open an account. Unit, lifetime and rule are fixed from then on."""
    with refusals(ValueError):
        from privacy.ledger.account import Account
        from privacy.ledger.lifetime import Terms, best_order

        if rule == "renyi" and order is None:
            order = best_order(epsilon, delta)
        Account.create(file, Terms(data, unit, epsilon, delta, adjacency, rule, order), state_folder()).close()
    show(file)


@account_app.command("show", cls=Command)
def show(file: File, as_json: AsJson = False, head: Head = None) -> None:
    """Say what was spent, by which run, and what is left."""
    found = _read(file, head)
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_words(found)))


@account_app.command("verify", cls=Command)
def verify(file: File, head: Head = None) -> None:
    """Verify the hash chain, that no debit exceeded the lifetime, and that nobody put back an older copy."""
    found = _read(file, head)
    typer.echo(f"{file}: {len(found['runs'])} debits, within the lifetime; chain whole. Last line: {found['head']}")


@account_app.command("seat", cls=Command)
def seat() -> None:
    """Say the name of this machine, to which another one hands an account over."""
    with refusals():
        from privacy.ledger.place import Place

        typer.echo(Place(state_folder()).seat())


@account_app.command("move", cls=Command)
def move(
    file: File,
    to: Annotated[str, typer.Option(metavar="SEAT", help="What `lacquer account seat` says on the new machine.")],
) -> None:
    """Hand an account over to another machine, and close it here."""
    with refusals(ValueError):
        from privacy.ledger.account import Account

        with Account.open(file, state_folder()) as account:
            account.move(to)
    typer.echo(f"{file} is closed here; copy it to the other machine, which alone can debit it now")


@account_app.command("close", cls=Command)
def close(
    file: File, folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a run, or of a site (site-state).")]
) -> None:
    """Close a run for good, and give back what its own ledger proves unused."""
    with refusals(ValueError, BlockingIOError):
        from client.record_level.state import STATE, hold_site_ledger
        from privacy.ledger.account import Account
        from privacy.ledger.ledger import Ledger
        from server.run_folder.names import LEDGER_FILE
        from server.run_folder.verify import verify_run

        ended = False
        if (folder / STATE).is_file():
            ledger = hold_site_ledger(folder)
        else:
            run = verify_run(folder)
            if run.ledger is None:
                raise ValueError(f"{folder} has no {LEDGER_FILE} of its own: nothing proves what it did not use")
            ledger, ended = Ledger.open(folder / LEDGER_FILE, run.head), run.ended
        with ledger, Account.open(file, state_folder()) as account:
            given = account.give_back(ledger, ended=ended)
    typer.echo(f"{folder} is closed" if given else f"{folder} has used its debit, or no proof is known of what it left")
    show(file)


BAR = 30
"""Signs of the figure of what is spent (#) and left (.)."""


def _read(file: Path, head: str | None) -> dict[str, Any]:
    """What there is to say of an account, verified."""
    with refusals(ValueError):
        from privacy.ledger.account import Account

        with Account.open(file, state_folder(), head=head, read_only=True) as account:
            return {
                **asdict(account.terms),
                "spent": dict(zip(("epsilon", "delta"), account.spent, strict=True)),
                "left": {name: float(value) for name, value in account.left.items()},
                "share_left": min(float(account.left[name] / limit) for name, limit in account.limits.items()),
                "runs": [asdict(debit) for debit in account.debits.values()],
                "here": account.is_here,
                "head": account.head,
            }


def _words(found: dict[str, Any]) -> list[str]:
    from privacy.ledger.account import OWN
    from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text

    def at(guarantee: dict[str, Any]) -> str:
        return f"epsilon {epsilon_text(guarantee['epsilon'])} at delta {delta_text(guarantee['delta'])}"

    how = "by sums" if found["order"] is None else f"by a Rényi filter at order {found['order']}"
    lines = [f"{found['data']}: {at(found)} for one {found['unit']} ({found['adjacency']}) over all runs, {how}"]
    for run in found["runs"]:
        told = "" if run["basis"] == OWN else " (as its server says: a policy, not a proof)"
        told += ", closed before its end" if run["closed"] else ""
        price = at(run)
        if run["closed"]:
            price = f"divergence {number_text(run['rho'])}, of {price}" if run["rho"] else "nothing"
        lines.append(f"  {run['day']}  {price}  {run['what']}{told}")
    left = ", ".join(f"{name} {number_text(value)}" for name, value in found["left"].items())
    lines.append(f"spent: {at(found['spent'])}, all together" if found["runs"] else "spent: nothing")
    gone = round(BAR * (1.0 - found["share_left"]))
    lines.append(f"left: {percent_text(found['share_left'])} ({left})  [{'#' * gone}{'.' * (BAR - gone)}]")
    if not found["here"]:
        lines.append("this machine does not hold the account, and this copy pays for nothing")
    return [*lines, f"last line, to be kept elsewhere: {found['head']}"]
