"""`lacquer ask` where nobody holds all records: at one site, over sites, over nodes of many clients, by secure sums."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

import client.record_level.statistics
import client.secure_sum
import server.app
from client.data.columns.shares import share_row
from client.data.prepare import prepare
from client.node import own_worker
from client.settings import state_folder
from privacy.contribution import GRID
from privacy.ledger.account import OWN, TOLD, Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms
from privacy.randomness.noise import GaussianNoise
from server.asking import Target
from server.config.load import parse
from server.evaluation.statistics import NORMAL_95, uncut
from server.run_folder.names import ANSWERS_FILE
from server.run_folder.telemetry import read_status
from server.runs.assembly import data_spec
from simulations.cli.app import app
from simulations.engines.inprocess import identity, run_inprocess
from strategies.messages.dispatch import RoundFailed
from tests.cases.many_clients import Federation, deployed, of_clients
from tests.runs.test_deployed_sites import Nodes
from tests.runs.test_secure_sum_in_process import settings

pytestmark = pytest.mark.usefixtures("signing", "owners_machine")
TARGET = Target(2.0, 1e-3)


@pytest.fixture
def owners_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-of-machine"))
    own_worker.cache_clear()
    yield
    own_worker.cache_clear()


def open_account(file: Path, unit: str, epsilon: float = 3.0) -> str:
    Account.create(file, Terms("records", unit, epsilon, 0.1, rule="sum"), state_folder()).close()
    return str(file)


def debits(file: Path | str) -> list[tuple[str, float]]:
    with Account.open(Path(file), state_folder(), read_only=True) as found:
        return [(debit.basis, debit.epsilon) for debit in found.debits.values()]


def charges(file: Path) -> int:
    with Ledger.open(file, read_only=True) as ledger:
        return len(ledger.charges)


def answers_of(folder: Path) -> dict[str, Any]:
    status = read_status(folder)
    assert status is not None
    assert status.state == "completed", status
    found: dict[str, Any] = json.loads((folder / ANSWERS_FILE).read_text())
    return found


def test_every_site_pays_first_and_answers_with_noise_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, "record")
    accounts = {node: open_account(tmp_path / f"{node}.account", "record") for node in (1, 2)}
    for node in (1, 2, 3):
        nodes.set(node, site_state=str(tmp_path / f"{node}"), **({"account": accounts[node]} if node < 3 else {}))
    drawn, paid, errors = GaussianNoise.draw, list[tuple[int, int]](), list[torch.Tensor]()
    released = client.record_level.statistics.charged_release

    def draw(self: GaussianNoise, parts: Any) -> Any:
        ledgers = list(tmp_path.glob("[12]/asked/*/ledger.jsonl"))
        paid.append((sum(map(charges, ledgers)), sum(len(debits(file)) for file in accounts.values())))
        return drawn(self, parts)

    def noted(total: Any, plan: Any, *given: Any, **named: Any) -> Any:
        release = released(total, plan, *given, **named)
        exact = plan.clip.decode(total.encoded.double() / GRID, release.expected_units)
        errors.append((release.update.double() - exact) / float(plan.noise_std(release.expected_units)))
        return release

    monkeypatch.setattr(GaussianNoise, "draw", draw)
    monkeypatch.setattr(client.record_level.statistics, "charged_release", noted)
    TARGET.write_new(tmp_path / "asked")
    found = answers_of(nodes.run("asked"))
    assert paid == [(1, 1), (2, 2)], "each is charged and debited before its noise is drawn"
    assert 0.75 < float(torch.cat(errors).std()) < 1.25
    assert found["sites"] == 2
    assert list(found["refused"].values()) == [
        "this site answers no questions: its owner keeps no account that would count them (account)"
    ]
    assert not (tmp_path / "3").exists()
    assert found["units"] == 128
    assert abs(found["tokens_per_text"]["cut_at"]["8"] - 1.0) < 4 * found["share_within"]
    assert [debits(file) for file in accounts.values()] == [[(OWN, 2.0)]] * 2
    TARGET.write_new(tmp_path / "again")
    with pytest.raises(RoundFailed, match="the account of this site's records does not pay for that"):
        nodes.run("again")
    assert [debits(file) for file in accounts.values()] == [[(OWN, 2.0)]] * 2
    assert len(paid) == 2


def test_a_secure_sum_alone_is_opened_and_every_party_pays_before_its_share_of_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = parse(settings(tmp_path / "cache")), tmp_path / "asked"
    noisy, paid, told = client.secure_sum.noisy_share, list[int](), list[torch.Tensor]()

    def share(contribution: Any, plan: Any, *given: Any) -> Any:
        paid.append(sum(map(charges, folder.glob("secagg/party-*/ledger.jsonl"))))
        told.append(plan.clip.decode(contribution.encoded.double() / GRID, 6.0))
        assert float((contribution.encoded.double() / GRID).norm()) <= 1.0
        return noisy(contribution, plan, *given)

    monkeypatch.setattr(client.secure_sum, "noisy_share", share)
    opened, answers = list[Any](), server.asking.answers

    def read(asked: Any, mean: Any, **named: Any) -> Any:
        opened.append((asked, mean))
        return answers(asked, mean, **named)

    monkeypatch.setattr(server.asking, "answers", read)
    TARGET.write_new(folder)
    run_inprocess(config, folder)
    found = answers_of(folder)
    assert paid == [1, 2, 3, 4, 5, 6]
    ((asked, mean),) = opened
    data = prepare(data_spec(uncut(config)))
    exact = sum(told)
    rows = [share_row(data.client(number), 2, config.model.name) for number in range(6)]
    assert torch.allclose(exact, torch.from_numpy(np.mean(rows, axis=0)), atol=1e-6)
    off = float((mean.double() - exact).std()) * NORMAL_95
    assert 0.6 * found["share_within"] < off < 1.3 * found["share_within"], "the noise of the parties' shares is there"
    assert found["share_within"] == pytest.approx(NORMAL_95 * asked.noise_std)
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [(event.label, event.noise_shares is not None) for event in ledger.events] == [("ask", True)]
        assert ledger.epsilon_guaranteed() <= 2.0
        assert ledger.not_private is None


def test_nodes_with_many_clients_debit_the_signed_price_and_draw_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, run = [8, 8, 8], tmp_path / "run"
    grid = Federation(tmp_path, [of_clients(node, 6) for node in "abc"], numbers)
    accounts = [open_account(tmp_path / f"{node}.account", "client", 5.0) for node in (1, 2, 3)]
    for context, account in zip(grid.contexts.values(), accounts, strict=True):
        context.node_config["account"] = account
    drawn, paid = GaussianNoise.draw, list[tuple[int, int]]()

    def draw(self: GaussianNoise, parts: Any) -> Any:
        paid.append((charges(run / "ledger.jsonl"), sum(len(debits(file)) for file in accounts)))
        return drawn(self, parts)

    monkeypatch.setattr(GaussianNoise, "draw", draw)
    Target(4.0, 1e-3).write_new(run)
    (tmp_path / "run.toml").write_text(deployed(tmp_path, numbers, privacy=""))
    keys: dict[str, Any] = {"config-file": str(tmp_path / "run.toml"), "run-folder": str(run)}
    with identity(0):
        server.app.app(grid=grid, context=Context(1, 0, {}, RecordDict(), keys))
    found = answers_of(run)
    assert paid == [(1, 3)]
    assert [debits(file) for file in accounts] == [[(TOLD, 4.0)]] * 3
    assert found["units"] == 24
    assert found["units_with_records"]["within"] >= math.ceil(24 * found["share_within"])
    assert set(found["labels"]) == {"calm", "urgent"}


def test_the_owner_of_a_site_asks_it_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, "group")
    text = nodes.settings.format(rounds=2, steps=2, unit="group", folder=tmp_path)
    (tmp_path / "run.toml").write_text(text)
    account = open_account(tmp_path / "own.account", "group:patient")
    own = {**nodes.grid.contexts[1].node_config, "account": account, "account-state": str(state_folder())}
    said = " ".join(f'{name}="{value}"' for name, value in own.items() if name in ("data", "cache", "account"))
    said += f' account-state="{own["account-state"]}"'
    runner = CliRunner()

    def ask(folder: str, *more: str, node: str = said) -> Any:
        options = ["--node-config", node, "--epsilon", "2", "--folder", str(tmp_path / folder), *more]
        return runner.invoke(app, ["ask", str(tmp_path / "run.toml"), *options])

    refused = ask("first")
    assert refused.exit_code == 2
    assert "This costs epsilon 2 at delta 0.001 for each of " in refused.output
    assert "patients" in refused.output
    assert debits(account) == []
    first = ask("first", "--yes")
    assert first.exit_code == 0, first.output
    assert "site.records-per-unit=" in first.output
    assert debits(account) == [(OWN, 2.0)]
    assert charges(tmp_path / "first" / "ledger.jsonl") == 1
    second = ask("second", "--yes")
    assert second.exit_code == 2
    assert "epsilon 1 is left of 3" in second.output
    assert not (tmp_path / "second").exists()
    (tmp_path / "policy.toml").write_text("epsilon-per-run = 1.5")
    third = ask("third", "--yes", node=f'{said} policy="{tmp_path}/policy.toml"')
    assert "allows an epsilon of at most 1.5 a run" in third.output


def test_one_client_at_every_node_is_not_asked_by_a_server_that_it_trusts(tmp_path: Path) -> None:
    text = Nodes(tmp_path, "record").settings.format(rounds=1, steps=1, unit="client", folder=tmp_path)
    (tmp_path / "run.toml").write_text(text.replace('unit-column = "patient"\n', ""))
    found = CliRunner().invoke(app, ["ask", str(tmp_path / "run.toml"), "--yes"])
    assert found.exit_code == 2
    assert "privacy.unit = 'client' with one client at every node" in found.output
