"""A deployed node follows what its server signed for it, once; what anybody else says is refused before it is read."""

import datetime
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto

import server.network.certificates as certificates
from client.app import app
from client.instructed import check_instruction
from client.node import NodeFailed
from privacy import durable
from server.config.load import ConfigError
from server.network.instructions import VARIABLE, SigningGrid, load_signing_key
from simulations.engines.inprocess import InProcessGrid
from strategies.messages import instruction
from strategies.messages.instruction import RECORD, sign
from tests.cases.disk import AS_ROOT, Disk, fill
from tests.cases.instructions import Server, server

NODE, RUN = 7, 1


def asked(node: int = NODE, kind: str = "train") -> Message:
    """One array and settings of every type that Flower carries."""
    config = ConfigRecord({"round": 3, "rate": 0.5, "job": "train", "raw": b"\x00", "on": True, "all": [1, 2]})
    arrays = ArrayRecord({"adapter": Array(np.arange(4, dtype=np.float32)), "clients": Array(np.array([1]))})
    content = RecordDict({"arrays": arrays, "config": config, "metrics": MetricRecord({"seen": [0.5, 1.5]})})
    message = Message(content, dst_node_id=node, message_type=kind)
    message.metadata.__dict__["_message_id"] = "one"
    return message


def sent(message: Message) -> Message:
    """As it arrives: through Flower's own bytes."""
    return message_from_proto(message_to_proto(message))


@pytest.fixture
def node(tmp_path: Path) -> Context:
    settings = {"data": "jsonl:somewhere", "cache": str(tmp_path / "cache"), "authority": server().authority}
    return Context(run_id=RUN, node_id=NODE, node_config=dict(settings), state=RecordDict(), run_config={})


class Followed(Exception):
    """What stands where the work would begin."""


def given(message: Message, context: Context) -> Message:
    """Let a node have a message; Followed if it would do what it says."""

    def follow(message: Message, context: Context) -> Message:
        assert RECORD not in message.content  # what follows sees the message as it was before it was signed
        raise Followed

    return check_instruction(sent(message), context, follow)


def refusal(message: Message, context: Context, caplog: pytest.LogCaptureFixture) -> str:
    """What a node says in its own log; the server, or whoever sent it, hears a class and nothing else."""
    caplog.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(NodeFailed, match=r"^NotInstructed$"):
        given(message, context)
    return caplog.text


def test_a_node_follows_what_its_server_signed(node: Context) -> None:
    for kind in ("train", "train.site", "train.secagg_keys", "evaluate"):
        with pytest.raises(Followed):
            given(server().signed(asked(kind=kind)), node)


def test_what_no_server_signed_is_refused(node: Context, caplog: pytest.LogCaptureFixture) -> None:
    assert "bears no signature of the server" in refusal(asked(), node, caplog)


def changed(name: str, value: Any, record: str = "config") -> Callable[[Message], Any]:
    return lambda message: message.content[record].__setitem__(name, value)


