"""A deployment without containers: Flower's SuperLink and SuperNodes with TLS and keys, and the `lacquer` command."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supernode.fleet_http_connection import http_request_response

from client.supernode import GONE
from privacy.ledger.ledger import Ledger
from server.run_folder.names import FLOWER_RUN_FILE
from server.run_folder.round_record import Presence
from server.run_folder.telemetry import read_metrics, read_status
from simulations.engines.inprocess import identity
from simulations.tools.sample_records import write_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
PATIENCE = 600.0
SETTINGS = """
rounds = 4
clients = 2
sampling-rate = 1.0
output = "runs"
[privacy]
delta = 1e-2
[strategy]
controller = "fixed"
[model]
name = "random:bert"
rank = 2
max-length = 32
[data]
held-by = "nodes"
validation-records = 20
test-records = 20
cache = "cache"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """A SuperLink, clients `a` and `b` with records of their own, and `insider`, who has been let in too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.port = folder, folder / "keys", free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "LACQUER_SUPERLINK": f"127.0.0.1:{self.port}",
            "LACQUER_CA": str(self.keys / "superlink" / "ca.crt"),
            "LACQUER_SIGNING_KEY": str(self.keys / "superlink" / "signing.key"),
            "LACQUER_CLIENT_KEYS": str(self.keys / "superlink" / "clients"),
            "LACQUER_CLIENT_NAMES": str(folder / "clients.json"),
        }
        (folder / "run.toml").write_text(SETTINGS)
        names = [option for name in ("a", "b", "insider") for option in ("--client", name)]
        assert self.lacquer("certificates", str(self.keys), *names).returncode == 0
        self.records = dict(zip("ab", write_records(folder / "data", 2, 16), strict=True))

    def start(self, name: str, *command: str) -> None:
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, "FLWR_HOME": str(self.folder / f"home-{name}")},
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / f"{name}.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def superlink(self) -> None:
        keys = self.keys / "superlink"
        self.start(
            "superlink",
            *("flower-superlink", f"--ssl-ca-certfile={keys}/ca.crt", f"--ssl-certfile={keys}/server.crt"),
            *(f"--ssl-keyfile={keys}/server.key", "--enable-supernode-auth", "--host=127.0.0.1"),
            *(f"--port={self.port}", f"--database={self.folder}/state.db"),
        )

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        self.until(answers)

    def node(self, name: str) -> None:
        keys, own = self.keys / name, self.folder / f"own-{name}"
        settings = f'data="jsonl:{self.records[name]}" cache="{own}" authority="{keys}/ca.crt"'
        self.start(
            name,
            *(sys.executable, "-m", "client.fork_server", "flower-supernode", f"--superlink=127.0.0.1:{self.port}"),
            *(f"--root-certificates={keys}/ca.crt", f"--auth-supernode-private-key={keys}/key"),
            *(f"--port={free_port()}", f"--node-config={settings}"),
        )

    def lacquer(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [BIN / "lacquer", *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def clients(self) -> dict[str, dict[str, str]]:
        return {one["name"]: one for one in json.loads(self.lacquer("clients", "--json").stdout or "[]")}

    def online(self, *names: str) -> bool:
        return {name for name, one in self.clients().items() if one["status"] == "online"} == set(names)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(1.0)

    @property
    def run(self) -> Path:
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def charges(self) -> int:
        with Ledger.open(self.run / "ledger.jsonl", read_only=True) as ledger:
            return len(ledger.charges)

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            time.sleep(3.0)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    try:
        made.superlink()
        assert made.lacquer("admit").returncode == 0
        made.node("a")
        made.node("b")
        made.until(lambda: made.online("a", "b"))
        yield made
    finally:
        made.end()


def push_in_the_servers_name(deployment: Deployment, victim: int, run: int) -> None:
    """What Flower lets a registered node do: a train message to another node, from the SuperLink."""
    key: Any = load_ssh_private_key((deployment.keys / "insider" / "key").read_bytes(), None)
    ca = str(deployment.keys / "insider" / "ca.crt")
    with http_request_response(f"127.0.0.1:{deployment.port}", False, ca, (key, key.public_key())) as connection:
        send, push_object = connection[2], connection[6]
        with identity(1):
            forged = Message(RecordDict({"config": ConfigRecord({"round": 1})}), victim, "train")
        forged.metadata.__dict__["_run_id"] = run
        forged.metadata.__dict__["_message_id"] = forged.object_id
        wanted, session = send(forged, get_object_tree(forged), 1.0)
        assert wanted  # it is stored
        for name, item in get_all_nested_objects(forged).items():
            if name in wanted:
                push_object(run, session, name, item.deflate())


def test_a_run_is_instructed_by_its_server_alone_and_stopped_and_resumed_with_its_nodes(
    deployment: Deployment,
) -> None:
    deployment.start("deploy", str(BIN / "lacquer"), "deploy", "run.toml")
    deployment.until(lambda: (deployment.folder / "runs").is_dir() and bool(read_metrics(deployment.run)))
    run = int(json.loads((deployment.run / FLOWER_RUN_FILE).read_text())["run"])
    push_in_the_servers_name(deployment, int(deployment.clients()["a"]["node"]), run)
    deployment.until(lambda: "bears no signature of the server" in deployment.log("a"))
    deployment.until(lambda: len(read_metrics(deployment.run)) > 2)

    stopped = deployment.lacquer("stop", str(deployment.run))
    assert stopped.returncode == 0, stopped.stderr
    assert deployment.processes["deploy"].wait(timeout=300) == 1
    deployment.processes["b"].terminate()
    deployment.until(lambda: deployment.online("a"))
    spent = deployment.charges()
    deployment.start("resume", str(BIN / "lacquer"), "deploy", "--resume", str(deployment.run))
    deployment.until(lambda: "1 of 2 nodes are connected" in getattr(read_status(deployment.run), "message", ""))
    twice = deployment.lacquer("deploy", "--resume", str(deployment.run))
    assert twice.returncode == 2
    assert "still running" in twice.stderr or "has a run of this folder that is running" in twice.stderr
    assert deployment.charges() == spent
    deployment.node("b")
    assert deployment.processes["resume"].wait(timeout=900) == 0, deployment.log("resume")

    records = read_metrics(deployment.run)
    assert [record.round for record in records] == [0, 1, 2, 3, 4]
    assert records[-1].presence == Presence(2, 2)
    assert "2 of 2 connected" in deployment.log("resume")
    assert deployment.lacquer("logs", str(deployment.run)).returncode == 0
    assert deployment.lacquer("follow", str(deployment.run)).returncode == 0
    refused = deployment.lacquer("stop", str(deployment.run))
    assert (refused.returncode, "nothing to stop" in refused.stderr) == (2, True)


@pytest.mark.nightly  # the container test stops the line for as long
def test_clients_outlive_a_server_that_stands_still(deployment: Deployment) -> None:
    """Flower 1.41 gives up after a handshake that timed out, and stays as a process that does nothing."""
    group = deployment.processes["superlink"].pid
    os.killpg(group, signal.SIGSTOP)
    time.sleep(75.0)
    os.killpg(group, signal.SIGCONT)
    ended = [name for name in "ab" if deployment.processes[name].poll() is not None]
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and len(ended) < 2:
        ended = [name for name in "ab" if deployment.processes[name].poll() is not None]
        time.sleep(1.0)
    for name in ended:  # as the restart policy of a container does
        assert deployment.processes[name].returncode == GONE
        deployment.node(name)
    deployment.until(lambda: deployment.online("a", "b"))
