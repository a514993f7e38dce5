"""A deployment without containers: Flower's SuperLink and SuperNodes with TLS and keys, and the `lacquer` command."""

import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from client.supernode import GONE
from server.config.schema import RunConfig
from server.network.operator_key import access_token
from server.run_folder.names import FLOWER_RUN_FILE, PRIVACY_FILE
from server.run_folder.round_record import Presence
from server.run_folder.telemetry import read_metrics, read_status
from simulations.cli.federation.following import SPEAKS
from simulations.engines.inprocess import identity
from simulations.tools.sample_records import write_records
from tests.cases.deployed import deployed_settings
from tests.cases.disk import AS_ROOT, Disk, fill
from tests.end_to_end.deployment import BIN, CommandLines, Deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SETTINGS = deployed_settings(clients=2, privacy="delta = 1e-2", rounds="4", cache="cache")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    records = dict(zip("ab", write_records(tmp_path / "data", 2, 16), strict=True))
    made = Deployment(tmp_path, SETTINGS, records)
    try:
        made.begin()
        yield made
    finally:
        made.end()


def push_in_the_servers_name(deployment: Deployment, victim: int, run: int) -> None:
    """What Flower's own SuperLink stores of a registered node: a train message to another node, from the SuperLink."""
    key: Any = load_ssh_private_key((deployment.keys / "insider" / "key").read_bytes(), None)
    ca = str(deployment.keys / "insider" / "ca.crt")
    with http_request_response(f"127.0.0.1:{deployment.port}", False, ca, (key, key.public_key())) as connection:
        send = connection[2]
        with identity(1):
            forged = Message(RecordDict({"config": ConfigRecord({"round": 1})}), victim, "train")
        forged.metadata.__dict__["_run_id"] = run
        forged.metadata.__dict__["_message_id"] = forged.object_id
        send(forged, get_object_tree(forged), 1.0)


