"""The one way from the clients' networks to the SuperLink: it lets the Fleet API through and nothing else.

Flower 1.41 serves everything on one port: the Fleet API, which SuperNodes need and which authenticates them; the
Control API, which registers nodes and starts runs and asks nobody who they are unless an account plugin is installed;
the Runtime API, through which a ServerApp is handed out. Whoever reaches the port reaches all of them. So the SuperLink
is put on a network of its own, and this process, on both networks, forwards the calls of :data:`FLEET` by POST, up to
``--largest`` bytes of body each, and answers everything else with 404.

It ends TLS with a certificate of its own and speaks TLS to the SuperLink, whose certificate it checks. SuperNodes sign
every call with their key; the SuperLink checks that, not the gateway.

    python -m server.network.gateway --upstream https://superlink:8000 --ca ca.crt --certificate gateway.crt --key
    gateway.key
"""

import argparse
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn

log = logging.getLogger(__name__)

FLEET = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        "register-node",  # refused by the SuperLink, in words, where nodes must be known
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
HEALTH = "/health"
LARGEST = 256 * 2**20
_HOP = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"proxy-connection")
)
"""Headers of one connection, which are not forwarded (RFC 9110, section 7.6.1)."""


class TooLarge(ValueError):
    """A body over the limit."""


class Gateway:
    """An ASGI application that forwards the Fleet API.

    Args:
        upstream: client whose base URL is the SuperLink.
        largest: bytes of the largest body taken.
    """

    def __init__(self, upstream: httpx.AsyncClient, largest: int = LARGEST) -> None:
        self._upstream = upstream
        self._largest = largest

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif allowed(scope["method"], scope["path"], scope.get("raw_path"), scope.get("query_string", b"")):
            await self._forward(scope, receive, send)
        else:
            log.warning("refused: %s %.100r", scope["method"], scope["path"])
            await _answer(send, 404)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            kind = (await receive())["type"].removeprefix("lifespan.")
            if kind == "shutdown":
                await self._upstream.aclose()
            await send({"type": f"lifespan.{kind}.complete"})
            if kind == "shutdown":
                return

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _HOP]
        content = self._body(receive) if scope["method"] == "POST" else None
        request = self._upstream.build_request(scope["method"], scope["path"], headers=headers, content=content)
        try:
            answer = await self._upstream.send(request, stream=True)
        except TooLarge:
            log.warning("refused: a body of more than %d bytes", self._largest)
            return await _answer(send, 413)
        except httpx.HTTPError as error:
            log.warning("the SuperLink does not answer: %s", type(error).__name__)
            return await _answer(send, 502)
        try:
            kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()

    async def _body(self, receive: Any) -> AsyncIterator[bytes]:
        taken, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise httpx.ReadError("the client has gone")
            part, more = message.get("body", b""), message.get("more_body", False)
            taken += len(part)
            if taken > self._largest:
                raise TooLarge
            yield part


def allowed(method: str, path: str, raw_path: bytes | None, query: bytes) -> bool:
    """Whether a call may pass: exact paths, spelt without escapes, and no query."""
    if query or (raw_path is not None and raw_path != path.encode()):
        return False
    return (method == "POST" and path in FLEET) or (method == "GET" and path == HEALTH)


async def _answer(send: Any, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m server.network.gateway", description="Forward the Fleet API, nothing else."
    )
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8443)
    parser.add_argument("--upstream", required=True, help="https://HOST:PORT of the SuperLink")
    parser.add_argument("--ca", required=True, help="certificate that signed the SuperLink's")
    parser.add_argument("--certificate", required=True, help="the gateway's own")
    parser.add_argument("--key", required=True)
    parser.add_argument("--largest", type=int, default=LARGEST, help="bytes of the largest body")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    upstream = httpx.AsyncClient(
        base_url=given.upstream, verify=ssl.create_default_context(cafile=given.ca), timeout=60.0, trust_env=False
    )
    uvicorn.run(
        Gateway(upstream, given.largest),
        host=given.host,
        port=given.port,
        ssl_certfile=given.certificate,
        ssl_keyfile=given.key,
        access_log=False,
        log_level="warning",
        server_header=False,
    )


if __name__ == "__main__":
    main()
