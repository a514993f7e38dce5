"""Puts a wrong certificate in the place of a server's: wrong_certificate.py SERVER AUTHORITY {expired,other,right}.

SERVER and AUTHORITY are folders of `lacquer certificates`. The certificate is for the same key, of the same authority,
but has expired or is for another name; `right` puts the right one back. For federations of your own.
"""

import datetime
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


def put(server: Path, authority: Path, kind: str) -> None:
    """Write ``server.crt`` with a wrong certificate, or the right one back.

    Its first content is kept as ``right.crt``.
    """
    kept = server / "right.crt"
    if not kept.exists():
        kept.write_bytes((server / "server.crt").read_bytes())
    if kind == "right":
        kept.replace(server / "server.crt")
        return
    right = x509.load_pem_x509_certificate(kept.read_bytes())
    key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    begins, ends = right.not_valid_before_utc, right.not_valid_after_utc
    if kind == "expired":
        begins, ends = begins - 9 * DAY, begins
    wrong = x509.CertificateBuilder(right.issuer, right.subject, right.public_key(), right.serial_number + 1)
    wrong = wrong.not_valid_before(begins).not_valid_after(ends)
    for extension in right.extensions:
        value = extension.value
        if kind == "other" and isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName([x509.DNSName("other.example")])
        wrong = wrong.add_extension(value, extension.critical)
    (server / "server.crt").write_bytes(wrong.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


if __name__ == "__main__":
    put(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
