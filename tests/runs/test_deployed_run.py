"""A whole run on nodes that hold their own records, in one process: what Docker's test does with real ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

import server.app
from client.app import app as client_app
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from privacy.secagg import keys
from privacy.secagg.federation import load_identity, save_identity
from server.run_folder.names import ROSTER_FILE
from server.run_folder.round_record import Presence
from server.run_folder.telemetry import read_metrics, read_status
from simulations.cli.app import app as lacquer
from simulations.engines.inprocess import InProcessGrid, identity
from simulations.tools.sample_records import write_records
from strategies.messages.dispatch import RoundFailed
from tests.cases.deployed import deployed_settings
from tests.cases.instructions import server as signer

pytestmark = pytest.mark.usefixtures("signing")

SETTINGS = deployed_settings(clients=3, privacy="epsilon = 8.0\ndelta = 1e-2")


class Federation(InProcessGrid):
    """Three nodes, each with a file of its own; some may be away."""

    def __init__(self, folder: Path, chat: bool = False) -> None:
        super().__init__(client_app, 3)
        self.away: set[int] = set()
        self.asked: list[list[int]] = []
        for (node, context), path in zip(self.contexts.items(), write_records(folder, 3, 16, chat), strict=True):
            context.node_config = {"data": f"jsonl:{path}", "cache": str(folder / f"own-{node}")}
            context.node_config["authority"] = signer().authority

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.away]

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        self.asked.append([message.metadata.dst_node_id for message in messages])
        return super().push_messages(messages)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    grid, folder = Federation(tmp_path), tmp_path / "run"

    def go(rounds: int = 2, **keys: Any) -> None:
        if not keys:
            folder.mkdir()
            text = SETTINGS.format(rounds=rounds, folder=tmp_path)
            (tmp_path / "run.toml").write_text(text)
            keys = {"config-file": str(tmp_path / "run.toml"), "run-folder": str(folder)}
        with identity(0):
            server.app.app(grid=grid, context=Context(1, 0, {}, RecordDict(), keys))

    return grid, folder, go


def test_nodes_train_on_their_own_records_and_the_server_evaluates_on_its_own(start: Any) -> None:
    grid, folder, go = start
    go()
    status, records = read_status(folder), read_metrics(folder)
    assert status is not None
    assert status.state == "completed"
    assert [record.round for record in records] == [0, 1, 2]
    assert all(record.validation_loss is not None for record in records)
    assert grid.asked == [[1, 2, 3], [1, 2, 3]]  # one message a round and node; nobody is asked to evaluate
    assert json.loads((folder / ROSTER_FILE).read_text()) == {"nodes": [1, 2, 3]}
    with Ledger.open(folder / "ledger.jsonl") as ledger:
        assert len(ledger.charges) == 2
        assert ledger.commitment.population == 3
    kept = [path for path in folder.rglob("*") if path.is_file() and b"Follow-up of" in path.read_bytes()]
    assert kept == []  # no record of a node in what the run leaves behind
    later, file = folder.parent / "later", folder.parent / "run.toml"
    later.mkdir()
    file.write_text(file.read_text().replace("[model]", f'[model]\nadapter = "{folder}"'))
    go(**{"config-file": str(file), "run-folder": str(later)})
    (told,) = json.loads((later / "privacy.json").read_text())["together"]  # of the same nodes, so of the same data
    assert told["runs"] == ["run", "this run's"]


def test_nodes_train_on_conversations_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    text = SETTINGS.format(rounds=2, folder=tmp_path).replace("random:bert", "random:llama")
    text = text.replace("max-length = 32", 'task = "instruction"\ntargets = "q_proj,v_proj"\nmax-length = 256')
    (tmp_path / "run.toml").write_text(text)
    with identity(0):
        keys = {"config-file": str(tmp_path / "run.toml"), "run-folder": str(folder)}
        server.app.app(grid=Federation(tmp_path, chat=True), context=Context(1, 0, {}, RecordDict(), keys))
    results = json.loads((folder / "results.json").read_text())
    assert results["rounds_done"] == 2
    assert results["test_perplexity"] > 1
    assert results["rouge_records"] > 0
    kept = [path for path in folder.rglob("*") if path.is_file() and b"user-1" in path.read_bytes()]
    assert kept == []


def test_a_node_that_is_away_contributes_zero_and_a_broken_run_goes_on_with_the_same_nodes(start: Any) -> None:
    grid, folder, go = start

    def leave(after: int, nodes: set[int]) -> None:
        pushed = grid.push_messages

        def push(messages: Any) -> Any:
            identifiers = pushed(messages)
            if len(grid.asked) == after:
                grid.away |= nodes
            return identifiers

        grid.push_messages = push

    leave(1, {2})
    leave(2, {3})
    too_few = "1 of 3 nodes are connected, at least 2 must be.*nothing was charged"
    with pytest.raises(RoundFailed, match=too_few):
        go(rounds=4)
    with pytest.raises(RoundFailed, match=too_few):  # `deploy --resume` too early
        go(resume=str(folder))
    assert grid.asked == [[1, 2, 3], [1, 3]]
    assert [record.round for record in read_metrics(folder)] == [0, 1, 2]
    with Ledger.open(folder / "ledger.jsonl") as ledger:
        assert len(ledger.charges) == 2
    grid.away = {2}
    go(resume=str(folder))
    status = read_status(folder)
    assert status is not None
    assert status.state == "completed"
    assert grid.asked[2:] == [[1, 3], [1, 3]]
    with Ledger.open(folder / "ledger.jsonl") as ledger:
        assert len(ledger.charges) == 4


def test_a_round_waits_for_its_nodes_before_anybody_is_drawn(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, folder, go = start
    grid.patience, looks, drawn = 60.0, [], []
    draw = CohortSampler.draw
    monkeypatch.setattr(CohortSampler, "draw", lambda *given, **more: drawn.append(len(looks)) or draw(*given, **more))

    def nodes() -> list[int]:
        looks.append(json.loads((folder / "status.json").read_text())["message"])
        return [1, 2, 3] if len(looks) == 1 else [1, 2] if len(looks) == 5 else [3] if len(looks) < 5 else [1, 3]

    grid.get_node_ids = nodes
    go(rounds=2)
    assert drawn == [5, 6]  # the first round was drawn when there were two
    assert looks[3:5] == ["waiting for nodes: 1 of 3 nodes are connected, at least 2 must be"] * 2
    assert grid.asked == [[1, 2], [1, 3]]
    presences = [record.presence for record in read_metrics(folder)[1:]]
    assert presences == [
        Presence(3, 2, None, "node 3: not connected"),
        Presence(3, 2, None, "node 2: not connected"),
    ]


def test_nodes_open_sums_together_and_how_many_are_in_one_is_told(start: Any, tmp_path: Path) -> None:
    """Every step of a secure sum is an instruction of its own."""
    grid, folder, _ = start
    identities = [tmp_path / f"identity-{node}.key" for node in grid.contexts]
    for path in identities:
        save_identity(path, keys.fresh_identity())
    public = [
        argument for path in identities for argument in ("--member", keys.public_identity(load_identity(path)).hex())
    ]
    made = CliRunner().invoke(
        lacquer,
        [
            "federation",
            str(tmp_path / "federation.json"),
            *public,
            *("--survivors", "2", "--epsilon", "8", "--delta", "1e-2"),
        ],
    )
    assert made.exit_code == 0, made.output
    for (node, context), path in zip(grid.contexts.items(), identities, strict=True):
        own = {"identity": str(path), "federation": str(tmp_path / "federation.json")}
        context.node_config |= own | {"secagg-state": str(tmp_path / f"ledger-{node}")}
    text = SETTINGS.format(rounds=2, folder=tmp_path).replace(
        "delta = 1e-2",
        f'''delta = 1e-2
trust = "secagg"
mode = "filter"
noise = "discrete"
secagg = {{ federation = "{tmp_path}/federation.json", min-survivors = 2 }}''',
    )
    folder.mkdir()
    (tmp_path / "run.toml").write_text(text)
    with identity(0):
        settings = {"config-file": str(tmp_path / "run.toml"), "run-folder": str(folder)}
        server.app.app(grid=grid, context=Context(1, 0, {}, RecordDict(), settings))
    presences = [record.presence for record in read_metrics(folder) if record.phase == "round"]
    assert presences == [Presence(3, 3, 3)] * 2
    assert presences[0].text == "3 of 3 contributed"
    followed = json.loads((tmp_path / "own-1" / "instructions-1.json").read_text())
    assert list(followed) == ["1"]


def test_who_of_the_cohort_contributed_is_told_to_nobody(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trusted server's guarantee counts on a cohort that nobody knows; a refusal is in the server's log alone."""
    grid, folder, go = start
    answer = grid._answer

    def of_other_code(message: Any) -> Any:
        reply = answer(message)
        if message.metadata.dst_node_id == 2:
            reply.content["config"]["code"] = "other"
        return reply

    monkeypatch.setattr(grid, "_answer", of_other_code)
    go(rounds=1)
    (record,) = read_metrics(folder)[1:]
    assert record.presence == Presence(3, 3)
    assert record.presence.text == "3 of 3 connected"
