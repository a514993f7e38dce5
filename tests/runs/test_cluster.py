"""Which Ray clusters a run joins; a gRPC server stands for Ray's head, and end_to_end/test_ray_cluster.py has one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from server.config.load import ConfigError
from simulations.engines.cluster import check_cluster

TOKEN = "5" * 64


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
            return b""

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
        check_cluster(address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    check_cluster(address)


@pytest.mark.parametrize("place", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME"])
def test_a_cluster_is_joined_by_its_token_wherever_ray_finds_it(head, monkeypatch, tmp_path, place):
    address = head(TOKEN)
    with pytest.raises(ConfigError, match="does not take your token"):
        check_cluster(address)
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text(TOKEN + "\n")
    if place != "HOME":
        monkeypatch.setenv("HOME", "/nowhere")
        monkeypatch.setenv(place, TOKEN if place == "RAY_AUTH_TOKEN" else str(file))
    check_cluster(address)


def test_an_address_where_no_ray_answers_is_refused(head):
    with pytest.raises(ConfigError, match=r"engine.ray-address = '127.0.0.1:9'.*no Ray answers"):
        check_cluster("127.0.0.1:9")
