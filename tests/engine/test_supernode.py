"""A SuperNode that its server no longer answers ends; Flower's own would stay, call itself healthy and do nothing."""

import importlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import FleetHttpClient

from client import fork_server, supernode
from client.supernode import BEAT, GONE, POLL, Completing, Watch, in_step, watch_server


class SuperLink(ThreadingHTTPServer):
    """Answers as Flower's does; what it answers to a poll can be changed. `asked` counts calls by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: dict[str, int] = {}
        self.polls = 200
        self.activations: list[int] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


ACTIVATE = "/v1/fleet/activate-node"
MESSAGES: dict[str, Any] = {
    POLL: PullMessagesResponse(),
    BEAT: SendNodeHeartbeatResponse(success=True),
    ACTIVATE: ActivateNodeResponse(node_id=7),
}


class Answer(BaseHTTPRequestHandler):
    server: SuperLink

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked[self.path] = self.server.asked.get(self.path, 0) + 1
        code = self.server.polls if self.path == POLL else 200
        if self.path == ACTIVATE and self.server.activations:
            code = self.server.activations.pop(0)
        body = MESSAGES[self.path].SerializeToString() if self.path in MESSAGES else b""
        self.send_response(code)
        self.send_header("content-type", "application/protobuf")
        self.send_header("content-length", str(len(body) if code == 200 else 0))
        self.end_headers()
        if code == 200:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def superlink() -> Iterator[SuperLink]:
    with SuperLink() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: Any, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_it_outlives_a_locked_database_and_ends_when_flower_gives_up_its_connection(
    superlink: SuperLink, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    process = subprocess.Popen(
        [
            *fork_server.watched_command(["/usr/bin/flower-supernode"]),
            *("--insecure", "--superlink", superlink.address, "--port", str(free_port())),
        ],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(tmp_path),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            supernode.VARIABLE: str(alive),
        },
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        wait_for(lambda: superlink.asked.get(POLL, 0) > 1 and superlink.asked.get(BEAT, 0) > 0, process)
        assert alive.exists()  # touched at a poll that was answered
        superlink.polls = 500  # "database is locked"
        asked = superlink.asked[POLL]
        wait_for(lambda: superlink.asked[POLL] > asked + 2, process)
        superlink.polls = 200
        alive.unlink()
        wait_for(alive.exists, process)
        superlink.polls = 404
        assert process.wait(timeout=120) == GONE
        assert process.stderr is not None
        assert b"Flower has given up its connection" in process.stderr.read()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)


@pytest.mark.parametrize(("error", "passes"), [(500, True), (404, False)])
def test_a_heartbeat_that_meets_a_locked_database_is_sent_again(error: int, passes: bool) -> None:
    """Flower's own ends its thread, and the node is offline from then on."""
    answer = httpx.Response(error, request=httpx.Request("POST", "https://gateway" + BEAT))
    beats = [answer, None]

    def beat() -> bool:
        if answered := beats.pop(0):
            answered.raise_for_status()
        return True

    flower = SimpleNamespace(
        make_simple_http_retry_invoker=None, HeartbeatSender=lambda beat: beat, FleetHttpClient=FleetHttpClient
    )
    supernode.patient(flower)
    assert issubclass(flower.FleetHttpClient, Completing)
    send = flower.HeartbeatSender(beat)
    if passes:
        assert (send(), send()) == (False, True)
    else:
        with pytest.raises(httpx.HTTPStatusError):
            send()


