"""A user of a node's host gets none of its work and reads no secret, in `/proc` or elsewhere."""

import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client import fork_server
from client.supernode import VARIABLE, hide_tokens
from tests.engine.test_supernode import SuperLink, free_port, superlink, wait_for

__all__ = ["superlink"]


def test_the_process_of_a_task_gets_its_token_from_a_file_that_no_other_user_can_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    token, got = secrets.token_hex(128), tmp_path / "got"
    command = tmp_path / "flwr-clientapp"
    command.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "from flwr.common.args import try_obtain_flwr_app_token\n"
        "from flwr.supernode.cli.flwr_clientapp import _parse_args_run_flwr_clientapp\n"
        "arguments = _parse_args_run_flwr_clientapp().parse_args()\n"
        "mode = oct(os.stat(arguments.token_file).st_mode & 0o777)\n"
        f"open({str(got)!r} + '.part', 'w').write(' '.join([try_obtain_flwr_app_token(arguments), mode, *sys.argv]))\n"
        f"os.rename({str(got)!r} + '.part', {str(got)!r})\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess)  # is put back
    hide_tokens()
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    spec = ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", token, True, None, False, None, False, 7)
    subprocess_executor.SubprocessExecutor().launch(spec)
    assert started[0].wait(timeout=120) == 0
    told, mode, *line = got.read_text().split()
    assert (told, mode) == (token, "0o600")
    assert line[1:] == ["--runtime-api-address", "127.0.0.1:1", "--token-file", line[4], "--insecure"]
    assert line[4].startswith("/dev/fd/")


@pytest.fixture
def node(superlink: SuperLink, tmp_path: Path) -> Iterator[Callable[[list[str]], int]]:
    """Starts a SuperNode with a command; the port of its Runtime API."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> int:
        port = free_port()
        options = ["--insecure", f"--superlink={superlink.address}", f"--port={port}"]
        flower = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **flower, "PATH": path, VARIABLE: str(tmp_path / "alive")}
        process = subprocess.Popen([*command, *options], env=environment, start_new_session=True)
        processes.append(process)
        wait_for(lambda: superlink.asked.get("/v1/fleet/pull-messages", 0) > 0, process)
        return port

    yield start
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asks_for_work(port: int) -> int:
    """The status that somebody gets who asks a node for its work, as its executor does."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/runtime/acquire-task", b"", {"content-type": "application/protobuf"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def children(of: int) -> list[str]:
    """The command lines of a process's descendants."""
    found, parents = [], {of}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                parents.add(int(path.name))
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.run
@pytest.mark.parametrize(("own", "status"), [(False, 200), (True, 401)])
def test_a_node_hands_its_work_to_its_own_executor_only(
    node: Callable[[list[str]], int], own: bool, status: int
) -> None:
    """Flower's own hands it to anybody: once it does not, :func:`client.supernode.closed` can go."""
    flowers = [str(Path(sys.executable).with_name("flower-supernode"))]
    assert asks_for_work(node(fork_server.watched_command(flowers) if own else flowers)) == status
    executors = [line for line in children(os.getpid()) if "--runtime-api-address" in line]
    assert len(executors) == 1
    assert ("--superexec-auth-secret-file /dev/fd/" in executors[0]) is own
