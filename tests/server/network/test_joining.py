"""How many clients each node has: asked once, added up, kept, and never guessed."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.network.joining import join_nodes
from server.run_folder.names import ROSTER_FILE
from strategies.messages.client_update import code_fingerprint
from strategies.messages.dispatch import RoundFailed
from strategies.messages.own_clients import JoinRequest, join_reply

Say = Callable[[int], RecordDict | Error | None]


class Nodes:
    """A grid of nodes that answer what ``say`` makes of their number; None is silence."""

    pull_interval = 0.01

    def __init__(self, say: Say) -> None:
        self.say, self.asked = say, list[JoinRequest]()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.there = {}
        for message in messages:
            assert message.metadata.message_type == "query.clients"
            node = message.metadata.dst_node_id
            self.asked.append(JoinRequest.from_records(message.content))
            message.metadata.__dict__["_message_id"] = str(node)
            if (said := self.say(node)) is not None:
                self.there[str(node)] = Message(said, reply_to=message)
        return [str(node) for node in (1, 2, 3)]

    def pull_messages(self, identifiers: Iterable[str]) -> list[Message]:
        return [self.there.pop(one) for one in identifiers if one in self.there]


def honest(node: int) -> RecordDict:
    return join_reply(10 * node, code_fingerprint())


def numbers(folder: Path, grid: Nodes, clients: int = 60) -> tuple[int, ...]:
    request = JoinRequest("run", "{}")
    return join_nodes(folder / ROSTER_FILE, grid, (1, 2, 3), request, clients=clients, timeout=0.1)  # type: ignore[arg-type]


@pytest.fixture
def roster(tmp_path: Path) -> Path:
    (tmp_path / ROSTER_FILE).write_text('{"nodes": [1, 2, 3]}')
    return tmp_path


def test_numbers_are_asked_once_and_stand_in_the_roster(roster: Path) -> None:
    grid = Nodes(honest)
    assert numbers(roster, grid) == (10, 20, 30)
    assert grid.asked == [JoinRequest("run", "{}")] * 3
    assert json.loads((roster / ROSTER_FILE).read_text()) == {"nodes": [1, 2, 3], "clients": [10, 20, 30]}
    assert numbers(roster, Nodes(lambda node: join_reply(1, code_fingerprint()))) == (10, 20, 30)


def test_their_sum_is_the_population(roster: Path) -> None:
    with pytest.raises(ConfigError, match=r"clients = 61, but the nodes have 60 \(node 1 has 10, .* set clients to"):
        numbers(roster, Nodes(honest), 61)
    assert "clients" not in json.loads((roster / ROSTER_FILE).read_text())


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (None, "node 2: it did not answer in time"),
        (Error(2, "the patient is John"), "node 2: the client's code raised an exception; its own log has"),
        (join_reply(0, code_fingerprint()), "node 2: its reply was refused: a node with clients of its own must have"),
        (join_reply(20, "0" * 64), "node 2: its reply was refused: client runs other code"),
        (RecordDict(), "node 2: its reply was refused: message has no record"),
        (RecordDict({"config": ConfigRecord({"clients": 20.0, "code": code_fingerprint()})}), "must be a int"),
        (RecordDict({"config": ConfigRecord({"clients": 20, "code": code_fingerprint(), "x": 1})}), "must have at"),
    ],
)
def test_a_node_that_does_not_join_ends_the_run_before_anything_is_charged(
    said: RecordDict | Error | None, says: str, roster: Path
) -> None:
    with pytest.raises(RoundFailed, match="nothing was charged") as caught:
        numbers(roster, Nodes(lambda node: said if node == 2 else honest(node)))
    assert says in str(caught.value)
    assert "John" not in str(caught.value)


@pytest.mark.parametrize("kept", [[10, 20], [10, 20, 31], [10, 20, "30"], [70, -40, 30], {"1": 60}])
def test_numbers_of_another_run_are_refused(kept: object, roster: Path) -> None:
    (roster / ROSTER_FILE).write_text(json.dumps({"nodes": [1, 2, 3], "clients": kept}))
    with pytest.raises(CorruptRun, match="does not say how many clients each node has"):
        numbers(roster, Nodes(honest))