ALTERED: dict[str, Callable[[Message], Any]] = {
    "setting": changed("round", 4),
    "its last digit": changed("rate", np.nextafter(0.5, 1.0).item()),
    "its type": changed("on", 1),
    "a text for bytes": changed("raw", "\x00"),
    "a list": changed("all", [12]),
    "another setting": changed("further", ""),
    "a setting gone": lambda message: message.content["config"].pop("job"),
    "metric": changed("seen", [0.5, 1.25], "metrics"),
    "array": changed("adapter", Array(np.arange(4, dtype=np.float32) + 1), "arrays"),
    "array's type": changed("adapter", Array(np.arange(4, dtype=np.int32)), "arrays"),
    "array's shape": changed("adapter", Array(np.arange(4, dtype=np.float32).reshape(2, 2)), "arrays"),
    "clients": changed("clients", Array(np.array([2])), "arrays"),
    "another array": changed("ranks", Array(np.array([2])), "arrays"),
    "another record": lambda message: message.content.__setitem__("more", ConfigRecord({})),
    "a record gone": lambda message: message.content.pop("metrics"),
    "kind of message": lambda message: setattr(message.metadata, "message_type", "train.site"),
    "number": lambda message: message.content[RECORD].__setitem__("sequence", 2**62),
    "signature": lambda message: message.content[RECORD].__setitem__("signature", b"\x00" * 64),
    "form of the number": lambda message: message.content[RECORD].__setitem__("sequence", "1"),
    "certificate": lambda message: message.content[RECORD].__setitem__("certificate", b"none"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_was_altered_on_its_way_is_refused(
    what: str, node: Context, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    message = server().signed(asked())
    ALTERED[what](message)
    said = refusal(message, node, caplog)
    words = {"form of the number": "has another form", "certificate": "authority has not signed"}
    assert words.get(what, "was altered, or was meant for another") in said
    assert not (tmp_path / "cache").exists()


def test_what_was_meant_for_another_node_or_run_is_refused(node: Context, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = server().signed(asked(node=8))
    elsewhere.metadata.dst_node_id = NODE
    assert "meant for another node" in refusal(elsewhere, node, caplog)
    later = server().signed(asked())
    later.metadata.__dict__["_run_id"] = node.run_id = 2  # as Flower lets a node see it
    assert "meant for another node or run" in refusal(later, node, caplog)
    node.run_id = 3
    assert "is of another run" in refusal(later, node, caplog)


def test_an_instruction_is_followed_once_although_the_node_was_restarted(
    node: Context, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first, second = server().signed(asked()), server().signed(asked())
    with pytest.raises(Followed):
        given(second, node)
    again = Context(RUN, NODE, dict(node.node_config), RecordDict(), {})  # nothing is left in Flower's own memory
    assert "was followed before" in refusal(second, again, caplog)
    assert "was followed before" in refusal(first, again, caplog)
    kept = tmp_path / "cache" / f"instructions-{NODE}.json"
    assert set(json.loads(kept.read_text())) == {str(RUN)}
    kept.write_text("{")
    with pytest.raises(NodeFailed, match="CorruptRun"):
        given(server().signed(asked()), node)


@AS_ROOT
def test_a_node_whose_disk_is_full_says_so_and_follows_once_there_is_room(
    node: Context, caplog: pytest.LogCaptureFixture, disk: Disk
) -> None:
    """What it cannot note it does not follow; the server hears a class, as of every failure."""
    place, message = disk(100), server().signed(asked())
    node.node_config["cache"] = str(place / "cache")
    fill(place)
    with pytest.raises(NodeFailed, match=r"^OSError$"):
        given(message, node)
    (line,) = caplog.records
    assert (line.exc_info, line.levelname) == (None, "ERROR")
    assert f"{place}/cache/instructions-{NODE}.json could not be written: {durable.FULL}; make room" in line.message
    (place / "filler").unlink()
    with pytest.raises(Followed):
        given(message, node)


def self_made(
    key: Ed25519PrivateKey,
    signer: Any,
    issuer: x509.Name,
    days: tuple[int, int] = (-1, 1),
    purposes: tuple[x509.ObjectIdentifier, ...] = (instruction.PURPOSE,),
) -> Any:
    """A certificate by whom, for when and for what one likes."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lacquer instructions")]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
        .sign(signer, None if isinstance(signer, Ed25519PrivateKey) else certificates.hashes.SHA384())
    )


def test_other_keys_than_the_servers_are_refused(
    node: Context, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ours = instruction.load_authority(Path(server().authority))
    own = Ed25519PrivateKey.generate()  # a node's, which calls itself what the server is called
    message = asked()
    sign(message, own, self_made(own, own, ours.subject), 1)
    assert "authority has not signed" in refusal(message, node, caplog)
    message = asked()
    sign(message, own, load_signing_key(server().key)[1], 1)  # the server's certificate, which everybody gets to see
    assert "was altered" in refusal(message, node, caplog)
    foreign = Server.of(tmp_path / "another federation")
    assert "authority has not signed" in refusal(foreign.signed(asked()), node, caplog)


def test_a_certificate_for_tls_is_none_for_instructions(node: Context, caplog: pytest.LogCaptureFixture) -> None:
    """What ends TLS stands in the open; it may pass messages on and not make any."""
    edge = server().folder / "gateway"
    certificates.make_certificate(edge, "server", ["gateway"], server().folder / "authority")
    tls = x509.load_pem_x509_certificate((edge / "server.crt").read_bytes())
    message = asked()
    sign(message, Ed25519PrivateKey.generate(), tls, 1)
    assert "not for instructions" in refusal(message, node, caplog)
    ca_key = serialization.load_pem_private_key((server().folder / "authority" / "ca.key").read_bytes(), None)
    key, ours = Ed25519PrivateKey.generate(), instruction.load_authority(Path(server().authority))
    for purposes in ((ExtendedKeyUsageOID.SERVER_AUTH,), (ExtendedKeyUsageOID.SERVER_AUTH, instruction.PURPOSE)):
        sign(message, key, self_made(key, ca_key, ours.subject, purposes=purposes), 1)
        assert "not for instructions" in refusal(message, node, caplog)


@pytest.mark.parametrize("days", [(-3, -2), (2, 3)])
def test_a_certificate_has_its_time(days: tuple[int, int], node: Context, caplog: pytest.LogCaptureFixture) -> None:
    ca_key = serialization.load_pem_private_key((server().folder / "authority" / "ca.key").read_bytes(), None)
    key, ours = Ed25519PrivateKey.generate(), instruction.load_authority(Path(server().authority))
    message = asked()
    sign(message, key, self_made(key, ca_key, ours.subject, days), 1)
    assert "this node's clock says" in refusal(message, node, caplog)


@pytest.mark.parametrize(
    "settings",
    [{}, {"data": "jsonl:x"}, {"partition-id": 0, "num-partitions": 2, "data": "jsonl:x"}, {"partition-id": 0}],
)
def test_a_node_that_knows_no_authority_does_nothing(settings: dict[str, Any], node: Context) -> None:
    node.node_config = settings
    with pytest.raises((NodeFailed, instruction.NotInstructed)):
        given(server().signed(asked()), node)
    node.node_config = {"partition-id": 0, "num-partitions": 2}  # a simulation's worker, and nothing else
    with pytest.raises(Followed):
        given(asked(), node)


def test_every_handler_of_the_client_asks_for_the_signature(node: Context) -> None:
    kinds = [name for name in app._registered_funcs if name != "query"]
    assert len(kinds) == 10
    for kind in kinds:
        with pytest.raises(NodeFailed, match="NotInstructed"):
            app(message=sent(asked(kind=kind.removesuffix(".default"))), context=node)


def test_a_deployed_servers_messages_are_all_signed(node: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(server().key))
    inner = InProcessGrid(app, 2)
    grid, messages = SigningGrid(inner), [asked(1), asked(2), asked(1)]
    identifiers = list(grid.push_messages(messages))
    assert [message.metadata.message_id for message in messages] == identifiers
    assert grid.settle == inner.settle
    ca = instruction.load_authority(Path(server().authority))
    resumed = [asked(1)]  # the run goes on in another process, and Flower calls it the same
    list(SigningGrid(inner).push_messages(resumed))
    signed = [*messages, *resumed]
    numbers = [instruction.take(sent(message), RUN, message.metadata.dst_node_id, ca) for message in signed]
    assert numbers == sorted(set(numbers))


def test_a_server_without_its_key_says_so_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "signing.key"))
    with pytest.raises(ConfigError, match=r"signing\.key: No such file.*lacquer certificates"):
        SigningGrid(InProcessGrid(app, 1))
    (tmp_path / "signing.key").write_bytes(server().key.read_bytes())
    other = Server.of(tmp_path / "other")
    (tmp_path / "signing.crt").write_bytes(other.key.with_suffix(".crt").read_bytes())
    with pytest.raises(ConfigError, match="no Ed25519 key of the certificate beside it"):
        SigningGrid(InProcessGrid(app, 1))
    key = load_signing_key(server().key)[0]
    late = self_made(key, key, instruction.load_authority(Path(server().authority)).subject, (-3, -2))
    early = self_made(key, key, instruction.load_authority(Path(server().authority)).subject, (1, 3))
    for made, said in ((late, "was good until"), (early, "is good from .* UTC, and this host's clock says")):
        (tmp_path / "signing.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        with pytest.raises(ConfigError, match=rf"signing\.crt {said} .* --renew servers"):
            SigningGrid(InProcessGrid(app, 1))


@pytest.mark.parametrize("days", [-1, 1])
def test_a_servers_clock_that_jumps_a_day_repeats_no_number(
    days: int, node: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And back again; nodes follow what they are told behind it, and no instruction of before."""
    monkeypatch.setenv(VARIABLE, str(server().key))
    grid, now = SigningGrid(InProcessGrid(app, NODE)), time.time_ns()
    told = []
    for off in (0, days, days, 0):
        message = asked()
        monkeypatch.setattr(time, "time_ns", lambda off=off: now + off * 86_400 * 10**9)
        list(grid.push_messages([message]))
        told.append(sent(message))
        with pytest.raises(Followed):
            given(message, node)
    for old in told:
        with pytest.raises(NodeFailed, match=r"^NotInstructed$"):
            given(old, node)
