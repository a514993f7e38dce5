"""Certificates that a TLS client accepts for the right names only, and keys that Flower reads."""

import contextlib
import importlib.util
import socket
import ssl
import stat
import threading
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supernode.fleet_http_client import FleetHttpClient
from typer.testing import CliRunner

from client.supernode import is_passing
from server.network.certificates import make_authority
from simulations.cli.app import app
from simulations.cli.federation.certificates import make_keys

RUNNER = CliRunner()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path, ["north", "south"], ["federation.example"], set())
    return tmp_path


def greet(server: Path, trusted: Path, name: str) -> str:
    """The protocol of a TLS connection to ``name``; raises what the client raises."""
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(server / "server.crt", server / "server.key")
    outside = ssl.create_default_context(cafile=str(trusted))
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    theirs.settimeout(120)

    def serve() -> None:
        try:
            with inside.wrap_socket(theirs, server_side=True) as channel:
                channel.recv(1)
        except (ssl.SSLError, OSError):
            theirs.close()  # the client has refused us, which is what it reports itself

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with outside.wrap_socket(ours, server_hostname=name) as channel:
            return channel.version() or ""
    finally:
        ours.close()
        thread.join()


@pytest.mark.parametrize(
    ("server", "name"),
    [("superlink", "superlink"), ("superlink", "127.0.0.1"), ("gateway", "gateway"), ("gateway", "federation.example")],
)
def test_servers_are_known_by_their_names(server: str, name: str, keys: Path) -> None:
    assert greet(keys / server, keys / "north" / "ca.crt", name) == "TLSv1.3"


def test_a_server_is_not_another_one_nor_of_another_authority(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        greet(keys / "gateway", keys / "north" / "ca.crt", "superlink")
    make_authority(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        greet(keys / "gateway", tmp_path / "other" / "ca.crt", "gateway")


@pytest.mark.parametrize(("kind", "says"), [("expired", "has expired"), ("other", "Hostname mismatch")])
def test_a_node_follows_no_server_whose_certificate_is_of_another_name_or_has_expired(
    keys: Path, kind: str, says: str
) -> None:
    """Nor does it wait for that to pass."""
    spec = importlib.util.spec_from_file_location("wrong", Path(__file__).parents[3] / "docker/wrong_certificate.py")
    assert spec is not None
    assert spec.loader is not None
    wrong = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrong)
    wrong.put(keys / "gateway", keys / "authority", kind)
    with pytest.raises(ssl.SSLCertVerificationError, match=says):
        greet(keys / "gateway", keys / "north" / "ca.crt", "gateway")
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(keys / "gateway" / "server.crt", keys / "gateway" / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as plain, contextlib.suppress(ssl.SSLError, OSError):
                inside.wrap_socket(plain, server_side=True)

        thread = threading.Thread(target=serve)
        thread.start()
        address, trusted = f"localhost:{listening.getsockname()[1]}", str(keys / "north" / "ca.crt")
        with (
            FleetHttpClient.from_server_address(address, False, trusted, interceptors=[]) as node,
            pytest.raises(httpx.ConnectError, match=says) as refused,
        ):
            node.PullMessages(PullMessagesRequest())
        thread.join()
    assert not is_passing(refused.value)
    wrong.put(keys / "gateway", keys / "authority", "right")
    assert greet(keys / "gateway", keys / "north" / "ca.crt", "gateway") == "TLSv1.3"


def test_client_keys_are_what_flower_reads(keys: Path) -> None:
    private = load_ssh_private_key((keys / "north" / "key").read_bytes(), None)
    public = load_ssh_public_key((keys / "executor" / "clients" / "north.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert private.public_key().public_numbers() == public.public_numbers()


def test_private_halves_are_their_owners_and_go_nowhere_else(keys: Path) -> None:
    private = {path for path in keys.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()}
    assert {str(path.relative_to(keys)) for path in private} == {
        "authority/ca.key",
        "superlink/server.key",
        "executor/signing.key",
        "gateway/server.key",
        "north/key",
        "south/key",
    }
    known = [keys / server / "operator.key" for server in ("superlink", "executor")]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in [*private, *known])
    assert known[0].read_bytes() == known[1].read_bytes() != bytes(32)
    assert {path.name for path in (keys / "superlink").iterdir()} == {
        *("ca.crt", "server.crt", "server.key", "operator.key"),
    }


def test_a_signing_key_of_an_older_federation_leaves_what_the_superlink_reads(keys: Path) -> None:
    moved = {name: (keys / "executor" / name).read_bytes() for name in ("signing.key", "signing.crt")}
    for name in (*moved, "clients"):
        (keys / "executor" / name).rename(keys / "superlink" / name)
    (keys / "superlink" / "federation.json").write_text("{}")
    make_keys(keys, ["north"], [], set())
    assert {name: (keys / "executor" / name).read_bytes() for name in moved} == moved
    assert (keys / "executor" / "clients" / "south.pub").exists()
    assert (keys / "executor" / "federation.json").exists()
    assert {path.name for path in (keys / "superlink").iterdir()} == {
        *("ca.crt", "server.crt", "server.key", "operator.key"),
    }


def test_what_exists_is_kept_and_renewed_by_name_only(keys: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path.relative_to(keys)): path.read_bytes() for path in keys.rglob("*") if path.is_file()}

    before = content()
    assert make_keys(keys, ["north", "south"], [], set()) == []
    assert content() == before
    make_keys(keys, ["north", "south"], [], {"north"})
    changed = {name for name, text in content().items() if text != before[name]}
    assert changed == {"north/key", "north/key.pub", "executor/clients/north.pub"}
    make_keys(keys, ["north", "south"], [], {"servers"})
    changed = {name for name, text in content().items() if text != before[name]} - changed
    renewed = ("superlink/server", "executor/signing", "gateway/server")
    operators = {f"{server}/operator.key" for server in ("superlink", "executor")}
    assert changed == {f"{name}.{half}" for name in renewed for half in ("key", "crt")} | operators
    assert greet(keys / "gateway", keys / "north" / "ca.crt", "gateway") == "TLSv1.3"


def test_a_client_makes_its_own_key_where_it_is(tmp_path: Path) -> None:
    first = RUNNER.invoke(app, ["certificates", str(tmp_path), "--own"])
    again = RUNNER.invoke(app, ["certificates", str(tmp_path), "--own"])
    assert first.output == again.output
    assert isinstance(load_ssh_public_key(first.output.encode()), ec.EllipticCurvePublicKey)
    assert {path.name for path in tmp_path.iterdir()} == {"key", "key.pub"}


@pytest.mark.parametrize(
    "arguments", [["--client", "gateway"], ["--client", "../x"], ["--client", "a", "--renew", "b"], ["--client", "A"]]
)
def test_names_that_cannot_be_are_refused_before_anything_is_made(arguments: list[str], tmp_path: Path) -> None:
    assert RUNNER.invoke(app, ["certificates", str(tmp_path / "keys"), *arguments]).exit_code == 2
    assert not (tmp_path / "keys").exists()
