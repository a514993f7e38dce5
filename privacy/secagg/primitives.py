"""The arithmetic of a secure sum: masks that vanish in the total, and secrets shared among the parties.

Masks. A key of 32 bytes becomes a vector that nobody without the key can tell from uniform numbers modulo 2^b: ChaCha20
(RFC 8439) under a key that is used for one vector only, so its nonce is zero. Each value takes four bytes of the
stream, of which the low b bits count; 2^b divides 2^32, so they are uniform, and all sums may wrap around at 2^32 until
they are reduced.

Shares. Shamir's secret sharing (1979, CACM 22(11)) over the prime field of 2^31 - 1, many words at once. A secret of 32
bytes is 16 words of 16 bits, each the constant term of its own random polynomial of degree t - 1. Party x in 1..n holds
the values at x; any t of them give the secret, t - 1 say nothing about it. Products of two field elements fit into 62
bits, so numpy does the arithmetic exactly.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from jaxtyping import Int64, UInt8, UInt32

from privacy import checks
from privacy.randomness.rng import SecureRandom

KEY_BYTES: Final = 32
MOST_VALUES: Final = 1 << 33
"""ChaCha20's counter wraps after 2^38 bytes under one key."""

PRIME: Final = (1 << 31) - 1
SECRET_BYTES: Final = 32
WORDS: Final = SECRET_BYTES // 2
SHARE_BYTES: Final = 4 * WORDS


def mask(key: bytes, length: int) -> UInt32[np.ndarray, " length"]:
    """The mask of a key."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key of a mask must have {KEY_BYTES} bytes, got {len(key)}")
    if length > MOST_VALUES:
        raise ValueError(f"length of a mask must be <= {MOST_VALUES}, got {length}")
    out = np.empty(4 * length, dtype=np.uint8)
    stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
    stream.update_into(bytes(4 * length), out.data)
    return out.view("<u4").astype(np.uint32, copy=False)


def pack_values(values: UInt32[np.ndarray, " n"], modulus_bits: int) -> UInt8[np.ndarray, " bytes"]:
    """The values modulo 2^b as ``b / 8`` bytes each, little-endian."""
    return values.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)[:, : modulus_bits // 8].ravel()


def unpack_values(data: UInt8[np.ndarray, " bytes"], modulus_bits: int) -> UInt32[np.ndarray, " n"]:
    """Read numbers modulo 2^b from the bytes of :func:`pack_values`."""
    width = modulus_bits // 8
    out = np.zeros((len(data) // width, 4), dtype=np.uint8)
    out[:, :width] = data.reshape(-1, width)
    return out.reshape(-1).view("<u4").astype(np.uint32, copy=False)


def to_ring(values: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
    """Reduce integers modulo 2^32."""
    return (values & 0xFFFFFFFF).astype(np.uint32)


def centre_values(values: UInt32[np.ndarray, " n"], modulus_bits: int) -> Int64[np.ndarray, " n"]:
    """The representatives in [-2^(b-1), 2^(b-1)) of numbers modulo 2^b."""
    half = 1 << (modulus_bits - 1)
    reduced = values.astype(np.int64) & ((1 << modulus_bits) - 1)
    return np.where(reduced >= half, reduced - (1 << modulus_bits), reduced)


def split(secret: bytes, threshold: int, parties: int) -> list[bytes]:
    """One share of :data:`SHARE_BYTES` bytes for each of the parties 1..n, in order.

    Args:
        secret: 32 bytes.
        threshold: t, how many shares give it back, 1 <= t <= n.
        parties: n, below the prime.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret must have {SECRET_BYTES} bytes, got {len(secret)}")
    checks.integer_at_least(1, threshold=threshold)
    checks.integer_at_least(threshold, parties=parties)
    words = np.frombuffer(secret, "<u2").astype(np.int64)
    points = np.arange(1, parties + 1, dtype=np.int64)[:, None]
    values = np.zeros((parties, WORDS), dtype=np.int64)
    for coefficients in (*_field_elements(threshold - 1), words):  # Horner, from the highest coefficient down
        values = (values * points + coefficients) % PRIME
    return [row.tobytes() for row in values.astype("<u4")]


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret that exactly these shares, by party, lie on a polynomial with; None if that is no secret of 32 bytes.

    Shares that were made up or damaged give something else, or None: the caller must know its secret when it sees it.
    """
    points = sorted(shares)
    if any(len(shares[point]) != SHARE_BYTES for point in points):
        return None
    values = np.stack([np.frombuffer(shares[point], "<u4").astype(np.int64) for point in points])
    if int(values.max()) >= PRIME:
        return None
    words = np.zeros(WORDS, dtype=np.int64)
    for weight, row in zip(weights_at_zero(points), values, strict=True):
        words = (words + weight * row) % PRIME
    return None if int(words.max()) > 0xFFFF else words.astype("<u2").tobytes()


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Lagrange's weights: the value at 0 is their sum with the values at ``points``, which are distinct and not 0."""
    weights = []
    for one in points:
        above = below = 1
        for other in points:
            if other != one:
                above = above * other % PRIME
                below = below * (other - one) % PRIME
        weights.append(above * pow(below, PRIME - 2, PRIME) % PRIME)
    return weights


def _field_elements(rows: int) -> Int64[np.ndarray, "rows words"]:
    """Uniform elements of the field, by rejection of the one 31-bit number too many."""
    random, mask = SecureRandom(), np.uint64(PRIME)
    values = random.words(rows * WORDS) & mask
    while (again := np.flatnonzero(values == mask)).size:
        values[again] = random.words(again.size) & mask
    return values.astype(np.int64).reshape(rows, WORDS)
