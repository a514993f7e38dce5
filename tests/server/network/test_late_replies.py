"""A node that names what it never uploads is late alone: the replies of others come, within the round's time.

Flower's own grid of a ServerApp, its state with a database and its handlers, without HTTP between.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from server.network import patience
from server.network.grid import exchange_messages
from tests.cases.superlink import Fleet, SuperLink, pushing

HANDLERS = {
    "push-messages": runtime_handlers.push_messages,
    "pull-messages": runtime_handlers.pull_messages,
    "push-object": runtime_handlers.push_object,
    "pull-object": runtime_handlers.pull_object,
    "confirm-message-received": runtime_handlers.confirm_message_received,
}


class Direct(patience.RuntimeClient):
    """The client of a grid whose calls are answered in this process."""

    link: SuperLink

    def _unary_unary(self, *, path: str, request: Any, **others: Any) -> Any:
        return HANDLERS[path.rpartition("/")[2]](request, self.link.state, self.link.task)


class Federation:
    """A run with three nodes, and the ServerApp's grid."""

    def __init__(self, folder: Path) -> None:
        self.link = SuperLink(folder)
        self.nodes = [self.link.node]
        for number in range(2):
            node = self.link.state.create_node("a", "a", b"other %d" % number, 60.0)
            self.link.state.activate_node(node, 60.0)
            self.nodes.append(node)
        self.grid = patience.make_patient(HttpGrid("127.0.0.1:1", insecure=True, token="x"))
        self.grid._client = Direct("http://127.0.0.1:1")  # type: ignore[attr-defined]
        self.grid._client.link = self.link  # type: ignore[attr-defined]
        self.grid.pull_interval = 0.05  # type: ignore[attr-defined]
        self.grid.set_run(Run.create_empty(self.link.run))

    def ask(self, timeout: float) -> tuple[list[Message], Any]:
        """Messages to all nodes, which have taken them, and the replies to come."""
        messages = [Message(RecordDict(), node, "train") for node in self.nodes]
        replies = exchange_messages(self.grid, messages, timeout)
        for node in self.nodes:
            self.link.state.get_message_ins(node, limit=1)
        return messages, replies

    def reply(self, asked: Message, content: RecordDict) -> Message:
        made = Message(content, reply_to=asked)
        made.metadata.__dict__["_src_node_id"] = asked.metadata.dst_node_id
        return made

    def answer(self, asked: Message) -> None:
        """A sound reply."""
        sent = self.reply(asked, RecordDict({"a": ArrayRecord()}))
        Fleet(self.link, asked.metadata.dst_node_id).send(sent)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    before, TaskIdentity.run_id = TaskIdentity.run_id, made.link.run
    yield made
    TaskIdentity.run_id = before


def nodes_of(replies: list[Message]) -> list[int]:
    return [reply.metadata.src_node_id for reply in replies if not reply.has_error()]


def announce(federation: Federation, asked: Message) -> Any:
    """Name 62 objects of a reply and upload none."""
    request = pushing(federation.link, federation.reply(asked, RecordDict()))
    request.node.node_id = asked.metadata.dst_node_id
    leaves = [ObjectTree(object_id=f"{number:064x}") for number in range(62)]
    request.message_object_trees[0].children.extend(leaves)
    return fleet_handlers.push_messages(request, federation.link.state)


@pytest.mark.timeout(120)
def test_objects_that_never_come_make_only_their_own_reply_late(federation: Federation) -> None:
    (first, *others), replies = federation.ask(timeout=3.0)
    announce(federation, first)
    for other in others:
        federation.answer(other)
    assert sorted(nodes_of(list(replies))) == sorted(federation.nodes[1:])


@pytest.mark.timeout(120)
def test_a_reply_is_handed_on_when_its_last_object_is_there(federation: Federation) -> None:
    (first, second, _), replies = federation.ask(timeout=20.0)
    sent = federation.reply(first, RecordDict({"a": ArrayRecord()}))
    fleet = Fleet(federation.link, first.metadata.dst_node_id)
    announced = fleet.announce(sent)
    federation.answer(second)
    assert nodes_of([next(replies)]) == [federation.nodes[1]]
    assert federation.grid.pull_messages([first.metadata.message_id]) == []
    fleet.upload(sent, announced)
    assert nodes_of([next(replies)]) == [federation.nodes[0]]


@pytest.mark.timeout(120)
def test_a_reply_that_cannot_be_read_takes_no_other_along(federation: Federation) -> None:
    (first, *others), replies = federation.ask(timeout=3.0)
    broken = federation.reply(first, RecordDict({"a": ArrayRecord()}))
    request = pushing(federation.link, broken)
    request.node.node_id = first.metadata.dst_node_id
    request.message_object_trees[0].ClearField("children")  # the message's content is then missing
    answer = fleet_handlers.push_messages(request, federation.link.state)
    fleet_handlers.push_object(
        PushObjectRequest(
            node=Node(node_id=first.metadata.dst_node_id),
            run_id=federation.link.run,
            object_id=broken.object_id,
            object_content=broken.deflate(),
            session_id=answer.session_id,
        ),
        federation.link.state,
    )
    for other in others:
        federation.answer(other)
    assert sorted(nodes_of(list(replies))) == sorted(federation.nodes[1:])
