"""Two sources of randomness that never mix.

- ``simulation_generator`` and ``torch_generator``: everything an experiment must be able to repeat (data splits, batch
  order, initial weights, simulated failures). Seeded, and the same numbers on every machine.
- ``SecureRandom``: the noise of differential privacy. Keyed by the operating system, it cannot be seeded, saved,
  copied or replayed. Whoever can replay noise can subtract it; two releases with the same noise differ by exact data.
"""

import hashlib
import json
import os
from numbers import Integral
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from jaxtyping import Float64, UInt64
from numpy.typing import NDArray

from privacy import checks

if TYPE_CHECKING:
    import torch  # where it is used: keys of a federation are made without it

# One key encrypts at most this many bytes: far below the 2^38 after which ChaCha20's block counter would wrap.
_BYTES_PER_KEY = 1 << 20
_ZEROS = bytes(_BYTES_PER_KEY)
_LOW_63 = (1 << 63) - 1
# Even, and small enough for the passes over one batch of normals to stay in the cache.
_NORMALS_AT_ONCE = 1 << 15


def _stream_entropy(seed: int, stream: tuple[int | str, ...]) -> int:
    checks.integer_at_least(0, seed=seed)
    # JSON tells 1 from "1" and ["a", "b"] from ["ab"]; a numpy integer is the same name as Python's.
    name = json.dumps([int(seed), *map(_json_name, stream)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")


def _json_name(part: object) -> int | str:
    if isinstance(part, str):
        return part
    if isinstance(part, bool) or not isinstance(part, Integral):
        raise ValueError(f"stream must be made of integers and strings, got {part!r}; name it by role and id")
    return int(part)


def simulation_generator(seed: int, *stream: int | str) -> np.random.Generator:
    """A PCG64 generator for the substream named by ``stream``, e.g. ``simulation_generator(7, "batches", client)``.

    Streams with different names are independent, so adding one does not shift another. Never for noise of
    differential privacy: PCG64 is predictable, and a seed replays it.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(_stream_entropy(seed, stream))))


def torch_generator(seed: int, *stream: int | str) -> "torch.Generator":
    """A torch generator for the substream named by ``stream``, on the CPU, where its numbers do not depend on the
    hardware.
    """
    import torch

    generator = torch.Generator(device="cpu")
    generator.manual_seed(_stream_entropy(seed, stream) >> 193)  # 63 bits
    return generator


class SecureRandom:
    """Cryptographic random numbers: ChaCha20 (RFC 8439) under a key from ``os.urandom``, a fresh one for every MiB.

    There is no state: keys live inside one call and are forgotten. So there is nothing to seed, save or restore, a
    forked process or a resumed virtual machine cannot repeat its parent's numbers, and learning the memory of a
    process later tells nothing about noise drawn earlier. Pickling and copying are refused all the same, because
    whoever tries to store it means to replay it.
    """

    __slots__ = ()

    def bytes(self, count: int) -> bytes:
        """``count`` cryptographically random bytes."""
        return self._fill(count).tobytes()

    def words(self, count: int) -> UInt64[np.ndarray, " count"]:
        """``count`` independent uniform 64-bit integers."""
        return self._fill(8 * count).view(np.uint64)

    def uniform(self, count: int) -> Float64[np.ndarray, " count"]:
        """``count`` independent numbers, uniform on the multiples of 2^-53 in [0, 1)."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> Float64[np.ndarray, " count"]:
        """``count`` independent standard normals in float64.

        Box-Muller on 63-bit uniforms, and each number is the sum of two such normals over sqrt(2) (the hardening of
        Holohan and Braghin 2021, arXiv 2107.10138v2). One Box-Muller pair alone has gaps: beyond radius 6 and within
        2^-13 of zero the possible radii lie further apart than the grid on which the noise is added, so an attacker
        could rule out inputs. With four uniforms behind every two numbers there are 2^252 combinations for 2^88 grid
        points, and the largest possible value is 13 instead of 9. It costs half the speed, which is affordable.
        """
        import torch

        checks.integer_at_least(0, count=count)
        out = np.empty(count + count % 2)
        for start in range(0, len(out), _NORMALS_AT_ONCE):
            part = out[start : start + _NORMALS_AT_ONCE]
            bits = torch.from_numpy(self._fill(16 * len(part)).view(np.int64)).view(4, -1)
            uniform = ((bits >> 1) & _LOW_63).to(torch.float64).add_(0.5).mul_(2.0**-63)
            radius = uniform[:2].log_().neg_().sqrt_()  # sqrt(-2 ln u) / sqrt(2): the sum of two has variance 1
            angle = uniform[2:].mul_(2 * np.pi)
            half = len(part) // 2
            torch.from_numpy(part[:half]).copy_((radius * angle.cos()).sum(dim=0))
            torch.from_numpy(part[half:]).copy_((radius * angle.sin()).sum(dim=0))
        return out[:count]

    @staticmethod
    def _fill(count: int) -> NDArray[np.uint8]:
        out = np.empty(count, dtype=np.uint8)
        for start in range(0, count, _BYTES_PER_KEY):
            part = out.data[start : start + _BYTES_PER_KEY]
            stream = Cipher(ChaCha20(os.urandom(32), nonce=bytes(16)), mode=None).encryptor()
            stream.update_into(memoryview(_ZEROS)[: len(part)], part)
        return out

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("SecureRandom cannot be pickled or copied: stored noise could be replayed; make a new one")
