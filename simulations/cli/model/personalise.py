"""``lacquer personalise``: train on alone for one's own use, or ask how far all clients would get."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privacy import durable
from privacy.errors import AccountRefused
from server.run_folder.names import LEDGER_FILE, STAMP_FILE, shell_quoted
from simulations.cli.calibrate.ask import agree
from simulations.cli.exits import refusals, say
from simulations.cli.model.evaluate import read_records
from simulations.cli.progress import say_working

if TYPE_CHECKING:
    from client.engine.local_training import LocalTraining
    from server.evaluation.finished import FinishedRun

ANSWER_FILE = "personal.json"
STAMP = """This adapter was trained on one owner's records without noise, for the owner's own use. It holds what they
say. No guarantee covers it: do not release it. It began with an adapter of which this is true:

{sentence}
"""


def personalise_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or its published copy.")],
    data: Annotated[
        Path | None, typer.Option(help="Your own records in the run's columns: .jsonl, .parquet, .csv.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="New folder of your adapter, or of the answer.", show_default="RUN-personal"),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Of a simulation: ask how far all clients would get, with noise.")
    ] = False,
    epsilon: Annotated[float, typer.Option(help="With --measure: price for each client.")] = 1.0,
    bound: Annotated[float, typer.Option(help="With --measure: largest gain that counts, in nats.")] = 1.0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the own records.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Records of a step.")] = 8,
    yes: Annotated[bool, typer.Option("--yes", help="Spend without asking.")] = False,
) -> None:
    """Go on from a run's adapter on your own records, for your own use: nothing of it is sent or covered.

    With --measure: by how much the loss of a client's further records would fall, and for which share of the clients.
    """
    with refusals(ValueError, AccountRefused):
        if (data is None) is not measure:
            raise ValueError("give --data FILE to train on your own records, or --measure to ask all clients; not both")
        from client.engine.local_training import LocalTraining
        from server.evaluation.finished import read_finished

        run = read_finished(run_folder)
        place = folder or run_folder.resolve().with_name(f"{run_folder.resolve().name}-personal")
        local = LocalTraining(optimizer="adamw", learning_rate=learning_rate, batch_size=batch_size, epochs=epochs)
        if data is not None:
            typer.echo(train_own(run, data, place, local))
            return
        if not (place / ANSWER_FILE).is_file():
            ask(run, place, local, epsilon, bound, yes=yes)
        found = json.loads((place / ANSWER_FILE).read_text())
    gain, share = found["gain"], found["share_that_gains"]
    typer.echo(
        f"Loss on further records of a client falls by {gain['value']:.3f} +-{gain['within']:.3f} nats on average, and "
        f"falls at all for {100 * share['value']:.0f} +-{100 * share['within']:.0f} % of about {found['clients']:,} "
        f"clients (95 %; epsilon {found['epsilon']:g} was spent).\n{place}"
    )


def train_own(run: "FinishedRun", data: Path, place: Path, local: "LocalTraining") -> Path:
    """Train on one's own records, say what it brought, and write the adapter, stamped as not to be released.

    Raises:
        ValueError: the records cannot be read, are too few, or the folder is taken.
    """
    if place.exists():
        raise ValueError(f"{place} exists; give a new folder: nothing is overwritten")
    with say_working("training on your records"):
        from client.models.lora import read_spec, save_peft
        from server.evaluation.personal import personalise

        records = read_records(run, data)
        engine, adapter = run.engine()
        found = personalise(engine, adapter, records, local)
    durable.new_folder(place)
    shutil.copytree(run.adapter, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("README.md", "privacy.json"))
    save_peft(place, found.adapter, engine.layout, read_spec(run.adapter), base=_base_of(run))
    durable.write(place / STAMP_FILE, STAMP.format(sentence=run.statement["sentence"]))
    say(
        f"Trained on {found.trained:,} of your records. Mean loss of the other {found.judged:,}: {found.before:.4f} "
        f"before, {found.after:.4f} after.",
        style="green" if found.after < found.before else "yellow",
    )
    return place


def _base_of(run: "FinishedRun") -> str:
    return str(json.loads((run.adapter / "adapter_config.json").read_text())["base_model_name_or_path"])


def ask(run: "FinishedRun", place: Path, local: "LocalTraining", epsilon: float, bound: float, *, yes: bool) -> None:
    """Tell the price, spend it, and write the answer.

    Raises:
        ValueError: the run is no simulation over clients, or nobody agrees to the price.
        AccountRefused: the account of the data does not pay.
    """
    config = run.config
    if config.privacy.unit != "client" or config.is_deployed:
        raise ValueError("--measure asks the clients of a simulation (privacy.unit = 'client', records on this host)")
    if (place / LEDGER_FILE).exists():
        raise ValueError(f"{place / LEDGER_FILE}: its answer was paid for and lost; --folder OTHER asks and pays again")
    with say_working("reading the records"):
        from client.data.prepare import prepare
        from server.config.account import account_of, check_account
        from server.evaluation.personal import ask_gain, price_gain
        from server.runs.assembly import data_spec

        prepared = prepare(data_spec(config))
    question = price_gain(prepared.num_clients, epsilon, config.privacy.delta, bound)
    check_account(config, [question.commitment])
    agree(question.price, yes=yes)
    with say_working("training every client on its own records"):
        engine, adapter = run.engine()
        durable.new_folder(place)
        found = ask_gain(engine, adapter, prepared, local, question, place / LEDGER_FILE, account_of(config))
    durable.write(place / ANSWER_FILE, json.dumps(found, indent=2) + "\n")
    say(f"Its ledger: {shell_quoted(place / LEDGER_FILE)}", style="dim")
