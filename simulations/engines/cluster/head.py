"""The Ray cluster that a run is told to join: whether it is there, and whether it asks who is calling."""

import os
import time
from pathlib import Path
from typing import Any, cast

import grpc

from server.config.load import ConfigError
from simulations.engines.cluster.nodes import Node, living_nodes
from simulations.engines.flower import RunFailed

_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_SECONDS = 10.0


def cluster_nodes(address: str) -> list[Node]:
    """The living nodes of a cluster, asked of its head; this process joins nothing.

    Refused is a cluster that lets whoever reaches it run code as its owner, or that does not take the caller's token.

    ``RAY_AUTH_MODE=disabled`` in the caller's environment is the caller's word that nobody else reaches the cluster.

    Args:
        address: ``engine.ray-address``, HOST:PORT.

    Raises:
        ConfigError: there is no cluster, it asks for no token, or for another.
    """
    said, answer = _ask(address, "")
    if said not in ("OK", "UNAUTHENTICATED"):
        raise ConfigError(f"engine.ray-address = {address!r}: no Ray answers there ({said}); start it with `ray start`")
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return _nodes(answer)
    if said == "OK":
        raise ConfigError(
            f"engine.ray-address = {address!r}: this Ray asks for no token, so whoever reaches its ports can run code "
            "as you and read your records; start it with RAY_AUTH_MODE=token (docs/scale.md), or, where nobody can "
            "reach it but you, set RAY_AUTH_MODE=disabled for this command too"
        )
    said, answer = _ask(address, _token())
    if said != "OK":
        raise ConfigError(
            f"engine.ray-address = {address!r}: this Ray does not take your token; put the cluster's into "
            "~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
        )
    return _nodes(answer)


def _nodes(answer: bytes) -> list[Node]:
    from ray.core.generated import gcs_pb2, gcs_service_pb2  # all of Ray, which a run here starts elsewhere

    info, service = cast(Any, gcs_pb2), cast(Any, gcs_service_pb2)  # made when Ray was built, so no checker knows them
    listed = service.GetAllNodeInfoReply.FromString(answer).node_info_list
    return living_nodes(
        {
            "Alive": each.state == info.GcsNodeInfo.ALIVE,
            "NodeManagerHostname": each.node_manager_hostname,
            "NodeManagerAddress": each.node_manager_address,
            "Resources": dict(each.resources_total),
        }
        for each in listed
    )


class RayHead:
    """Notices that the head of a run's cluster no longer answers: Flower would wait for it for a minute and more.

    Args:
        address: ``engine.ray-address``, HOST:PORT.
    """

    EVERY = 2.0
    """Seconds from one question to the next, and those that an answer may take."""
    MISSES = 3
    """Questions in a row without an answer: a head that is busy for a moment is not gone."""

    def __init__(self, address: str) -> None:
        self._address, self._next_look, self._missed = address, 0.0, 0

    def check(self) -> None:
        """Ask the head whether it is there, every two seconds at most.

        Raises:
            RunFailed: it has not answered three times in a row.
        """
        if time.monotonic() < self._next_look:
            return
        gone = _ask(self._address, _token(), seconds=self.EVERY)[0] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        self._missed = self._missed + 1 if gone else 0
        self._next_look = time.monotonic() + self.EVERY
        if self._missed == self.MISSES:
            raise RunFailed(
                f"the head of the Ray cluster at {self._address} no longer answers. What was released before is kept; "
                "start the cluster again, then resume the run"
            )


def _token() -> str:
    """The token that Ray itself would take, in Ray's order; "" where there is none."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def _ask(address: str, token: str, *, seconds: float = _SECONDS) -> tuple[str, bytes]:
    """What Ray's head says to a question that changes nothing: OK, or the name of gRPC's error; and its answer."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return "OK", channel.unary_unary(_METHOD)(b"", timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name), b""
