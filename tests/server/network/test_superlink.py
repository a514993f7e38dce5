"""A call that Flower's SuperLink has carried out, but answered with an error, loses no message.

Flower's own state, with a database, and its own handlers of calls, without HTTP between.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy.exc import OperationalError

from client.supernode import Completing
from server.network import superlink
from server.network.superlink import MOST_OBJECTS, forgive_counting, refuse_forgeries
from tests.cases.superlink import Fleet, Runtime, SuperLink, instruction, pushing, reply


class CompleteFleet(Completing, Fleet):
    pass


class CompleteRuntime(Completing, Runtime):
    pass


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> SuperLink:
    return SuperLink(tmp_path_factory.mktemp("superlink"))  # takes seconds to make


def take(link: SuperLink, *replies: Message) -> None:
    """As a ServerApp does, which waits for the objects then."""
    names = [each.metadata.reply_to_message_id for each in replies]
    runtime_handlers.pull_messages(PullAppMessagesRequest(message_ids=names), link.state, link.task)


def arrived(link: SuperLink, message: Message) -> bool:
    return all(link.state.object_store.get(name) for name in get_all_nested_objects(message))


@pytest.mark.parametrize(("client", "whole"), [(Fleet, False), (CompleteFleet, True)])
def test_a_reply_that_was_taken_before_it_is_sent_again_is_complete(link: SuperLink, client: Any, whole: bool) -> None:
    """Flower's own is not: once it is, the mending can go."""
    message = reply(link)
    Fleet(link, link.node).announce(message)  # the answer is lost
    take(link, message)
    client(link, link.node).send(message)
    assert arrived(link, message) is whole


def test_an_object_that_two_replies_wait_for_is_there_for_both(link: SuperLink) -> None:
    both = [reply(link), reply(link)]
    for message in both:
        Fleet(link, link.node).announce(message)
    take(link, *both)
    for message in both:
        CompleteFleet(link, link.node).send(message)
        assert arrived(link, message)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("own", "mended", "made", "by_node"),
    [(Fleet, CompleteFleet, reply, True), (Runtime, CompleteRuntime, instruction, False)],
)
def test_an_object_that_is_there_counts_as_sent(
    link: SuperLink, own: Any, mended: Any, made: Callable[[SuperLink], Message], by_node: bool, times: int
) -> None:
    sender, message, other = link.node if by_node else SUPERLINK_NODE_ID, made(link), made(link)
    with pytest.raises(ObjectPushError):
        own(link, sender, 1).send(other)
    mended(link, sender, times).send(message)
    assert arrived(link, message)


def test_an_object_that_nobody_waits_for_is_still_an_error(link: SuperLink) -> None:
    push = make_push_object_fn_protobuf(
        CompleteFleet(link, link.node).PushObject, Node(node_id=link.node), link.run, "other"
    )
    with pytest.raises(ObjectPushError):
        push("0" * 64, b"bytes")


@pytest.mark.parametrize("mended", [False, True])
def test_a_call_whose_bytes_cannot_be_counted_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """Else a node's next message is lost: it counts as delivered."""

    class State(SqlLinkState):
        pass

    def locked(*arguments: Any, **named: Any) -> None:
        raise OperationalError("UPDATE run", None, Exception("database is locked"))

    monkeypatch.setattr(State, "store_traffic", locked)
    if mended:
        forgive_counting(State)
    link = SuperLink(tmp_path, State)
    Runtime(link).send(instruction(link))
    request = PullMessagesRequest(node=Node(node_id=link.node))
    if not mended:
        with pytest.raises(OperationalError):
            fleet_handlers.pull_messages(request, link.state, link.state.object_store)
        assert link.state.get_message_ins(link.node, limit=1) == []
        return
    assert len(fleet_handlers.pull_messages(request, link.state, link.state.object_store).messages_list) == 1


def test_the_command_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mended: list[type] = []
    monkeypatch.setattr(superlink, "forgive_counting", mended.append)
    monkeypatch.setattr(superlink, "refuse_forgeries", mended.append)
    monkeypatch.setattr("flwr.superlink.cli.flower_superlink", lambda: mended.append(int))
    superlink.main()
    assert mended == [SqlLinkState, fleet_handlers, int]  # before Flower starts


