"""A site and a node with many clients debit their owner's account and keep to its policy, whatever a server says."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client.app import app
from client.node import NodeFailed, refuse_unless_for
from client.node_state.owner import Owner
from client.record_level.participant import take_part
from client.record_level.state import LEDGER
from client.settings import state_folder
from privacy.commitment import Commitment, FloorStep
from privacy.events import Poisson
from privacy.ledger.account import OWN, TOLD, Account, Debit
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms
from privacy.ledger.place import At
from server.runs.assembly import Assembly
from strategies.messages.client_update import code_fingerprint
from strategies.messages.own_clients import JOIN, JoinRequest, planned_draws, read_join_reply
from strategies.messages.records import BadMessage
from tests.cases.node import context, message
from tests.cases.record_level import engine, records
from tests.engine.test_many_clients import NUMBER, POPULATION, RATE, assembly, drawn, request, send, settings  # noqa: F401
from tests.engine.test_participant import SITE
from tests.engine.test_participant import request as steps_of

ROUNDS = FloorStep("round", Poisson(RATE, POPULATION), 2.0, 3)
COMMITMENT = Commitment("client", "add_remove", POPULATION, 8.0, 1e-3, floor=(ROUNDS,))


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-of-machine"))
    return tmp_path / "owner" / "account.jsonl"


def lifetime(account: Path, unit: str, epsilon: float) -> None:
    Account.create(account, Terms("records", unit, epsilon, 0.1, rule="sum"), state_folder()).close()


def debits(account: Path) -> list[Debit]:
    with Account.open(account, state_folder(), read_only=True) as found:
        return list(found.debits.values())


# A site


def test_a_site_debits_what_its_ledger_commits_to_before_it_charges(
    account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lifetime(account, "record", 1.5 * SITE.epsilon)
    made, data, at = engine(), records(), At(account, state_folder())
    charge, seen = Ledger.charge, list[int]()

    def charged(self: Ledger, *given: Any) -> Any:
        seen.append(len(debits(account)))
        return charge(self, *given)

    monkeypatch.setattr(Ledger, "charge", charged)
    for round in (1, 2):
        assert take_part(steps_of(1, round), data, made, tmp_path / "site", at).steps == 1
    assert set(seen) == {1}
    (debit,) = debits(account)
    with Ledger.open(tmp_path / "site" / LEDGER, read_only=True) as ledger:
        assert (debit.run, debit.basis, debit.epsilon) == (ledger.run_id, OWN, SITE.epsilon)
    with caplog.at_level(logging.ERROR):
        reply = take_part(steps_of(1), data, made, tmp_path / "another", at)
    assert (reply.steps, reply.refused) == (
        0,
        "the account of this site's records does not pay for that; its own log says what fits",
    )
    assert f"privacy.epsilon = {0.5 * SITE.epsilon:g} with privacy.delta" in caplog.text
    assert not (tmp_path / "another" / LEDGER).exists()
    smaller = SITE.replace(epsilon=0.5 * SITE.epsilon)
    assert take_part(steps_of(1, site=smaller), data, made, tmp_path / "another", at).steps == 1
    assert len(debits(account)) == 2


# A node with many clients


def join(assembly: Assembly, own: dict[str, str], run: str = "one", **changes: Any) -> int:  # noqa: F811
    said = {"draws": planned_draws(COMMITMENT), "commitment": json.dumps(COMMITMENT.to_json()), **changes}
    asked = JoinRequest(run, assembly.job.to_json(), **said)
    reply = app(message=message(asked.to_records(), f"query.{JOIN}"), context=context(**own))
    return read_join_reply(reply.content, code_fingerprint())


def test_a_node_with_many_clients_debits_the_server_s_word_before_it_draws(
    account: Path,
    assembly: Assembly,  # noqa: F811
    drawn: list[list[int]],  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lifetime(account, "client", 10.0)
    own = settings(tmp_path, account=str(account), **{"account-state": str(state_folder())})
    for _ in range(2):
        assert join(assembly, own) == NUMBER
    send(request(assembly), own)
    assert [(debit.run, debit.basis, debit.epsilon) for debit in debits(account)] == [("one", TOLD, 8.0)]
    with pytest.raises(NodeFailed, match=r"^AccountRefused$"):  # the server is told no more
        join(assembly, own, run="two")
    assert "epsilon 2 is left of 10, the run asks for 8" in caplog.text
    with pytest.raises(NodeFailed, match="BadMessage"):
        send(request(assembly, run="two"), own)
    wrong: dict[str, Any]
    for wrong in ({"commitment": ""}, {"commitment": "{}"}, {"draws": {}}):
        with pytest.raises(NodeFailed, match="BadMessage"):
            join(assembly, own, run="three", **wrong)
    less = replace(COMMITMENT, floor=(replace(COMMITMENT.floor[0], count=1),))
    with pytest.raises(NodeFailed, match="BadMessage"):  # fewer releases are paid for than are asked
        join(assembly, own, run="three", commitment=json.dumps(less.to_json()))
    assert len(debits(account)) == 1


def test_a_node_that_is_one_client_cannot_keep_an_account() -> None:
    for name in ("account", "policy"):
        refuse_unless_for("sum", {name: "x"}, "drawn")
        refuse_unless_for("drawn", {name: "x"})
        with pytest.raises(BadMessage, match=f"is told no commitment that {name} could be held against"):
            refuse_unless_for("sum", {name: "x"})


# The policy


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("epsilon-per-run = 7.5", "allows an epsilon of at most 7.5 a run"),
        ("releases = 1", "allows at most 1 releases a run"),
        ("other-clients = 17", "asks for at least 17 clients at other nodes"),
        ('tasks = ["causal-lm"]', "allows the task causal-lm only"),
        ('models = ["minilm", "smollm2"]', "allows the model minilm, smollm2 only"),
        ("epsilon-per-month = 15.0", "its owner allows epsilon 15 a month, of which 8 is spent"),
    ],
)
def test_a_server_is_held_to_the_owner_s_policy(
    policy: str,
    words: str,
    account: Path,
    assembly: Assembly,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lifetime(account, "client", 100.0)
    own = settings(tmp_path, account=str(account))
    assert join(assembly, own) == NUMBER
    (tmp_path / "policy.toml").write_text(policy)
    with pytest.raises(NodeFailed, match=r"^(BadMessage|AccountRefused)$"):
        join(assembly, {**own, "policy": str(tmp_path / "policy.toml")}, run="two")
    assert words in caplog.text
    assert len(debits(account)) == 1
    (tmp_path / "policy.toml").write_text("epsilon-per-run = 8.0\nother-clients = 16\ntasks = ['classification']")
    assert join(assembly, {**own, "policy": str(tmp_path / "policy.toml")}, run="two") == NUMBER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epsilon-a-run = 2", "epsilon-a-run: unknown key"),
        ("epsilon-per-run = -1", "epsilon-per-run = -1"),
        ("epsilon-per-run", "cannot be read"),
        ("epsilon-per-month = 2", "needs an account; name one in its settings"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(BadMessage, match=words):
        Owner.of({"policy": str(tmp_path / "policy.toml")})
    with pytest.raises(BadMessage, match="cannot be read"):
        Owner.of({"policy": str(tmp_path / "none.toml")})
