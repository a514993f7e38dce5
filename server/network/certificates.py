"""Certificates for TLS and for instructions, and keys by which SuperNodes are known.

One authority of the federation's own signs the certificates of the SuperLink and of the gateway, and that of the key
by which clients know the server's instructions (Ed25519); clients trust that authority and no other. A SuperNode
proves who it is with a key of its own (ECDSA on P-384, in OpenSSH's form, which is what Flower reads); the SuperLink is
told the public half. Nothing that exists is overwritten unless it is renewed by name. Files that hold private keys are
readable by their owner only.
"""

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privacy import durable
from strategies.messages.instruction import PURPOSE

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397


def make_authority(folder: Path) -> bool:
    """Make the federation's authority, ``ca.key`` and ``ca.crt`` in ``folder``, unless it is there.

    Returns:
        whether it was made.
    """
    if (folder / "ca.key").exists():
        return False
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lacquer federation")])
    certificate = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write(folder / "ca.key", _private(key, serialization.PrivateFormat.PKCS8), secret=True)
    _write(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return True


def make_certificate(folder: Path, stem: str, names: Sequence[str], signer: Path) -> None:
    """Make ``STEM.key`` and ``STEM.crt`` in ``folder`` for a server that is reached by ``names``, and copy ``ca.crt``.

    Args:
        names: DNS names and IP addresses.
        signer: folder of :func:`make_authority`.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
    _certified(folder, stem, key, names[0], signer, (purpose, False), (alternatives, False))
    _write(folder / "ca.crt", (signer / "ca.crt").read_bytes())


def make_signing_key(folder: Path, signer: Path) -> None:
    """Make ``signing.key`` and ``signing.crt`` in ``folder``, for instructions to nodes and nothing else.

    Args:
        signer: folder of :func:`make_authority`.
    """
    purpose = x509.ExtendedKeyUsage([PURPOSE])
    _certified(folder, "signing", Ed25519PrivateKey.generate(), "lacquer instructions", signer, (purpose, True))


def make_operator_key(*folders: Path) -> None:
    """Make one secret and write it as ``operator.key`` into all ``folders``.

    What it is for: :mod:`server.network.operator_key`.
    """
    key = secrets.token_bytes(32)
    for folder in folders:
        _write(folder / "operator.key", key, secret=True)


def _certified(
    folder: Path,
    stem: str,
    key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey,
    name: str,
    signer: Path,
    *extensions: tuple[x509.ExtensionType, bool],
) -> None:
    """Write ``STEM.key`` and ``STEM.crt``, signed by the authority.

    Each extension comes with whether it is critical.
    """
    ca_key = serialization.load_pem_private_key((signer / "ca.key").read_bytes(), password=None)
    ca = x509.load_pem_x509_certificate((signer / "ca.crt").read_bytes())
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        _builder(subject, ca.subject, key.public_key(), CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    for extension, critical in extensions:
        made = made.add_extension(extension, critical=critical)
    _write(folder / f"{stem}.key", _private(key, serialization.PrivateFormat.PKCS8), secret=True)
    _write(folder / f"{stem}.crt", made.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def make_node_key(folder: Path) -> bytes:
    """Make a SuperNode's key pair, ``key`` and ``key.pub`` in ``folder``; returns the public half, one line."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    _write(folder / "key", _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
    _write(folder / "key.pub", public)
    return public


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey | Ed25519PublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # a client's clock may be a little behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file whole or not at all, never readable by others in between."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    durable.write(path, content, mode=0o600 if secret else 0o644)
