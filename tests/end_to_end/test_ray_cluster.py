"""A run on a Ray cluster that was there before it: two nodes on this host, which outlive the run."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from server.run_folder.telemetry import read_metrics, read_status
from simulations.engines.processes import TAG, Family
from tests.end_to_end.deployment import free_port
from tests.end_to_end.lacquer_process import TINY, Lacquer

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

LONGER = TINY.replace("rounds = 2", "rounds = 8").replace("clients = 60", "clients = 400")
RAY = Path(sys.executable).with_name("ray")


def raylets(cluster: Family) -> list[psutil.Process]:
    return [process for process in cluster.members() if process.name() == "raylet"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Family]]:
    """Two Ray nodes of one core each that ask for a token, ended by their ids."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    family, folder = Family(uuid.uuid4().hex), tempfile.mkdtemp(prefix="rc-", dir="/tmp")
    address = f"127.0.0.1:{free_port()}"
    here = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    here |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}
    here |= {TAG: family.tag, "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}

    def start(*arguments: str) -> None:
        command = [RAY, "start", *arguments, "--num-cpus", "1", "--object-store-memory", str(100 * 2**20)]
        command += ["--disable-usage-stats", "--include-log-monitor", "false"]
        subprocess.run(command, env=here, check=True, stdout=subprocess.DEVNULL, timeout=300)

    try:
        port = address.partition(":")[2]
        start(
            "--head",
            "--node-ip-address",
            "127.0.0.1",
            "--port",
            port,
            "--temp-dir",
            folder,
            "--include-dashboard=false",
        )
        start("--address", address, "--node-ip-address", "127.0.0.1")
        deadline = time.monotonic() + 120
        while len(raylets(family)) < 2:
            assert time.monotonic() < deadline, "the cluster does not start"
            time.sleep(0.5)
        yield address, family
    finally:
        assert family.stop() == []
        shutil.rmtree(folder, ignore_errors=True)


def busy(run: Lacquer, family: Family) -> list[int]:
    """Waits until round 1 is released and works on; process ids of the nodes that have workers of the run."""
    run.wait_for_round(1)
    return [process.ppid() for process in family.members() if "ray::ClientAppActor" in " ".join(process.cmdline())]


def test_a_node_that_is_lost_in_a_round_costs_nothing_but_its_worker(
    cluster: tuple[str, Family], tmp_path: Path
) -> None:
    address, family = cluster
    (tmp_path / "tiny.toml").write_text(LONGER + f'ray-address = "{address}"\n')
    run = Lacquer(tmp_path, "tiny.toml", "--quiet")
    try:
        assert len(set(busy(run, family))) == 2
        head, other = sorted(raylets(family), key=lambda process: process.create_time())
        other.kill()
        assert run.finish() == 0, run.stderr()
    finally:
        run.end()
    assert head.is_running()
    assert [record.round for record in read_metrics(run.run_folder) if record.phase == "round"] == list(range(1, 9))
    assert "another is started in its place" in (run.run_folder / "flower.log").read_text()


def test_the_loss_of_the_head_is_said_at_once_and_the_run_resumes(cluster: tuple[str, Family], tmp_path: Path) -> None:
    address, family = cluster
    (tmp_path / "tiny.toml").write_text(LONGER + f'ray-address = "{address}"\n')
    run = Lacquer(tmp_path, "tiny.toml", "--quiet")
    try:
        busy(run, family)
        (head,) = [process for process in family.members() if process.name() == "gcs_server"]
        head.kill()
        killed = time.monotonic()
        code = run.finish()
        waited = time.monotonic() - killed
    finally:
        run.end()
    assert code != 0
    assert f"the head of the Ray cluster at {address} no longer answers" in run.stderr()
    assert waited < 60, "Ray itself says it after a minute"
    again = Lacquer(tmp_path, str(run.run_folder), "--engine", "inprocess", command="resume")
    try:
        assert again.finish() == 0, again.stderr()
    finally:
        again.end()
    assert [record.round for record in read_metrics(run.run_folder) if record.phase == "round"] == list(range(1, 9))


def test_workers_are_on_both_nodes_and_the_cluster_outlives_the_run(
    cluster: tuple[str, Family], tmp_path: Path
) -> None:
    address, family = cluster
    (tmp_path / "tiny.toml").write_text(TINY + f'ray-address = "{address}"\n')
    run, hosts = Lacquer(tmp_path, "tiny.toml", "--quiet"), set()
    nodes = {process.pid for process in raylets(family)}
    try:
        while run.process.poll() is None:
            for process in family.members():
                try:
                    if "ray::ClientAppActor" in " ".join(process.cmdline()):
                        hosts.add(process.ppid())
                except psutil.Error:
                    continue
            time.sleep(0.5)
        assert run.finish() == 0, run.stderr()
    finally:
        run.end()
    folder = run.run_folder
    status = read_status(folder)
    assert status is not None
    assert status.state == "completed"
    assert [record.round for record in read_metrics(folder) if record.phase == "round"] == [1, 2]
    assert hosts == nodes
    assert list(folder.glob("lq-*")) == []
    assert {process.pid for process in raylets(family)} == nodes
