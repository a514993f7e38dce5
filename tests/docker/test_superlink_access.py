"""Whoever reaches the port of a SuperLink, as every user of its host may, commands it with the operator's key only."""

import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.network.operator_key import VARIABLE, access_token
from simulations.cli.app import app
from simulations.cli.federation.certificates import make_keys
from simulations.cli.federation.connection import control
from tests.end_to_end.deployment import ROOT, free_port

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]


def command(keys: Path, port: int, *more: str) -> list[str]:
    """The SuperLink's, as in docker/compose.yaml."""
    own = keys / "superlink"
    return [
        *(sys.executable, "-m", "server.network.superlink", f"--ssl-ca-certfile={own}/ca.crt"),
        *(f"--ssl-certfile={own}/server.crt", f"--ssl-keyfile={own}/server.key", "--enable-supernode-auth"),
        *("--disable-runtime-dependency-installation", "--host=127.0.0.1", f"--port={port}"),
        *(f"--database={keys.parent}/state.db", *more),
    ]


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The keys and the port of a SuperLink, a process of its own."""
    folder = tmp_path_factory.mktemp("superlink")
    keys, port = folder / "keys", free_port()
    make_keys(keys, ["a"], [], set())
    closed = ("--isolation=process", f"--superexec-auth-secret-file={keys}/superlink/operator.key")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(folder / "home"), "NO_PROXY": "*"}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with subprocess.Popen(command(keys, port, *closed), env=environment, cwd=folder) as process:
        ends = time.monotonic() + 240.0
        while process.poll() is None and time.monotonic() < ends:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield keys, port
        process.terminate()


def answer(superlink: tuple[Path, int], path: str, token: str = "") -> int:
    """The status of a call."""
    keys, port = superlink
    shown = {"content-type": "application/protobuf"} | ({"authorization": f"Bearer {token}"} if token else {})
    asked = urllib.request.Request(f"https://127.0.0.1:{port}{path}", b"", shown)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(keys / "superlink" / "ca.crt"))),
    )
    try:
        return int(opener.open(asked, timeout=60).status)
    except urllib.error.HTTPError as error:
        return error.code


LOGIN = ("get-login-details", "get-auth-tokens", "refresh-auth-tokens")
"""Flower asks nobody who they are before they log in. Here nobody can."""


def orders() -> list[str]:
    """Every call of Flower's Control and Runtime API."""
    from flwr.supercore.routers.runtime.router import router as runtime
    from flwr.superlink.routers.control import router as control_api

    return [str(getattr(route, "path", "")) for router in (control_api, runtime) for route in router.routes]


def test_no_order_is_taken_without_the_operators_key(superlink: tuple[Path, int]) -> None:
    paths = orders()
    assert {"/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"} <= set(paths)
    wrong = ["", secrets.token_hex(32), access_token(b""), access_token(secrets.token_bytes(32))]
    for path in paths:
        if path.endswith(LOGIN):
            assert answer(superlink, path) in {200, 400, 401, 403, 501}
            continue
        assert {answer(superlink, path, token) for token in wrong} == {401}, path


def test_nobody_is_given_a_token_for_logging_in(superlink: tuple[Path, int]) -> None:
    assert {answer(superlink, f"/v1/control/{name}") for name in LOGIN[1:]} & {200} == set()


def test_the_operators_key_is_taken_and_another_is_not(
    superlink: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys, port = superlink
    monkeypatch.setenv(VARIABLE, str(keys / "executor" / "operator.key"))
    with control(f"127.0.0.1:{port}", keys / "executor" / "ca.crt") as operator:
        assert operator.nodes() == []
    token = access_token((keys / "executor" / "operator.key").read_bytes())
    assert answer(superlink, "/v1/control/list-nodes", token) == 200
    (tmp_path / "operator.key").write_bytes(secrets.token_bytes(32))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "operator.key"))
    refused = CliRunner().invoke(
        app, ["clients", "--address", f"127.0.0.1:{port}", "--ca", str(keys / "executor" / "ca.crt")]
    )
    said = f"127.0.0.1:{port}: the SuperLink has another operator.key than {tmp_path}/operator.key; give it its own\n"
    assert (refused.exit_code, refused.stderr) == (1, said)


def test_what_the_database_holds_is_its_owners(superlink: tuple[Path, int]) -> None:
    found = list(superlink[0].parent.glob("state.db*"))
    assert found
    assert [path.name for path in found if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("more", [[], ["--isolation=process"], ["--superexec-auth-secret-file={key}"]])
def test_a_superlink_that_anybody_would_command_does_not_start(superlink: tuple[Path, int], more: list[str]) -> None:
    keys, _ = superlink
    named = [option.format(key=keys / "superlink" / "operator.key") for option in more]
    refused = subprocess.run(
        command(keys, free_port(), *named), env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "whoever reaches this port starts runs" in refused.stderr.splitlines()[-1]
