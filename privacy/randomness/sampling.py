"""The draw of those who take part: cohorts of clients, batches of records, by a keyed generator that nobody outside can
predict.

Amplification by sampling holds only against somebody who does not know the cohort, so cohorts come from ChaCha20 under
a 32-byte secret, not from a seed. The secret belongs to the run: kept in a file that only its owner can read, it lets
a resumed run draw the SAME cohort for a round that was sampled but not yet charged. Drawing afresh instead would give
whoever can interrupt a run a choice between cohorts.

Poisson sampling is exact: id i joins if its own 64-bit word is less than rate * 2^64, so all inclusions are
independent and of probability ``rate`` to the last bit of the float (rates below 2^-11 may lose less than 2^-64, to the
safe side). Geometric gaps would touch only the drawn ids, but they need a logarithm, hence a rounded probability;
a million words take milliseconds.

Cyclic sampling first leaves the group whose turn it is. A unit's group is its own 64-bit word modulo the number of
groups, under a key that knows neither round nor attempt: it is the same for the whole run, resumed or not. (Which group
somebody is in may be known to everyone: no guarantee leans on its secrecy, nor on groups of equal chance.)

Where some units are held out (:class:`~privacy.events.PartPoisson`), a cohort leaves the part that it is drawn from:
whatever is asked of it, a unit of the other part is never asked.

Where units lie with several holders (nodes with many clients each), every holder draws its own with a secret of its
own. All inclusions are still independent and of probability ``rate``, so the cohort is that of :class:`Poisson` over
all of them; only its ids are in nobody's hands (:class:`RemoteSampler`).
"""

import contextlib
import hashlib
import hmac
import math
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import NoReturn, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from jaxtyping import Int64

from privacy import checks, durable
from privacy.errors import CorruptRun
from privacy.events import CyclicPoisson, PartPoisson, Poisson
from privacy.randomness.rng import simulation_generator

_SECRET_BYTES = 32
_WORDS_AT_ONCE = 1 << 17
_HEADER = "lacquer cohort secret 1"
_RARE = 100 * math.log(2.0)
"""How unlikely it is that more are drawn than :func:`most_drawn`, as minus a logarithm."""

