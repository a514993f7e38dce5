"""A SuperLink that answers HTTP 500 for a while, as Flower's does when its database is locked, ends no run."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.superlink.grid.http_grid import HttpGrid

from client.supernode import VARIABLE, is_passing
from server.network.patience import RuntimeClient, make_patient

NODES = GetNodesResponse(nodes=[NodeInfo(node_id=7)]).SerializeToString()


class SuperLink(ThreadingHTTPServer):
    """Answers with these codes first, then with the list of one node, or with nothing to the executor."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.codes: list[int] = []
        self.asked = 0
        self.paths: set[str] = set()


class Answer(BaseHTTPRequestHandler):
    server: SuperLink

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked += 1
        self.server.paths.add(self.path)
        code = self.server.codes.pop(0) if self.server.codes else 200
        nodes = b"" if self.path.endswith("acquire-task") else NODES
        body = nodes if code == 200 else b"locked"
        self.send_response(code)
        self.send_header("content-type", "application/protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
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


@pytest.fixture
def grid(superlink: SuperLink) -> HttpGrid:
    made = HttpGrid(f"127.0.0.1:{superlink.server_address[1]}", insecure=True, token="x")
    made._retry_invoker.wait_function = lambda seconds: None
    return made


def test_flowers_own_grid_gives_up_at_once(grid: HttpGrid, superlink: SuperLink) -> None:
    """What the module is there for; once Flower repeats such a call itself, the module can go."""
    superlink.codes = [500]
    with pytest.raises(httpx.HTTPStatusError):
        grid.get_node_ids()


def test_a_call_is_repeated_until_it_is_answered(grid: HttpGrid, superlink: SuperLink) -> None:
    superlink.codes = [500, 503, 500, 500]
    assert make_patient(grid).get_node_ids() == [7]
    assert superlink.asked == 5
    assert isinstance(grid._client, RuntimeClient)


def test_a_failure_that_lasts_is_an_error(grid: HttpGrid, superlink: SuperLink, caplog: Any) -> None:
    times = iter([0.0, 0.0, 40.0, 80.0, 100.0])
    superlink.codes = [500] * 9
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        make_patient(grid, limit=100.0, clock=lambda: next(times)).get_node_ids()
    assert superlink.asked == 4
    assert "it is asked again for 100 s" in caplog.text


@pytest.mark.timeout(60)
def test_a_superlink_that_does_not_come_back_ends_the_run(grid: HttpGrid, superlink: SuperLink) -> None:
    """Flower's own grid asks for ever where it cannot connect, or a gateway answers in the SuperLink's place."""
    superlink.codes = [503] * 100_000
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        make_patient(grid, limit=0.3).get_node_ids()


def test_the_limit_begins_anew_with_every_answer(grid: HttpGrid, superlink: SuperLink) -> None:
    now = [0.0]
    held = make_patient(grid, limit=100.0, clock=lambda: now[0])
    for start in (0.0, 1000.0, 2000.0):
        now[0], superlink.codes = start, [500]
        assert held.get_node_ids() == [7]


def test_what_will_not_pass_is_left_to_flower(grid: HttpGrid, superlink: SuperLink) -> None:
    superlink.codes = [404]
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        make_patient(grid).get_node_ids()
    assert is_passing(httpx.ConnectError("_ssl.c:989: The handshake operation timed out"))
    assert not is_passing(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"))
    assert not is_passing(httpx.ConnectError("refused"))


def test_a_grid_in_this_process_is_as_it_was() -> None:
    other: Any = object()
    assert make_patient(other) is other


@pytest.mark.run
@pytest.mark.parametrize(
    ("command", "survives"), [(["flower-superexec"], False), (["-m", "server.network.patience"], True)]
)
def test_the_executor_outlives_a_locked_database(
    superlink: SuperLink, command: list[str], survives: bool, tmp_path: Path
) -> None:
    """And Flower's own does not: once it does, the module can go."""
    superlink.codes = [500, 500]
    options = ["--insecure", f"--runtime-api-address=127.0.0.1:{superlink.server_address[1]}"]
    python = Path(sys.executable)
    start = [str(python), *command] if survives else [str(python.with_name(command[0]))]
    alive = tmp_path / "alive"  # what its health check looks at
    with subprocess.Popen(
        [*start, *options],
        env={**os.environ, VARIABLE: str(alive)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as executor:
        ends = time.monotonic() + 60.0
        while executor.poll() is None and superlink.asked < 4 and time.monotonic() < ends:
            time.sleep(0.1)
        lives = executor.poll() is None
        executor.terminate()
        _, said = executor.communicate(timeout=30.0)
    assert lives == survives == alive.exists()
    assert superlink.paths == {"/v1/runtime/acquire-task"}
    assert ("it is asked again for 300 s" in said) == survives
