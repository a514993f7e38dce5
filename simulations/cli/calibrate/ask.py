"""`lacquer ask`: what private units are like, in public bins and with noise; the price comes first.

One command for a simulation, for the records of one node on that node, and for a federation: in this process where it
is a simulated one (sites with noise of their own, or secure sums), else over the SuperLink.
"""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privacy import durable
from privacy.errors import AccountRefused
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.names import ANSWERS_FILE, CLIENTS_FILE, LEDGER_FILE, QUESTION_FILE, write_config
from simulations.cli.exits import FAILED, end_on_signals, fail, refusals
from simulations.cli.federation.connection import ADDRESS, TRUST, Address, Trust, check_trust, control
from simulations.cli.progress import say_working
from simulations.engines.flower import RunFailed

if TYPE_CHECKING:
    from client.record_level.statistics import Source
    from privacy.ledger.place import At
    from server.asking import Target

Consent = Callable[[str], None]
"""Tells a price, and returns if it may be spent."""


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
    node: Annotated[
        str, typer.Option("--node-config", help="On a node: its settings, whose records alone are then asked.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Spend without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; needs --yes.")] = False,
    address: Address = ADDRESS,
    ca: Trust = Path(TRUST),
) -> None:
    """Records of a unit, lengths of texts, shares of labels and advice, with noise, before a run.

    Bins are public and fixed: bins chosen from the data, and questions of one's own, have no known price.
    """
    here = Path.cwd()
    with refusals(ValueError, AccountRefused, RunFailed):
        from simulations.presets.asked import ask

        run = ask(preset, settings or [], {}, here, data or here).run
        place = (folder or Path(run.output) / f"ask-{run.name}").absolute()
        if not (place / ANSWERS_FILE).is_file():
            if begun := [name for name in (LEDGER_FILE, QUESTION_FILE) if (place / name).exists()]:
                raise ValueError(
                    f"{place / begun[0]}: its answers were paid for and lost; --folder OTHER asks again, and "
                    "costs as much again"
                )
            from server.asking import Target, refuse_unanswerable

            target = Target(epsilon, delta or run.privacy.delta)
            consent = partial(agree, yes=yes, quiet=as_json)
            if not node and (run.is_deployed or run.several_sites or run.noise_shares is not None):
                refuse_unanswerable(run)
                if run.is_deployed:
                    check_trust(ca)
                _ask_federation(run, place, target, consent, address, ca)
            else:
                _ask_here(run, place, target, consent, node)
        found = json.loads((place / ANSWERS_FILE).read_text())
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_page(found, preset)))


def _ask_here(run: RunConfig, place: Path, target: "Target", consent: Consent, node: str) -> None:
    """Ask the units whose records this machine has: of a simulation, or of one node."""
    from client.record_level.statistics import answer, price
    from privacy.ledger.account import Account
    from server.config.account import account_of
    from server.evaluation.statistics import answers, price_words

    with say_working("reading the records"):
        source, account = _of_node(run, node, target) if node else (_simulated(run), account_of(run))
    question = price(source.population, run.unit, source.labels, target.epsilon, target.delta)
    if account is not None:
        with Account.open(*account) as held:
            held.check(question.commitment)
    consent(price_words(question))
    with say_working("asking"):
        mean = answer(source, question, place / LEDGER_FILE, account)
    found = answers(question, mean, everyone=source.population == len(source))
    durable.write(place / ANSWERS_FILE, json.dumps(found, indent=2) + "\n")


def _simulated(run: RunConfig) -> "Source":
    from client.data.prepare import prepare
    from client.record_level.statistics import Source
    from server.evaluation.statistics import uncut
    from server.runs.assembly import data_spec

    return Source.of(prepare(data_spec(uncut(run))), run.privacy.unit, run.model.name)


