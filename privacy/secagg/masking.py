"""Masks: a key of 32 bytes becomes a vector that nobody without the key can tell from uniform numbers modulo 2^b.

ChaCha20 (RFC 8439) under a key that is used for one vector only, so its nonce is zero. Each value takes four bytes of
the stream, of which the low b bits count; 2^b divides 2^32, so they are uniform, and all sums may wrap around at 2^32
until they are reduced.
"""

from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from jaxtyping import Int64, UInt8, UInt32

KEY_BYTES: Final = 32
MOST_VALUES: Final = 1 << 33
"""ChaCha20's counter wraps after 2^38 bytes under one key."""


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


def packed(values: UInt32[np.ndarray, " n"], modulus_bits: int) -> UInt8[np.ndarray, " bytes"]:
    """The values modulo 2^b as ``b / 8`` bytes each, little-endian."""
    return values.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)[:, : modulus_bits // 8].ravel()


def unpacked(data: UInt8[np.ndarray, " bytes"], modulus_bits: int) -> UInt32[np.ndarray, " n"]:
    """The inverse of :func:`packed`."""
    width = modulus_bits // 8
    out = np.zeros((len(data) // width, 4), dtype=np.uint8)
    out[:, :width] = data.reshape(-1, width)
    return out.reshape(-1).view("<u4").astype(np.uint32, copy=False)


def to_ring(values: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
    """Integers modulo 2^32."""
    return (values & 0xFFFFFFFF).astype(np.uint32)


def centred(values: UInt32[np.ndarray, " n"], modulus_bits: int) -> Int64[np.ndarray, " n"]:
    """The representatives in [-2^(b-1), 2^(b-1)) of numbers modulo 2^b."""
    half = 1 << (modulus_bits - 1)
    reduced = values.astype(np.int64) & ((1 << modulus_bits) - 1)
    return np.where(reduced >= half, reduced - (1 << modulus_bits), reduced)
