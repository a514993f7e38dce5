"""Which Ray clusters a run joins; a gRPC server stands for Ray's head, and end_to_end/test_ray_cluster.py has one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoReply

from server.config.load import ConfigError, parse
from simulations.engines.cluster import look
from simulations.engines.cluster.head import cluster_nodes
from simulations.engines.cluster.nodes import Node

TOKEN = "5" * 64
LISTED = GetAllNodeInfoReply()
for state, has in ((GcsNodeInfo.ALIVE, {"CPU": 2.0, "GPU": 1.0, "memory": 7.0}), (GcsNodeInfo.DEAD, {"CPU": 4.0})):
    LISTED.node_info_list.add(
        state=state, node_manager_address="10.0.0.1", node_manager_hostname="gpu-1", resources_total=has
    )


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[Callable[[str], str]]:
    """Starts a head that wants a token ("" for none); its address. The caller has no token and no home."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    servers = []

    def start(wanted: str) -> str:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if wanted and ("authorization", f"Bearer {wanted}") not in context.invocation_metadata():
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
            return LISTED.SerializeToString()

        handler = grpc.method_handlers_generic_handler(
            "ray.rpc.NodeInfoGcsService", {"GetAllNodeInfo": grpc.unary_unary_rpc_method_handler(answer)}
        )
        servers.append(grpc.server(ThreadPoolExecutor(1), handlers=[handler]))
        port = servers[-1].add_insecure_port("127.0.0.1:0")
        servers[-1].start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def test_a_cluster_that_asks_for_no_token_is_refused_unless_the_caller_says_so(head, monkeypatch):
    address = head("")
    with pytest.raises(ConfigError, match=rf"{address}.*asks for no token.*RAY_AUTH_MODE=token"):
        cluster_nodes(address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert cluster_nodes(address) == [Node("gpu-1 10.0.0.1", 2.0, 1.0, 7.0)]


@pytest.mark.parametrize("place", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME"])
def test_a_cluster_is_joined_by_its_token_wherever_ray_finds_it(head, monkeypatch, tmp_path, place):
    address = head(TOKEN)
    with pytest.raises(ConfigError, match="does not take your token"):
        cluster_nodes(address)
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text(TOKEN + "\n")
    if place != "HOME":
        monkeypatch.setenv("HOME", "/nowhere")
        monkeypatch.setenv(place, TOKEN if place == "RAY_AUTH_TOKEN" else str(file))
    assert len(cluster_nodes(address)) == 1, "a node that is gone stays on Ray's list"


def test_an_address_where_no_ray_answers_is_refused(head):
    with pytest.raises(ConfigError, match=r"engine.ray-address = '127.0.0.1:9'.*no Ray answers"):
        cluster_nodes("127.0.0.1:9")


class Asked:
    """What Ray makes of a function: it runs on a node, here in this process; which nodes were asked is kept."""

    def __init__(self, function: Callable[..., Any], asked: list[str]) -> None:
        self.function, self.asked = function, asked

    def options(self, **options: Any) -> "Asked":
        self.asked.append(options["scheduling_strategy"].node_id)
        return self

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return lambda: self.function(*arguments)


def looked(monkeypatch: pytest.MonkeyPatch, folder: Path, silent: int = 0, **engine: Any) -> list[str]:
    """Look at three nodes, the last ``silent`` of which do not answer; which were asked."""
    asked: list[str] = []
    nodes = [
        {"NodeID": f"{i:056x}", "Alive": i < 4, "NodeManagerHostname": f"n{i}", "Resources": has}
        for i, has in enumerate([{"CPU": 0.0}, *[{"CPU": 4.0}] * 2, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}])
    ]
    stand_in = SimpleNamespace(
        nodes=lambda: nodes,
        remote=lambda function: Asked(function, asked),
        wait=lambda refs, num_returns, timeout: (refs[: len(refs) - silent], refs[len(refs) - silent :]),
        get=lambda ref: ref(),
    )
    monkeypatch.setattr(look, "ray", stand_in)
    engine |= {"ray-address": "h:1", "workers": 2}
    table = {"engine": engine, "model": {"name": "random:bert"}, "data": {"cache": str(folder / "c")}}
    actor = {"num_cpus": 2, "num_gpus": float(engine.get("device") == "cuda")}
    look.check_nodes(parse(table), "h:1", folder, actor)
    return asked


def test_every_living_node_that_may_hold_a_worker_is_looked_at(monkeypatch, tmp_path):
    assert looked(monkeypatch, tmp_path) == [f"{i:056x}" for i in (1, 2, 3)]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "the markers are gone"


def test_a_node_without_a_folder_of_the_run_is_named_with_it(monkeypatch, tmp_path):
    exists = iter([True, True, False, True, False, *[True] * 4])
    monkeypatch.setattr("os.path.exists", lambda path: next(exists))
    with pytest.raises(ConfigError) as refused:
        looked(monkeypatch, tmp_path)
    said, *nodes = str(refused.value).splitlines()
    assert said.startswith("the Ray cluster at h:1: not every node finds what the run needs")
    assert nodes == [f"n1: data.cache = '{tmp_path}/c' is not there", f"n2: output {tmp_path} is not there"]


def test_a_node_that_does_not_answer_and_one_whose_gpu_torch_cannot_use_are_named(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="\nn3: no answer within 180 s; is it lost"):
        looked(monkeypatch, tmp_path, silent=1)
    with pytest.raises(ConfigError, match=r"\nn3: engine.device = 'cuda': there is no CUDA device"):
        looked(monkeypatch, tmp_path, device="cuda")


def test_the_servers_host_needs_no_gpu_where_the_cluster_has_them():
    assert parse({"engine": {"device": "cuda", "ray-address": "h:1"}}).engine.base.device == "auto"
    assert parse({"engine": {"device": "cuda"}}).engine.base.device == "cuda"
