"""An instruction of the server, signed: what a deployed node does, it does for nobody else.

Flower's Fleet API knows its callers, but lets every node that was let in push a message to any other as if the server
had sent it. So what the server asks of a deployed node bears a signature (Ed25519, RFC 8032) of

    the run, the node it is for, the type of the message, a sequence number, SHA-256 of every record in it

under a certificate for instructions that the federation's own authority signed. The node knows that authority by the
``ca.crt`` it has for TLS. Certificates for TLS are not for instructions: what ends TLS cannot instruct.

Sequence numbers of a run grow. Who keeps the last one he followed (:mod:`client.instructed`) follows none twice.
"""

import datetime
import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from strategies.messages.records import BadMessage, read_setting

RECORD: Final = "instruction"
"""Of a message: the record with the signature. It goes before anything else reads the message."""
PURPOSE: Final = ExtendedKeyUsageOID.CODE_SIGNING
"""What the certificate must be for, and for nothing else: no certificate for TLS has it."""


class NotInstructed(BadMessage):
    """A message that is no instruction of the federation's server to this node."""


def sign(message: Message, key: Ed25519PrivateKey, certificate: x509.Certificate, sequence: int) -> None:
    """Put the server's signature into a message, in place of one that it has.

    Args:
        sequence: larger than that of every earlier instruction of the run.
    """
    message.content.pop(RECORD, None)
    signature = key.sign(_signed(message, message.metadata.dst_node_id, sequence))
    der = certificate.public_bytes(Encoding.DER)
    message.content[RECORD] = ConfigRecord({"sequence": sequence, "certificate": der, "signature": signature})


def take(message: Message, run: int, node: int, authority: x509.Certificate) -> int:
    """Check the signature of a message and take it out of it; the instruction's sequence number.

    Args:
        run, node: which this run and this node are.
        authority: that signed the certificates of the federation's servers.

    Raises:
        NotInstructed: the message is not, as it stands, what the server asked of this node in this run.
    """
    if not message.has_content() or RECORD not in message.content.config_records:
        raise NotInstructed(
            "this message bears no signature of the server; whoever sent it may be another node. If it was the "
            "server, it runs other code than this node"
        )
    held = message.content.config_records[RECORD]
    del message.content[RECORD]
    try:
        sequence, der, signature = (
            read_setting(held, name, kind)
            for name, kind in (("sequence", int), ("certificate", bytes), ("signature", bytes))
        )
    except BadMessage as error:
        raise NotInstructed(f"this message's signature has another form: {error}") from None
    key = _key_of(der, authority)
    if message.metadata.run_id != run:
        raise NotInstructed("this instruction is of another run")
    try:
        key.verify(signature, _signed(message, node, sequence))
    except InvalidSignature:
        raise NotInstructed(
            "the server's signature is not of this message: it was altered, or was meant for another node or run"
        ) from None
    return int(sequence)


def load_authority(path: Path) -> x509.Certificate:
    """The certificate of a federation's authority; ValueError if the file holds none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no certificate ({error}); give the federation's ca.crt") from error


def _key_of(der: bytes, authority: x509.Certificate) -> Ed25519PublicKey:
    """The key of a certificate for instructions; NotInstructed if it is not one of this authority, valid now."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        certificate.verify_directly_issued_by(authority)
        purposes = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        key = certificate.public_key()
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        raise NotInstructed("this message is signed by a key that the federation's authority has not signed") from None
    if purposes != [PURPOSE] or not isinstance(key, Ed25519PublicKey):
        raise NotInstructed("this message is signed by a key of the federation that is not for instructions")
    now = datetime.datetime.now(datetime.UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise NotInstructed(
            f"the server's certificate for instructions is good from {certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}, and this node's clock says {now:%Y-%m-%d}; renew it "
            "(`lacquer certificates --renew servers`), or set the clock"
        )
    return key


def _signed(message: Message, node: int, sequence: int) -> bytes:
    head = ["lacquer instruction 1", message.metadata.run_id, node, message.metadata.message_type, sequence]
    return json.dumps([*head, content_digest(message.content).hex()]).encode()


def content_digest(content: RecordDict) -> bytes:
    """SHA-256 of all records of a message: names, kinds, values with their types; the order does not count."""
    digest = hashlib.sha256()
    for name in sorted(content):
        record: Any = content[name]
        _feed(digest, type(record).__name__, name, str(len(record)))
        for key in sorted(record):
            value = record[key]
            if isinstance(record, ArrayRecord):
                _feed(digest, key, value.dtype, json.dumps(list(value.shape)), value.stype, value.data)
            else:
                _feed(digest, key, _encoded(value))
    return digest.digest()


def _feed(digest: Any, *parts: str | bytes) -> None:
    """Every part behind its length: no two lists of parts are the same bytes."""
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(struct.pack(">Q", len(data)) + data)


def _encoded(value: Any) -> bytes:
    """A value of Flower's records with its type."""
    if isinstance(value, list):
        return b"list" + b"".join(struct.pack(">Q", len(one)) + one for one in map(_encoded, value))
    kind = type(value).__name__.encode() + b" "
    if isinstance(value, float):
        return kind + struct.pack(">d", value)
    return kind + (value if isinstance(value, bytes) else str(value).encode())
