"""Replies are handed on as they come; what cannot be read, or does not come, costs only itself."""

from collections.abc import Iterable, Iterator

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from server.network import grid as network_grid
from server.network.grid import AT_ONCE, exchange_messages


class Letters:
    """A grid whose replies come in waves, and some of which make whoever fetches them raise."""

    pull_interval = 0.01

    def __init__(self, waves: Iterable[Iterable[int]], unreadable: Iterable[int] = ()) -> None:
        self.waves = [set(wave) for wave in waves]
        self.unreadable = set(unreadable)
        self.most = 0
        self.there: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterator[str]:
        self.messages = {}
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            self.messages[str(number)] = message
            yield str(number)

    def pull_messages(self, identifiers: Iterable[str]) -> list[Message]:
        names = list(identifiers)
        if "0" in names or not self.there:
            for number in self.waves.pop(0) if self.waves else ():
                self.there[str(number)] = Message(RecordDict(), reply_to=self.messages[str(number)])
        wanted = [name for name in names if name in self.there]
        if any(int(name) in self.unreadable for name in wanted):
            recorddict_from_proto(ProtoRecordDict.FromString(b"\xff\xff"))  # as bytes that are no message do
        self.most = max(self.most, len(wanted))
        return [self.there.pop(name) for name in wanted]


def sent(count: int) -> list[Message]:
    return [Message(RecordDict(), node, MessageType.TRAIN) for node in range(1, count + 1)]


def numbers(replies: Iterable[Message]) -> list[int]:
    return [int(reply.metadata.reply_to_message_id) for reply in replies]


def test_messages_are_sent_at_once_and_replies_fetched_in_small_portions() -> None:
    grid, messages = Letters([range(40)]), sent(40)
    replies = exchange_messages(grid, messages, 5.0)  # type: ignore[arg-type]
    assert [message.metadata.message_id for message in messages] == [str(number) for number in range(40)]
    assert sorted(numbers(replies)) == list(range(40))
    assert grid.most == AT_ONCE


def test_replies_come_when_they_are_there_and_late_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    grid = Letters([[1], [], [0]])
    assert numbers(exchange_messages(grid, sent(3), 0.2)) == [1, 0]  # type: ignore[arg-type]
    assert "is not waited for" in caplog.text


def test_nothing_sent_is_nothing_received() -> None:
    assert list(exchange_messages(Letters([]), [], 5.0)) == []  # type: ignore[arg-type]


def test_bytes_that_are_no_message_cost_only_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """Flower raises DecodeError out of the request that fetches them, for whoever else it fetches."""
    grid = Letters([range(20)], unreadable=[3, 17])
    assert sorted(numbers(exchange_messages(grid, sent(20), 5.0))) == [n for n in range(20) if n not in (3, 17)]  # type: ignore[arg-type]
    assert caplog.text.count("could not be read by Flower (DecodeError)") == 2


def test_a_superlink_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Letters([[0]])
    for gone in (ConnectionError("gone"), network_grid.httpx.ConnectError("gone")):

        def fail(identifiers: Iterable[str], gone: Exception = gone) -> list[Message]:
            raise gone

        monkeypatch.setattr(grid, "pull_messages", fail)
        with pytest.raises(type(gone)):
            list(exchange_messages(grid, sent(1), 5.0))  # type: ignore[arg-type]
