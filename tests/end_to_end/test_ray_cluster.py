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

import grpc
import psutil
import pytest
from ray.core.generated.gcs_service_pb2 import GetAllAvailableResourcesReply

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
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Family]]:
    """Ray nodes that ask for a token, ended by their ids: two of one core, or with what a test says of each."""
    head, *others = getattr(request, "param", ["--num-cpus=1"] * 2)
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    family, folder = Family(uuid.uuid4().hex), tempfile.mkdtemp(prefix="rc-", dir="/tmp")
    address = f"127.0.0.1:{free_port()}"
    here = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    here |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]}
    here |= {TAG: family.tag, "RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
    here |= {"RAY_raylet_start_wait_time_s": "120"}  # a busy host takes longer than the 30 s that Ray allows

    def start(*arguments: str) -> None:
        command = [RAY, "start", *arguments, "--object-store-memory", str(100 * 2**20)]
        command += ["--disable-usage-stats", "--include-log-monitor", "false"]
        subprocess.run(command, env=here, check=True, stdout=subprocess.DEVNULL, timeout=300)

    try:
        port = address.partition(":")[2]
        here_too = ["--node-ip-address", "127.0.0.1"]
        start("--head", *here_too, *head.split(), "--port", port, "--temp-dir", folder, "--include-dashboard=false")
        for other in others:
            start("--address", address, *here_too, *other.split())
        deadline = time.monotonic() + 120
        while len(raylets(family)) < 1 + len(others):
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


def free(address: str) -> dict[str, float]:
    """CPUs and GPUs of the cluster that nothing has set aside, as its head counts them."""
    question = "/ray.rpc.NodeResourceInfoGcsService/GetAllAvailableResources"
    token = (("authorization", f"Bearer {os.environ['RAY_AUTH_TOKEN']}"),)
    with grpc.insecure_channel(address) as channel:
        answer = channel.unary_unary(question)(b"", timeout=10, metadata=token)
    nodes = GetAllAvailableResourcesReply.FromString(answer).resources_list
    return {name: sum(node.resources_available.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}


@pytest.mark.parametrize("cluster", [["--num-cpus=0", "--num-cpus=8 --num-gpus=2"]], indirect=True)
def test_workers_are_capped_and_hold_shares_of_the_gpus_of_nodes_behind_a_head_that_has_nothing(
    cluster: tuple[str, Family], tmp_path: Path
) -> None:
    """The GPUs are invented: Ray gives them out, and torch, which finds none, trains on the CPU."""
    address, family = cluster
    settings = LONGER.replace("workers = 2", "workers = 3") + f'ray-address = "{address}"\n'
    (tmp_path / "tiny.toml").write_text(settings)
    run = Lacquer(tmp_path, "tiny.toml", "--quiet")
    try:
        assert len(busy(run, family)) == 3, "where Flower alone would have one a core, or four with half a GPU each"
        assert free(address) == pytest.approx({"CPU": 2.0, "GPU": 0.5}), "three times two cores and half a GPU"
        assert run.finish() == 0, run.stderr()
    finally:
        run.end()
    assert [record.round for record in read_metrics(run.run_folder) if record.phase == "round"] == list(range(1, 9))