def no_other_user_reads_a_secret(deployment: Deployment, lines: set[str]) -> None:
    """On a command line or in a file."""
    for what in ("server.network.patience", "client.supernode --executor", "flwr-serverapp", "flwr-clientapp"):
        assert any(what in line for line in lines), what
    assert [line for line in lines if "--token " in line or re.search("[0-9a-f]{64}", line)] == []
    key = (deployment.keys / "executor" / "operator.key").read_bytes()
    secrets = (b"PRIVATE KEY", key, access_token(key).encode())
    open_files = [path for path in deployment.folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert [path for path in open_files if any(secret in path.read_bytes() for secret in secrets)] == []
    assert deployment.folder / "state.db" not in open_files  # the tokens of tasks are in it


def test_a_run_is_instructed_by_its_server_alone_and_stopped_and_resumed_with_its_nodes(
    deployment: Deployment,
) -> None:
    lines = CommandLines()
    lines.start()
    deployment.start("deploy", str(BIN / "lacquer"), "deploy", "run.toml")
    deployment.until(lambda: (deployment.folder / "runs").is_dir() and bool(read_metrics(deployment.run)))
    run = int(json.loads((deployment.run / FLOWER_RUN_FILE).read_text())["run"])
    with pytest.raises(RunNotRunningException):  # what Flower's client makes of the SuperLink's refusal, HTTP 403
        push_in_the_servers_name(deployment, int(deployment.clients()["a"]["node"]), run)
    deployment.until(lambda: len(read_metrics(deployment.run)) > 2)

    lines.stopped.set()
    lines.join()
    no_other_user_reads_a_secret(deployment, lines.seen)

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

    first = deployment.run
    later = deployment.lacquer("deploy", "run.toml", "--from", str(first), "--set", "rounds=1", "--quiet")
    assert later.returncode == 0, later.stderr
    (told,) = json.loads((Path(later.stdout.strip()) / PRIVACY_FILE).read_text())["together"]
    assert told["runs"] == [first.name.partition("-")[0], "this run's"]
    assert told["epsilon"] > json.loads((first / PRIVACY_FILE).read_text())["epsilon"]


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


@pytest.mark.nightly  # four minutes; the soak test in containers has faults of other kinds
@AS_ROOT
def test_a_run_outlives_a_paused_client_a_locked_database_and_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    """Nothing that is charged is lost, and behind every fault both clients take part again."""
    records = dict(zip("ab", write_records(tmp_path / "data", 2, 16), strict=True))
    place = disk(64_000)
    settings = SETTINGS.replace("rounds = 4", "rounds = 1000") + "[engine]\nround-timeout = 120.0\n"
    deployment = Deployment(tmp_path, settings, records, place / "state.db")

    def rounds_with_all(after: int) -> bool:
        found = read_metrics(deployment.run) if (tmp_path / "runs").is_dir() else []
        assert deployment.processes["deploy"].poll() is None, deployment.log("deploy")
        return len([record for record in found if record.round > after and record.presence == Presence(2, 2)]) > 1

    def done() -> int:
        return max(record.round for record in read_metrics(deployment.run))

    try:
        deployment.begin()
        deployment.start("deploy", str(BIN / "lacquer"), "deploy", "run.toml")
        deployment.until(lambda: rounds_with_all(0))

        os.killpg(deployment.processes["a"].pid, signal.SIGSTOP)
        time.sleep(75.0)
        os.killpg(deployment.processes["a"].pid, signal.SIGCONT)
        at = done()
        deployment.until(lambda: rounds_with_all(at))

        with closing(sqlite3.connect(deployment.database, isolation_level=None)) as other:
            other.execute("PRAGMA busy_timeout = 20000")
            other.execute("BEGIN IMMEDIATE")
            time.sleep(25.0)
            other.execute("ROLLBACK")
        at = done()
        deployment.until(lambda: rounds_with_all(at))

        fill(place)
        time.sleep(25.0)
        (place / "filler").unlink()
        at = done()
        deployment.until(lambda: rounds_with_all(at))

        assert deployment.lacquer("stop", str(deployment.run)).returncode == 0
        deployment.processes["deploy"].wait(timeout=300)
        released = [record.round for record in read_metrics(deployment.run) if record.phase == "round"]
        assert released == list(range(1, len(released) + 1))
        assert deployment.charges() - len(released) <= 1, "but the round that was stopped"
    finally:
        deployment.end()


@pytest.mark.nightly  # the container test kills executor and SuperLink as well, and asks only that the run resumes
def test_the_death_of_the_serverapp_and_of_the_superlink_is_said_long_before_the_round_ends(tmp_path: Path) -> None:
    """Who follows the run hears of it; the run is resumed with all its rounds, none of them charged twice."""
    records = dict(zip("ab", write_records(tmp_path / "data", 2, 16), strict=True))
    deployment = Deployment(tmp_path, SETTINGS.replace("rounds = 4", "rounds = 12"), records)

    def seconds_until_said(process: str, told: str) -> float:
        since = time.monotonic()
        deployment.until(lambda: told in deployment.log(process))
        return time.monotonic() - since

    try:
        deployment.begin()
        deployment.start("deploy", str(BIN / "lacquer"), "deploy", "run.toml")
        deployment.until(lambda: (tmp_path / "runs").is_dir() and bool(read_metrics(deployment.run)))
        executor = psutil.Process(deployment.processes["executor"].pid)
        servers = [one for one in executor.children(recursive=True) if "flwr-serverapp" in " ".join(one.cmdline())]
        assert servers
        for one in servers:
            one.kill()
        seconds = {"ServerApp": seconds_until_said("deploy", "has ended without a word")}
        assert deployment.processes["deploy"].wait(timeout=60) == 1

        at = len(read_metrics(deployment.run))
        deployment.start("resume", str(BIN / "lacquer"), "deploy", "--resume", str(deployment.run))
        deployment.until(lambda: len(read_metrics(deployment.run)) > at)
        assert "has ended without a word" not in deployment.log("resume"), "that was before"
        os.killpg(deployment.processes["superlink"].pid, signal.SIGKILL)
        seconds["SuperLink"] = seconds_until_said("resume", "the SuperLink does not answer")
        deployment.superlink()
        seconds_until_said("resume", SPEAKS)
        deployment.processes["resume"].wait(timeout=300)
        for name in "ab":
            if deployment.processes[name].poll() is not None:  # as the restart policy of a container does
                deployment.node(name)
        if read_status(deployment.run).state != "completed":  # type: ignore[union-attr]
            deployment.start("last", str(BIN / "lacquer"), "deploy", "--resume", str(deployment.run))
            assert deployment.processes["last"].wait(timeout=300) == 0, deployment.log("last")

        print(f"said after {seconds} s; docs/faults.md says 15")
        assert max(seconds.values()) < float(RunConfig().engine.round_timeout) / 60, seconds
        released = [record.round for record in read_metrics(deployment.run) if record.phase == "round"]
        assert released == sorted(set(released))
        assert deployment.charges() <= 12
    finally:
        deployment.end()
