"""Identities for the long term, and the keys of one round that they sign.

An identity is an Ed25519 key of a party (RFC 8032). The federation's list of public identities is known to every party
beforehand; the server may hand it on but not make it up. For every round a party makes two X25519 keys (RFC 7748): one
to talk to other parties in private, one from which pairwise masks are derived. The second is revealed to the server if
the party drops out, so it must not be the first.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_NAME: Final = b"lacquer secagg 1 "


@dataclass(frozen=True)
class Announcement:
    """A party's message to all others at the beginning of a round.

    Attributes:
        party: its number in the federation, from 0.
        sealing_key, masking_key: public X25519 keys of this round.
        commitment: SHA-256 of the seed of its own mask, so that a wrong seed is found out.
        signature: of all that and of the session, by its identity.
    """

    party: int
    sealing_key: bytes
    masking_key: bytes
    commitment: bytes
    signature: bytes

    def to_bytes(self) -> bytes:
        return self.sealing_key + self.masking_key + self.commitment + self.signature

    @classmethod
    def from_bytes(cls, party: int, data: bytes) -> "Announcement":
        if len(data) != ANNOUNCEMENT_BYTES:
            raise ValueError(f"an announcement must have {ANNOUNCEMENT_BYTES} bytes, got {len(data)}")
        return cls(party, data[:32], data[32:64], data[64:96], data[96:])


ANNOUNCEMENT_BYTES: Final = 3 * KEY_BYTES + SIGNATURE_BYTES


def fresh_identity() -> bytes:
    """A new private identity, 32 bytes."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_identity(private: bytes) -> bytes:
    """The public half, for the federation's list."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def fresh_key() -> tuple[bytes, bytes]:
    """Private and public half of a key of one round."""
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public half of a key of one round."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def announce(
    identity: bytes, session: bytes, party: int, sealing_key: bytes, masking_key: bytes, seed: bytes
) -> Announcement:
    """Sign an announcement of this round's keys, which are public halves; ``seed`` is committed to, not revealed."""
    commitment = commitment_to(seed)
    body = _announced(session, party, sealing_key, masking_key, commitment)
    return Announcement(party, sealing_key, masking_key, commitment, _sign(identity, body))


def is_announced(announcement: Announcement, session: bytes, public: bytes) -> bool:
    """Whether the party's identity signed exactly this, in this session."""
    one = announcement
    body = _announced(session, one.party, one.sealing_key, one.masking_key, one.commitment)
    return _verified(public, one.signature, body)


def sign_survivors(identity: bytes, session: bytes, survivors: list[int]) -> bytes:
    """A party's word that these are the parties whose vectors are summed."""
    return _sign(identity, _survivors(session, survivors))


def survivors_signed(signature: bytes, session: bytes, survivors: list[int], public: bytes) -> bool:
    """Whether the party's identity signed exactly this list, in this session."""
    return _verified(public, signature, _survivors(session, survivors))


def commitment_to(seed: bytes) -> bytes:
    """SHA-256 of a seed of 256 random bits, which it hides."""
    return hashlib.sha256(_NAME + b"seed" + seed).digest()


def pair_key(private: bytes, public: bytes, session: bytes, one: int, other: int) -> bytes | None:
    """The key of the mask that two parties share; None if ``public`` is no key (its secret would be known to all)."""
    low, high = sorted((one, other))
    return _derived(private, public, session, f"mask {low} {high}")


def seal(private: bytes, public: bytes, session: bytes, sender: int, receiver: int, text: bytes) -> bytes | None:
    """Encrypt and authenticate for one receiver; None if ``public`` is no key. The key is used once: no nonce."""
    key = _derived(private, public, session, f"seal {sender} {receiver}")
    return None if key is None else ChaCha20Poly1305(key).encrypt(bytes(12), text, session)


def unseal(private: bytes, public: bytes, session: bytes, sender: int, receiver: int, sealed: bytes) -> bytes | None:
    """Decrypt what ``sender`` sealed for ``receiver``; None if it is not what they sealed."""
    key = _derived(private, public, session, f"seal {sender} {receiver}")
    if key is None:
        return None
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, session)
    except InvalidTag:
        return None


def _announced(session: bytes, party: int, sealing_key: bytes, masking_key: bytes, commitment: bytes) -> bytes:
    return _NAME + b"keys" + session + party.to_bytes(4, "big") + sealing_key + masking_key + commitment


def _survivors(session: bytes, survivors: list[int]) -> bytes:
    return _NAME + b"survivors" + session + b"".join(party.to_bytes(4, "big") for party in survivors)


def _derived(private: bytes, public: bytes, session: bytes, purpose: str) -> bytes | None:
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order: the shared secret would be zero
        return None
    return HKDF(SHA256(), KEY_BYTES, salt=session, info=_NAME + purpose.encode()).derive(shared)


def _sign(identity: bytes, body: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(identity).sign(body)


def _verified(public: bytes, signature: bytes, body: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, body)
    except (InvalidSignature, ValueError):
        return False
    return True
