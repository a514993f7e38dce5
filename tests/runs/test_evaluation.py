"""Metrics over workers are those over the whole split, or there are none."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from server.evaluation.metrics import Evaluate, on_workers
from strategies.messages.client_update import EvaluateRequest, ShardMetrics
from strategies.messages.dispatch import RoundFailed

ADAPTER = torch.linspace(0, 1, 5)
SPLITS = {"validation": (30, 100), "test": (0, 41)}
LOSSES = np.sqrt(np.arange(100.0))
CORRECT = np.arange(100) % 3 == 0


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@dataclass
class Workers:
    """Stands where Flower's grid stands; workers know the loss of every record."""

    ids: Iterable[int] = (3, 1, 2)
    reply: Callable[[Message, EvaluateRequest], Message | None] | None = None
    backwards: bool = False
    requests: list[tuple[int, EvaluateRequest]] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return list(self.ids)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        self.replies: dict[str, Message] = {}
        identifiers = []
        for number, message in enumerate(messages):
            identifiers.append(str(number))
            message.metadata.__dict__["_message_id"] = str(number)
            request = EvaluateRequest.from_records(message.content)
            self.requests.append((message.metadata.dst_node_id, request))
            reply = (self.reply or honest)(message, request)
            if reply is not None:
                self.replies[str(number)] = reply
        return identifiers

    def pull_messages(self, identifiers: Iterable[str]) -> list[Message]:
        replies = [self.replies.pop(name) for name in identifiers if name in self.replies]
        return replies[::-1] if self.backwards else replies

    def evaluate(self, nodes: int = 3) -> Evaluate:
        return on_workers(self, nodes, "{}", SPLITS, 0.05)  # type: ignore[arg-type]


def honest(message: Message, request: EvaluateRequest) -> Message:
    part = slice(request.start, request.stop)
    right = CORRECT[part].astype(bool)
    pairs = np.array([[right.sum(), (~right).sum()], [0, 0]])
    shard = ShardMetrics(float(LOSSES[part].mean()), float(CORRECT[part].mean()), request.stop - request.start, pairs)
    return Message(shard.to_records(), reply_to=message)


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_metrics_are_those_of_the_whole_split(split: str, nodes: int) -> None:
    workers = Workers()
    start, stop = SPLITS[split]
    metrics = workers.evaluate(nodes)(ADAPTER, split)
    assert metrics.count == stop - start
    assert metrics.loss == pytest.approx(LOSSES[start:stop].mean(), rel=1e-12)
    assert metrics.accuracy == pytest.approx(CORRECT[start:stop].mean(), rel=1e-12)
    right = int(CORRECT[start:stop].sum())
    assert metrics.confusion == ((right, stop - start - right), (0, 0))
    assert [node for node, _ in workers.requests] == [1, 2, 3][:nodes]
    covered = [i for _, request in workers.requests for i in range(request.start, request.stop)]
    assert covered == list(range(start, stop))
    for _, request in workers.requests:
        assert request.split == split
        np.testing.assert_array_equal(request.adapter, ADAPTER.numpy())


def test_fewer_workers_than_at_the_start_still_evaluate_every_record() -> None:
    workers = Workers(ids=[5])
    assert workers.evaluate(4)(ADAPTER, "validation").count == 70


def test_more_workers_than_records_get_no_empty_share() -> None:
    workers = Workers(ids=range(60))
    assert workers.evaluate(60)(ADAPTER, "test").count == 41
    assert len(workers.requests) == 41


def test_the_order_of_replies_changes_no_bit() -> None:
    forth, back = (Workers(range(9), backwards=b).evaluate(9)(ADAPTER, "validation") for b in (False, True))
    assert (forth.loss, forth.accuracy) == (back.loss, back.accuracy)


def test_no_worker_is_an_error() -> None:
    with pytest.raises(RoundFailed, match="no worker"):
        Workers(ids=[]).evaluate()(ADAPTER, "test")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("silent", "evaluation on test: 2 of 3 workers answered"),
        ("error", "2 of 3 workers answered; the first error: its code could not be loaded"),
        ("fewer", "evaluation on test: 29 of 41 records"),
    ],
)
def test_a_part_that_is_missing_is_an_error(kind: str, words: str) -> None:
    def reply(message: Message, request: EvaluateRequest) -> Message | None:
        if request.start:
            return honest(message, request)
        if kind == "silent":
            return None
        if kind == "error":
            return Message(Error(1, "it broke"), reply_to=message)
        return Message(ShardMetrics(0.5, 0.5, 1).to_records(), reply_to=message)

    with pytest.raises(RoundFailed, match=words):
        Workers(reply=reply).evaluate()(ADAPTER, "test")


def test_a_reply_that_is_none_is_refused() -> None:
    with pytest.raises(RoundFailed, match=r"0 of 3 workers .*evaluation reply"):
        Workers(reply=lambda message, _: Message(RecordDict(), reply_to=message)).evaluate()(ADAPTER, "test")