SEAL = object()
"""What only this module may hand to a :class:`Cohort`."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Cohort:
    """The units that were drawn, and how: what is asked of these ids is charged as this sampling.

    A sampler makes it, nothing else.

    Attributes:
        ids: sorted, of units in [0, population), or of records in [0, records) where these are sampled; private, and
            read-only: nobody joins a cohort that was drawn. Empty where holders draw their own units, and nobody has
            the ids of all.
        sampling: how they were drawn.
        label, round, attempt: of the release they were drawn for, and how often it was charged before.
        insecure: whether anyone with a seed can draw them again.
        held: most units that each holder can have drawn of its own; empty where the ids are here.
    """

    ids: Int64[np.ndarray, " cohort"]
    sampling: Poisson
    label: str
    round: int
    attempt: int
    insecure: bool
    seal: InitVar[object]
    held: tuple[int, ...] = ()

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("a Cohort is made by CohortSampler.draw only; its ids are charged as they were drawn")
        self.ids.setflags(write=False)

    @property
    def most(self) -> int:
        """Most units that its sum can be over."""
        return sum(self.held) if self.held else len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Cohort(ids withheld, {self.sampling}, {self.label} {self.round}, attempt {self.attempt})"


class CohortSampler:
    """Draws cohorts with a secret key.

    Equal secret, sampling, round, attempt and label give equal cohorts; else independent ones.

    The label is that of the release (as in the ledger): two releases of one round are accounted as two samplings only
    if they are, so they need two labels, or one joint release. Make a sampler with :meth:`create` or :meth:`load`. It
    cannot be pickled: the secret leaves a process by :meth:`save` only.

    Attributes:
        insecure: True if made from a seed; the run must then be stamped NOT PRIVATE.
    """

    __slots__ = ("_secret", "insecure")

    def __init__(self, secret: bytes, insecure: bool) -> None:
        if len(secret) != _SECRET_BYTES:
            raise ValueError(f"secret must have {_SECRET_BYTES} bytes, got {len(secret)}; use CohortSampler.create()")
        self._secret = secret
        self.insecure = insecure

    @classmethod
    def create(cls) -> "CohortSampler":
        """A sampler with a new secret from the operating system."""
        return cls(secrets.token_bytes(_SECRET_BYTES), insecure=False)

    @classmethod
    def insecure_from_seed(cls, seed: int) -> "CohortSampler":
        """A sampler that anyone with the seed can predict: for tests. No amplification may be claimed with it."""
        checks.integer_at_least(0, seed=seed)
        return cls(hashlib.sha256(f"insecure cohort seed {int(seed)}".encode()).digest(), insecure=True)

    @classmethod
    def load(cls, path: Path | str) -> "CohortSampler":
        """The sampler whose secret :meth:`save` wrote.

        Raises:
            ValueError: others can read the file.
            CorruptRun: the file holds no secret of this kind.
        """
        path = Path(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ValueError(
                f"mode of {path} must give no right to group or others, got {mode:o}; chmod 600 it; whoever "
                "has read it knows the cohorts, which the guarantee takes to be secret"
            )
        header, _, secret = path.read_text(encoding="ascii", errors="replace").strip().partition("\n")
        with contextlib.suppress(ValueError):
            if header == _HEADER and len(decoded := bytes.fromhex(secret)) == _SECRET_BYTES:
                return cls(decoded, insecure=False)
        raise CorruptRun(f"{path} holds no cohort secret: without it other cohorts would be drawn; restore it")

    def save(self, path: Path | str) -> None:
        """Write the secret to ``path``, readable by its owner only; atomic, and on the disk when this returns."""
        if self.insecure:
            raise ValueError("insecure samplers must not be saved as secrets, got one made from a seed; keep the seed")
        durable.write(Path(path), f"{_HEADER}\n{self._secret.hex()}\n", mode=0o600)

    def draw(self, sampling: Poisson, round: int, attempt: int = 0, *, label: str = "round") -> Cohort:
        """One cohort drawn as ``sampling`` says; ValueError for cyclic sampling without a turn."""
        ids = self.poisson(sampling.rows, sampling.rate, round, attempt, label=label)
        if isinstance(sampling, CyclicPoisson):
            if sampling.turn is None:
                raise ValueError(f"turn must be a number to draw a cohort, got None in {sampling}")
            ids = ids[self.group_of(sampling.population, sampling.groups)[ids] == sampling.turn % sampling.groups]
        if isinstance(sampling, PartPoisson):
            out = held_out(sampling.population, sampling.share, sampling.seed)
            if int((out == sampling.held_out).sum()) != sampling.members:
                raise ValueError(f"members must be the number of units in that part, got {sampling}")
            ids = ids[out[ids] == sampling.held_out]
        return Cohort(ids, sampling, label, int(round), int(attempt), self.insecure, SEAL)

    def poisson(
        self, n: int, rate: float, round: int, attempt: int = 0, *, label: str = "round"
    ) -> Int64[np.ndarray, " cohort"]:
        """Draw sorted ids of a Poisson sample; each of 0..n-1 joins with probability ``rate``, independently of all
        others and all rounds.
        """
        checks.integer_at_least(1, n=n)
        checks.probability(rate=rate)
        if rate == 1.0:
            return np.arange(n, dtype=np.int64)
        threshold = np.uint64(int(rate * 2.0**64))  # exact but for the floor: a power of two only moves the exponent
        stream = self._words(f"poisson {n} {float(rate).hex()}", round, attempt, label, min(n, _WORDS_AT_ONCE))
        drawn = [np.flatnonzero(next(stream)[: n - start] < threshold) + start for start in range(0, n, _WORDS_AT_ONCE)]
        return np.concatenate(drawn).astype(np.int64, copy=False)

    def group_of(self, n: int, groups: int) -> Int64[np.ndarray, " n"]:
        """The group, in [0, groups), of each of 0..n-1: drawn once for all rounds, independently of all others."""
        checks.integer_at_least(1, n=n, groups=groups)
        words = next(self._words(f"groups {groups} of {n}", 0, 0, "groups", n))
        return (words % np.uint64(groups)).astype(np.int64)

    def _words(
        self, purpose: str, round: int, attempt: int, label: str, block: int
    ) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint64]]]:
        """Uniform words under a key of their own, ``block`` at a time; the same on every machine."""
        checks.integer_at_least(0, round=round, attempt=attempt)
        name = f"{purpose} round {int(round)} attempt {int(attempt)} label {label}".encode()
        key = hmac.new(self._secret, name, hashlib.sha256).digest()
        stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
        while True:
            yield np.frombuffer(stream.update(bytes(8 * block)), dtype="<u8").astype(np.uint64, copy=False)

    def __repr__(self) -> str:
        return f"CohortSampler({'INSECURE' if self.insecure else 'secret withheld'})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("CohortSampler cannot be pickled or copied, it holds the cohort secret; save() it")


def held_out(population: int, share: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether each unit is held out, bool ``[population]``: by its number, ``share`` and ``seed``, and nothing else."""
    return np.asarray(simulation_generator(seed, "held-out-units").random(population) < share)