@pytest.mark.parametrize(
    ("answers", "asked", "activated"), [([412, 412], 3, True), ([412] * 9, 4, False), ([401], 1, False)]
)
def test_a_node_that_is_restarted_waits_until_it_is_taken_in_again(
    superlink: SuperLink,
    answers: list[int],
    asked: int,
    activated: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Flower's own ends, for as long as the SuperLink counts the process before as connected."""
    flower = SimpleNamespace(make_simple_http_retry_invoker=None, HeartbeatSender=None, FleetHttpClient=FleetHttpClient)
    supernode.patient(flower)
    now = [0.0]
    monkeypatch.setattr(supernode, "RETURN", 7.0)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(supernode, "time", clock)
    superlink.activations = answers
    client = flower.FleetHttpClient.from_server_address(superlink.address, True, None, [])
    try:
        assert client.ActivateNode(ActivateNodeRequest()).node_id == 7
    except httpx.HTTPStatusError:
        assert not activated
    else:
        assert activated
    assert superlink.asked[ACTIVATE] == asked
    assert caplog.text.count("counts as connected for a minute") == asked - 1


def test_only_a_supernode_is_watched() -> None:
    assert fork_server.watched_command(["/opt/bin/flower-supernode", "--x"])[1:] == ["-m", "client.supernode", "--x"]
    assert fork_server.watched_command(["sleep", "5"]) == ["sleep", "5"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(tmp_path: Path) -> tuple[Watch, Clock, Path]:
    clock = Clock()
    return Watch(tmp_path / "alive", limit=100.0, clock=clock), clock, tmp_path / "alive"


def test_a_node_without_work_shows_polls_and_heartbeats(watch: tuple[Watch, Clock, Path]) -> None:
    seen, clock, alive = watch
    for second in range(0, 300, 30):
        clock.now = second
        seen.note_answer(BEAT, 200)
        seen.note_answer(POLL, 200 if second < 100 else 503)
        assert seen.overdue() == ("" if second <= 190 else "no request for messages was answered for 100 s")
    assert alive.exists()
    clock.now = 400
    seen.note_answer(POLL, 200)
    assert seen.overdue() == "no heartbeat was answered for 100 s"
    seen.note_answer(BEAT, 200)
    assert seen.overdue() == ""


def test_a_node_that_works_shows_heartbeats(watch: tuple[Watch, Clock, Path]) -> None:
    seen, clock, alive = watch
    for path in (POLL, "/v1/fleet/pull-object", "/v1/fleet/confirm-message-received"):
        seen.note_answer(path, 200)
    alive.unlink()
    for second in range(0, 900, 30):
        clock.now = second
        seen.note_answer(BEAT, 200)
        seen.note_answer("/v1/runtime/anything", 200)
        assert seen.overdue() == ""
    assert alive.exists()
    clock.now = 1001
    assert seen.overdue() == "no heartbeat was answered for 100 s"


def test_a_key_that_is_not_taken_is_said_once(
    watch: tuple[Watch, Clock, Path], caplog: pytest.LogCaptureFixture
) -> None:
    seen, _, alive = watch
    for _ in range(3):
        seen.note_answer("/v1/fleet/activate-node", 401)
    assert [record.message for record in caplog.records] == [supernode.REFUSED]
    assert not alive.exists()


def test_what_httpx_logs_is_what_is_read(superlink: SuperLink, watch: tuple[Watch, Clock, Path]) -> None:
    seen, clock, alive = watch
    calls = supernode.logging.getLogger("httpx")
    calls.addHandler(seen)
    level = calls.level
    calls.setLevel(supernode.logging.INFO)
    try:
        clock.now = 200
        httpx.post(f"http://{superlink.address}{BEAT}", content=b"")
        assert not alive.exists()
        assert seen.overdue() == "no request for messages was answered for 100 s"
        httpx.post(f"http://{superlink.address}{POLL}?x", content=b"")
        assert seen.overdue() == ""
        assert alive.exists()
    finally:
        calls.removeHandler(seen)
        calls.setLevel(level)


def test_the_end_comes_when_something_is_overdue(watch: tuple[Watch, Clock, Path]) -> None:
    seen, clock, _ = watch
    reasons: list[str] = []
    thread = watch_server(seen, reasons.append, every=0.01)
    assert reasons == []
    clock.now = 500
    thread.join(timeout=60)
    assert reasons == ["no heartbeat was answered for 100 s"]


def test_the_health_check_asks_when_the_server_last_answered(tmp_path: Path) -> None:
    def health() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "client.supernode", "--healthy"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, supernode.VARIABLE: str(tmp_path / "alive")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    assert health() == (1, "the server has not answered since this process was started\n")
    (tmp_path / "alive").touch()
    assert health() == (0, "")
    for off in (-2 * supernode.HEALTHY, 86400.0):  # the server is silent; the clock was put back by a day
        os.utime(tmp_path / "alive", (0, time.time() + off))
        assert health()[0] == 1


class State:
    """Of a SuperNode: every reading finds what is next."""

    def __init__(self, *replies: SimpleNamespace) -> None:
        self.replies = list(replies)

    def get_messages_legacy(self, is_reply: bool) -> list[SimpleNamespace]:
        assert is_reply
        assert self.replies, "nobody is going to answer"
        return [self.replies.pop(0)]

    def get_message_processing_duration(self, message_id: str) -> float:
        return 0.0

    def delete_messages(self, message_ids: list[str]) -> None:
        return None


def told(run: int, name: str, to: str = "") -> SimpleNamespace:
    metadata = {"run_id": run, "message_id": name, "reply_to_message_id": to, "group_id": "", "message_type": "train"}
    return SimpleNamespace(metadata=SimpleNamespace(**metadata))


@pytest.mark.parametrize("left_over", [True, False])
def test_a_reply_to_a_run_that_was_stopped_does_not_take_the_place_of_the_next(left_over: bool) -> None:
    """Flower's own sending; its receiving stores a message and says which run it is of."""
    flower = importlib.import_module("flwr.supernode.start_client_internal")
    ours = SimpleNamespace(
        _pull_and_store_message=lambda receive: receive()[0].metadata.run_id, _push_messages=flower._push_messages
    )
    in_step(ours)
    state = State(*([told(1, "late", "stopped")] if left_over else []), told(2, "reply", "asked"))
    sent: list[str] = []

    def send(message: SimpleNamespace, tree: Any, seconds: float) -> tuple[set[str], str]:
        sent.append(message.metadata.message_id)
        if message.metadata.run_id == 1:
            raise RunNotRunningException
        return set(), ""

    trees = SimpleNamespace(get_object_tree=lambda name: ObjectTree(), delete=lambda name: None)
    assert ours._pull_and_store_message(receive=lambda: (told(2, "asked"), None)) == 2
    ours._push_messages(state=state, object_store=trees, send=send, push_object=lambda *parts: None)
    assert sent == (["late"] if left_over else []) + ["reply"]


def test_flowers_loop_takes_what_is_put_in_the_place_of_its_steps() -> None:
    flower = importlib.import_module("flwr.supernode.start_client_internal")
    names = flower.start_client_internal.__code__.co_names
    assert {"_pull_and_store_message", "_push_messages"} <= set(names)
