"""Certificates for TLS and keys by which SuperNodes are known.

One authority of the federation's own signs the certificates of the SuperLink and of the gateway; clients trust that
authority and no other. A SuperNode proves who it is with a key of its own (ECDSA on P-384, in OpenSSH's form, which is
what Flower reads); the SuperLink is told the public half. Nothing that exists is overwritten unless it is renewed by
name. Files that hold private keys are readable by their owner only.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from privacy import durable

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397


def authority(folder: Path) -> bool:
    """Make ``ca.key`` and ``ca.crt`` in ``folder`` if they are not there; whether they were made."""
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


def certificate(folder: Path, stem: str, names: Sequence[str], signer: Path) -> None:
    """Make ``STEM.key`` and ``STEM.crt`` in ``folder`` for a server that is reached by ``names``, and copy ``ca.crt``.

    Args:
        names: DNS names and IP addresses.
        signer: folder of :func:`authority`.
    """
    ca_key = serialization.load_pem_private_key((signer / "ca.key").read_bytes(), password=None)
    ca = x509.load_pem_x509_certificate((signer / "ca.crt").read_bytes())
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    made = (
        _builder(subject, ca.subject, key.public_key(), CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write(folder / f"{stem}.key", _private(key, serialization.PrivateFormat.PKCS8), secret=True)
    _write(folder / f"{stem}.crt", made.public_bytes(serialization.Encoding.PEM))
    _write(folder / "ca.crt", (signer / "ca.crt").read_bytes())


def node_key(folder: Path) -> bytes:
    """Make ``key`` and ``key.pub`` in ``folder``; the public half, one line."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    _write(folder / "key", _private(key, serialization.PrivateFormat.OpenSSH), secret=True)
    _write(folder / "key.pub", public)
    return public


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
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


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Whole or not at all, and never readable by others in between."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    durable.write(path, content, mode=0o600 if secret else 0o644)