def split_units(sampling: Poisson, share: float, seed: int, held_out_rate: float) -> tuple[PartPoisson, PartPoisson]:
    """The part that is trained on, drawn at the rate of ``sampling``, and the part that is held out.

    Raises:
        ValueError: one of them would be empty.
    """
    out = int(held_out(sampling.population, share, seed).sum())
    if not 0 < out < sampling.population:
        raise ValueError(
            f"a share of {share:g} of {sampling.population} units must leave some in both parts, got {out} held out"
        )
    own = (sampling.population, sampling.unit)
    trained = PartPoisson(sampling.rate, *own, False, share, seed, sampling.population - out)
    return trained, PartPoisson(held_out_rate, *own, True, share, seed, out)


class RemoteSampler:
    """Stands for the samplers of several holders, each of which draws among units of its own: nobody here has the ids.

    Args:
        units: public number of every holder's units.

    Attributes:
        insecure: False: the holders' secrets are not made from a seed.
    """

    insecure = False

    def __init__(self, units: Sequence[int]) -> None:
        checks.not_empty(units=units)
        checks.integer_at_least(1, least_units=min(units))
        self.units = tuple(units)

    def draw(self, sampling: Poisson, round: int, attempt: int = 0, *, label: str = "round") -> Cohort:
        """A stand-in for the cohort that the holders draw when they are asked for this release.

        Raises:
            ValueError: the population is not all of their units.
        """
        if sampling.population != sum(self.units):
            raise ValueError(
                f"population must be {sum(self.units)}, the units of all holders, got {sampling.population}"
            )
        held, nobody = tuple(most_drawn(units, sampling.rate) for units in self.units), np.empty(0, dtype=np.int64)
        return Cohort(nobody, sampling, label, int(round), int(attempt), self.insecure, SEAL, held)


def most_drawn(units: int, rate: float) -> int:
    """The most of ``units`` that a Poisson sample holds, but with probability 2^-100.

    Chernoff's bound, P(X >= k) <= exp(-n KL(k/n || rate)) for k >= n rate, at the least k for which it says so.
    """
    checks.integer_at_least(1, units=units)
    checks.probability(rate=rate)
    low, high = math.ceil(units * rate), units + 1  # more than `high` - 1 is impossible, whatever the bound says
    while low < high:
        middle = (low + high) // 2
        if units * _divergence(middle / units, rate) >= _RARE:
            high = middle
        else:
            low = middle + 1
    return max(1, low - 1)


def _divergence(p: float, q: float) -> float:
    """KL(p || q) of two coins, in nats, for p >= q > 0."""
    tail = 0.0 if p == 1.0 else (1.0 - p) * math.log((1.0 - p) / (1.0 - q))
    return p * math.log(p / q) + tail
