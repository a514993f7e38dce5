"""The gateway lets the Fleet API through, byte for byte, and nothing else."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.network.gateway import FLEET, Gateway, allowed


async def echo(request: Request) -> Response:
    """A SuperLink that answers everything with what it was sent."""
    body = await request.body()
    return Response(
        body[::-1], status_code=201, headers={"x-path": request.url.path, "x-key": request.headers["x-key"]}
    )


def call(method: str, path: str, content: bytes = b"", largest: int = 2**20, upstream: Any = None) -> httpx.Response:
    superlink = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST", "PUT", "DELETE"])])

    async def ask() -> httpx.Response:
        inner = httpx.ASGITransport(app=superlink) if upstream is None else upstream
        async with httpx.AsyncClient(transport=inner, base_url="https://superlink") as client:
            gateway = httpx.ASGITransport(app=Gateway(client, largest))
            async with httpx.AsyncClient(transport=gateway, base_url="https://gateway") as outer:
                return await outer.request(method, path, content=content, headers={"x-key": "k"})

    return asyncio.run(ask())


@pytest.mark.run  # imports the SuperLink, with its database
def test_the_list_is_flowers_whole_fleet_api() -> None:
    from flwr.superlink.routers.fleet.router import router as fleet

    assert {route.path for route in fleet.routes} == FLEET


@pytest.mark.parametrize("path", sorted(FLEET))
def test_fleet_calls_pass_unchanged(path: str) -> None:
    answer = call("POST", path, b"payload")
    assert (answer.status_code, answer.content, answer.headers["x-path"]) == (201, b"daolyap", path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/pull-messages"),
        ("POST", "/v1/fleet/pull-messages/"),
        ("POST", "/v1/fleet//pull-messages"),
        ("POST", "/v1/fleet/pull-messages?x=1"),
        ("POST", "/v1/fleet/%70ull-messages"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "//v1/fleet/pull-messages"),
        ("POST", "/V1/FLEET/PULL-MESSAGES"),
        ("GET", "/v1/fleet/pull-messages"),
        ("PUT", "/v1/fleet/pull-messages"),
        ("DELETE", "/v1/fleet/pull-messages"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/health"),
        ("GET", "/"),
    ],
)
def test_everything_else_is_not_there(method: str, path: str) -> None:
    assert call(method, path).status_code == 404


def test_health_is_asked_of_the_superlink() -> None:
    assert call("GET", "/health").headers["x-path"] == "/health"


def test_escapes_are_seen_in_the_raw_path() -> None:
    assert not allowed("POST", "/v1/fleet/get-run", b"/v1/fleet/get%2drun", b"")
    assert allowed("POST", "/v1/fleet/get-run", b"/v1/fleet/get-run", b"")


def test_a_huge_body_is_refused() -> None:
    assert call("POST", "/v1/fleet/push-object", b"x" * 1000, largest=1000).status_code == 201
    assert call("POST", "/v1/fleet/push-object", b"x" * 1001, largest=1000).status_code == 413


def test_a_silent_superlink_is_a_bad_gateway() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert call("POST", "/v1/fleet/get-run", upstream=httpx.MockTransport(silent)).status_code == 502