def _of_node(run: RunConfig, text: str, target: "Target") -> "tuple[Source, At | None]":
    """The units of a node's own records, and the account that its owner keeps of them.

    Raises:
        ConfigError: the settings name no records, or its owner's policy refuses.
    """
    from flwr.common.config import parse_config_args

    from client.data.local import open_own
    from client.data.prepare import prepare
    from client.node import Node
    from client.node_state.owner import Owner
    from client.record_level.statistics import Source
    from server.evaluation.statistics import uncut
    from server.runs.assembly import data_spec, node_reading

    said = parse_config_args([text])
    node, owner = Node.of(said), Owner.of(said)
    if node is None or not run.is_deployed:
        what = "data.held-by = 'nodes'" if node else 'data="jsonl:FILE" in its text'
        raise ConfigError(f"--node-config needs {what}: it is for the records of a node of a federation")
    labels = prepare(data_spec(run)).label_names
    reading, unit = node_reading(uncut(run), labels), run.privacy.unit
    assert reading is not None, "of a deployed run"
    if reason := owner.refusal(
        epsilon=target.epsilon, releases=1, task=run.model.task, model=run.model.name, others=run.clients
    ):
        raise ConfigError(reason)
    model = node.model or run.model.name
    own = open_own(node.data, reading, model, node.folder)
    if unit != "client":
        return Source.of_records(own.records, labels, model, grouped=unit == "group"), owner.account
    if own.stops is None or not node.clients.isdecimal() or int(node.clients) < own.clients:
        raise ConfigError(
            "privacy.unit = 'client': a node that is one client is one unit, which no noise can count; ask a node with "
            "many (clients=NUMBER in --node-config, no fewer than it has, and data.client-column)"
        )
    return Source.of_clients(own, labels, model, int(node.clients)), owner.account


def _ask_federation(run: RunConfig, place: Path, target: "Target", consent: Consent, address: str, ca: Path) -> None:
    """Ask everybody who holds records: simulated here, or at nodes, over the SuperLink."""
    from server.asking import price_over_clients
    from server.config.account import check_account
    from server.evaluation.statistics import price_words, uncut

    uncut(run)
    if run.several_sites:
        unit = run.unit.removeprefix("group:")
        consent(
            f"This costs epsilon {target.epsilon:g} at delta {target.delta:g} for each {unit} of any of "
            f"{run.clients:,} sites: each charges its own ledger and account, and answers with noise of its own."
        )
    else:
        labels = ("", "") if run.model.task == "classification" else ()  # how many there are does not matter
        question = price_over_clients(run, labels, target)
        check_account(run, [question.commitment])
        consent(price_words(question))
    target.write_new(place)
    if not run.is_deployed:
        from simulations.engines.inprocess import run_inprocess

        with say_working("asking all clients"):
            run_inprocess(run, place)
        return
    from simulations.cli.federation.clients import names
    from simulations.cli.federation.following import hand_over, judge, stopped_if_interrupted, watch

    write_config(place, run)
    with end_on_signals(), control(address, ca) as superlink:
        durable.write(place / CLIENTS_FILE, json.dumps(names(), indent=1) + "\n")
        try:
            number = hand_over(superlink, place, {})
            with stopped_if_interrupted(superlink, number):
                with say_working("asking the nodes"):
                    watch(superlink, number, run, place, quiet=True)
            judge(superlink, number, place)
        except RunFailed as failure:
            fail(f"Nobody has answered: {failure}\n\nFolder: {place}", FAILED)


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
    asked = f"{found['sites']} sites answered; " if "sites" in found else ""
    lines = [f"{name} did not answer: {reason}" for name, reason in found.get("refused", {}).items()]
    lines += [
        f"{asked}{units['value']:,} +-{units['within']:,} of {found['units']:,} {unit}s have records (epsilon "
        f"{found['epsilon']:g} was spent; shares are known to +-{100 * found['share_within']:.2g} points, 95 %)."
    ]
    for name, title in (("records_per_unit", f"Records of a {unit}"), ("tokens_per_text", "Tokens of a text")):
        told = [f"{100 * float(level):.0f} %: {_end(value)}" for level, value in found[name]["quantiles"].items()]
        lines.append(f"{title}, at most, of  " + ",  ".join(told))
    cut = [f"{edge}: {100 * share:.1f} %" for edge, share in found["tokens_per_text"]["cut_at"].items() if share > 1e-3]
    lines.append("Texts that a max-length cuts  " + ",  ".join(cut))
    written = [f"{name}: {100 * share:.1f} %" for name, share in found["scripts"].items() if share > 1e-3]
    lines.append("Scripts of texts  " + ",  ".join(written))
    if found["labels"]:
        shares = [f"{name}: {100 * share:.1f} %" for name, share in found["labels"].items()]
        lines.append(f"Labels, a mean over {unit}s  " + ",  ".join(shares))
    fits = (
        ("clients", "sampling-rate", "model.max-length")
        if found["unit"] == "client"
        else ("model.max-length", "site.records-per-unit")
    )
    changed = " ".join(f"--set {key}={value}" for key, value in found["advice"].items() if key in fits and value)
    return [*lines, f"  lacquer run {preset} {changed}"]


def _end(value: Mapping[str, Any]) -> str:
    """A quantile with the ends of its interval."""
    most = "more" if value["most"] is None else value["most"]
    return f"{'more' if value['value'] is None else value['value']} ({value['least']} to {most})"
