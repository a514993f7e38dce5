"""What a node that was let in can do in another's name: Flower's SuperLink with its own HTTP, keys and database.

That a node follows no instruction twice, and none that another made: tests/engine/test_instructions.py.
"""

import datetime
import importlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.testclient import TestClient

from client import supernode
from client.supernode import POLL, Watch
from server.network.superlink import refuse_forgeries
from tests.cases.superlink import Runtime, instruction
from tests.server.network.test_superlink import take

pytestmark = pytest.mark.run  # imports the SuperLink and makes its database

DAY = datetime.timedelta(days=1)


class Federation:
    """A SuperLink in this process, a run, and two nodes that were let in."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        patch.setenv("FLWR_DATABASE", str(folder / "state.db"))
        from flwr.superlink.main import create_app

        self.app = create_app()
        self.state: Any = self.app.state.linkstate_factory.state()
        self.keys: dict[int, ec.EllipticCurvePrivateKey] = {}
        for name in ("honest", "insider"):
            key, public = generate_key_pairs()
            node = self.state.create_node(name, name, public_key_to_bytes(public), 60.0)
            self.state.activate_node(node, 60.0)
            self.keys[node] = key
        self.honest, self.insider = self.node, _ = tuple(self.keys)
        self.run = self.state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, "serverapp")
        (self.task,) = self.state.get_tasks(run_ids=[self.run])
        assert self.state.claim_task(self.task.task_id)
        assert self.state.activate_task(self.task.task_id)

    def calls(self, by: int) -> FleetHttpClient:
        """With the key of a node."""
        key = self.keys[by]
        made = FleetHttpClient("http://superlink", interceptors=[NodeAuthHttpInterceptor(key, key.public_key())])
        made._client = TestClient(self.app, base_url="http://superlink")
        return made

    def pull(self, by: int, of: int) -> list[Any]:
        return list(self.calls(by).PullMessages(PullMessagesRequest(node=Node(node_id=of))).messages_list)

    def ask(self) -> Message:
        """The honest node, which takes the message."""
        asked = instruction(self)  # type: ignore[arg-type]
        Runtime(self).send(asked)  # type: ignore[arg-type]
        assert len(self.pull(self.honest, self.honest)) == 1
        return asked

    def push(self, message: Message, by: int, named: int) -> Any:
        """As a call of ``by``, in the name of ``named``."""
        message.metadata.__dict__["_src_node_id"] = named
        message.metadata.__dict__["_message_id"] = message.object_id
        request = PushMessagesRequest(
            node=Node(node_id=by),
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
        )
        return self.calls(by).PushMessages(request)

    def replies(self) -> list[Any]:
        from flwr.supercore.state.schema.linkstate_models import MessageRes

        with self.state.session() as session:
            return list(session.query(MessageRes.message_id, MessageRes.src_node_id))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with pytest.MonkeyPatch.context() as patch:
        from flwr.superlink.servicer.fleet import fleet_handlers

        patch.setattr(fleet_handlers, "push_messages", fleet_handlers.push_messages)
        refuse_forgeries(fleet_handlers)
        yield Federation(patch, tmp_path_factory.mktemp("superlink"))


def answer(asked: Message, text: str = "mine") -> Message:
    return Message(RecordDict({"config": ConfigRecord({"text": text, "at": time.time()})}), reply_to=asked)


def test_nobody_takes_what_is_meant_for_another_node(federation: Federation) -> None:
    asked = instruction(federation)  # type: ignore[arg-type]
    Runtime(federation).send(asked)  # type: ignore[arg-type]
    with pytest.raises(httpx.HTTPStatusError) as refused:
        federation.pull(by=federation.insider, of=federation.honest)
    assert refused.value.response.status_code == 401
    assert federation.pull(federation.insider, federation.insider) == []
    (taken,) = federation.pull(federation.honest, federation.honest)
    assert taken.metadata.message_id == asked.metadata.message_id


@pytest.mark.parametrize("kind", ["content", "error"])
def test_nobody_answers_for_another_node(federation: Federation, kind: str) -> None:
    """Although they know the name of its message, which Flower lets nobody know."""
    asked, before = federation.ask(), federation.replies()
    made = answer(asked) if kind == "content" else Message(Error(0, "none"), reply_to=asked)
    with pytest.raises(httpx.HTTPStatusError) as refused:
        federation.push(made, by=federation.insider, named=federation.honest)
    assert refused.value.response.status_code == 403
    federation.push(answer(asked), by=federation.insider, named=federation.insider)
    assert federation.replies() == before
    federation.push(answer(asked), by=federation.honest, named=federation.honest)
    assert len(federation.replies()) == len(before) + 1


def test_the_first_answer_counts_and_no_second(federation: Federation) -> None:
    asked, before = federation.ask(), federation.replies()
    one, other = answer(asked, "one"), answer(asked, "other")
    wanted = [federation.push(made, federation.honest, federation.honest).objects_to_push for made in (one, other, one)]
    assert (bool(wanted[0]), list(wanted[1])) == (True, [])
    assert [name for name, _ in federation.replies() if (name, _) not in before] == [one.metadata.message_id]
    take(federation, one)  # type: ignore[arg-type]
    assert list(federation.push(other, federation.honest, federation.honest).objects_to_push) == []


@pytest.mark.parametrize("days", [-1, 1])
def test_a_node_whose_clock_is_a_day_off_is_refused_until_it_is_right(
    federation: Federation, days: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    """A signature of the time holds for five minutes: none of a day ago, or that is good tomorrow only."""
    signing: Any = importlib.import_module("flwr.supernode.node_auth_http_interceptor")
    watch, real = Watch(tmp_path / "alive"), signing.now
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(signing, "now", lambda: real() + days * DAY)
        with pytest.raises(httpx.HTTPStatusError) as refused:
            federation.pull(federation.honest, federation.honest)
        watch.note_answer(POLL, refused.value.response.status_code)
    assert [record.message for record in caplog.records] == [supernode.REFUSED]
    assert "clocks" in supernode.REFUSED
    assert federation.pull(federation.honest, federation.honest) == []
