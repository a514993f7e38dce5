"""Flower's state of a SuperLink with a run and one node, and its handlers of calls, without HTTP between."""

import time
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message.message import make_message, remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import push_objects
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers


class SuperLink:
    """A run and one node."""

    def __init__(self, folder: Path, kind: type[SqlLinkState] = SqlLinkState) -> None:
        path = str(folder / "state.db")
        self.state = kind(path, NoOpFederationManager(), ObjectStoreFactory(path).store())
        self.state.initialize()
        self.node = self.state.create_node("a", "a", b"key", 60.0)
        self.state.activate_node(self.node, 60.0)
        self.run = self.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, "serverapp")
        (self.task,) = self.state.get_tasks(run_ids=[self.run])
        assert self.state.claim_task(self.task.task_id)
        assert self.state.activate_task(self.task.task_id)


class Fleet:
    """What a SuperNode calls. So many answers to the objects that it sends are lost."""

    request, more = PushMessagesRequest, ()
    handlers: Any = fleet_handlers

    def __init__(self, link: SuperLink, sender: int, lost: int = 0) -> None:
        self.link, self.sender = link, Node(node_id=sender)
        self.lost = iter(range(lost))  # each is taken once, although objects are sent by several threads

    def PushMessages(self, request: Any) -> Any:
        return self.handlers.push_messages(request, self.link.state, *self.more)

    def PushObject(self, request: Any) -> Any:
        response = self.handlers.push_object(request, self.link.state, *self.more)
        for _ in self.lost:
            response = self.handlers.push_object(request, self.link.state, *self.more)
        return response

    def PullObject(self, request: Any) -> Any:
        return self.handlers.pull_object(request, self.link.state, *self.more)

    def announce(self, message: Message) -> Any:
        """The message without its objects."""
        message.metadata.__dict__["_message_id"] = message.object_id
        named = {"node": self.sender} if self.request is PushMessagesRequest else {}
        request = self.request(
            **named,
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return self.PushMessages(request)

    def send(self, message: Message) -> None:
        """As Flower does: the message, then what is asked for of its objects."""
        self.upload(message, self.announce(message))

    def upload(self, message: Message, answered: Any) -> None:
        """What the answer to a message asks for of its objects."""
        push = make_push_object_fn_protobuf(self.PushObject, self.sender, self.link.run, answered.session_id)
        push_objects(get_all_nested_objects(message), push, object_ids_to_push=set(answered.objects_to_push))


class Runtime(Fleet):
    """What a ServerApp calls."""

    request, handlers = PushAppMessagesRequest, runtime_handlers

    def __init__(self, link: SuperLink, sender: int = SUPERLINK_NODE_ID, lost: int = 0) -> None:
        super().__init__(link, sender, lost)
        self.more = (link.task,)


def instruction(link: SuperLink) -> Message:
    content = RecordDict({"a": ConfigRecord({"x": time.time()}), "b": ConfigRecord({"y": 2})})
    return make_message(
        metadata=Metadata(link.run, "", SUPERLINK_NODE_ID, link.node, "", "", time.time(), 600.0, "train"),
        content=content,
    )


def reply(link: SuperLink) -> Message:
    """To an instruction that the node has taken."""
    asked = instruction(link)
    Runtime(link).send(asked)
    link.state.get_message_ins(link.node, limit=1)
    made = Message(
        RecordDict({"a": ConfigRecord({"z": time.time()}), "shared": ConfigRecord({"z": 7})}), reply_to=asked
    )
    made.metadata.__dict__["_src_node_id"] = link.node
    return made


def pushing(link: SuperLink, message: Message, **others: Any) -> PushMessagesRequest:
    """What a node sends of a message."""
    message.metadata.__dict__["_message_id"] = message.object_id
    return PushMessagesRequest(
        node=Node(node_id=link.node),
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)],
        **others,
    )