ours = SimpleNamespace(push_messages=fleet_handlers.push_messages)
refuse_forgeries(ours)
push_reply = ours.push_messages


@pytest.mark.parametrize("push", [fleet_handlers.push_messages, push_reply])
def test_forged_instructions_keep_no_node_from_its_server(link: SuperLink, push: Any) -> None:
    """Flower stores 120 instructions of another node's, dated an hour back, and gives them to the victim first."""
    while link.state.get_message_ins(link.node, limit=1):
        pass  # what other tests have left for it
    attacker = link.state.create_node("b", "b", os.urandom(8), 60.0)
    link.state.activate_node(attacker, 60.0)
    for number in range(120):
        forged = make_message(
            metadata=Metadata(link.run, "", SUPERLINK_NODE_ID, link.node, "", "", time.time() - 3600, 7200.0, "train"),
            content=RecordDict({"a": ConfigRecord({"x": number})}),
        )
        request = pushing(link, forged)
        request.node.node_id = attacker
        with contextlib.suppress(FlowerError):
            push(request, link.state)
    own = instruction(link)
    Runtime(link).send(own)
    pulls = 1
    while link.state.get_message_ins(link.node, limit=1)[0].metadata.message_id != own.metadata.message_id:
        pulls += 1
    assert pulls == (121 if push is fleet_handlers.push_messages else 1)


@pytest.mark.parametrize("runtime", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_a_runtime_that_cannot_be_is_not_counted_and_its_reply_is(link: SuperLink, runtime: float) -> None:
    message = reply(link)
    push_reply(pushing(link, message, clientapp_runtime_list=[runtime]), link.state)
    (run,) = link.state.get_run_info(run_ids=[link.run])
    assert run.clientapp_runtime is not None
    assert 0.0 <= run.clientapp_runtime < 1e6
    assert answered(link, message)


def test_a_possible_runtime_is_counted(link: SuperLink) -> None:
    before = link.state.get_run_info(run_ids=[link.run])[0].clientapp_runtime
    push_reply(pushing(link, reply(link), clientapp_runtime_list=[2.5]), link.state)
    assert link.state.get_run_info(run_ids=[link.run])[0].clientapp_runtime == before + 2.5


def answered(link: SuperLink, message: Message) -> list[str]:
    """Names of the replies that the server's next request for them gives."""
    names = [message.metadata.reply_to_message_id]
    found = runtime_handlers.pull_messages(PullAppMessagesRequest(message_ids=names), link.state, link.task)
    return [each.metadata.message_id for each in found.messages_list]


def not_a_number(request: PushMessagesRequest, field: str, value: float) -> None:
    setattr(request.messages_list[0].metadata, field, value)


def many_objects(request: PushMessagesRequest) -> None:
    names = [f"{number:064x}" for number in range(MOST_OBJECTS + 1)]
    request.message_object_trees[0].children.extend(ObjectTree(object_id=name) for name in names)


REFUSED: dict[str, Callable[[PushMessagesRequest], Any]] = {
    "time is no number": lambda request: not_a_number(request, "created_at", math.nan),
    "time is no number ": lambda request: not_a_number(request, "ttl", math.nan),
    "time is no number  ": lambda request: not_a_number(request, "created_at", math.inf),
    "another node's name": lambda request: setattr(request.messages_list[0].metadata, "src_node_id", 77),
    "more than 1000 objects": many_objects,
    "not one message": lambda request: request.messages_list.append(request.messages_list[0]),
    "is not one message": lambda request: request.ClearField("message_object_trees"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_node_may_not_send_is_refused_and_the_server_still_gets_replies(link: SuperLink, reason: str) -> None:
    message, other = reply(link), reply(link)
    request = pushing(link, message)
    REFUSED[reason](request)
    with pytest.raises(FlowerError, match=reason.strip()):
        push_reply(request, link.state)
    assert answered(link, message) == []
    push_reply(pushing(link, other), link.state)
    assert answered(link, other) == [other.metadata.message_id]
