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

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

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
