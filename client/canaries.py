"""Secrets planted into training text, to be looked for in the model later.

A canary is a short text with a random secret in it (Carlini et al., "The Secret Sharer", USENIX Security 2019, arXiv
1802.08232). Three kinds:

- ``six-digit``: a record of its own, ``My ID is 341752.``, as JFT (Shi et al. 2022, arXiv 2204.07667) plants ten times
  into WikiText-2. All share one prefix, so their ranks among all 10^6 numbers come from one table of probabilities.
- ``secret-id``: ten characters of A-Z0-9 appended to a record that is there already, ``... secret_id=7Q0ZK2M4PA``, as
  RLDP (arXiv 2507.22565) does with patients' narratives.
- ``id-record``: the same ten characters in a record of its own, ``secret_id=7Q0ZK2M4PA.``, for texts that are cut at
  the end, where an appended secret would be lost.

Secrets are drawn from the seed of the simulation: an auditor derives them again, nobody has to store them.
Every copy of a canary is a record. Under record-level privacy k copies of one secret are protected k times as weakly;
exposure of a canary with several copies therefore measures a group, and is stated with its number of copies.
"""

import string
from dataclasses import dataclass

from privacy import checks
from privacy.rng import simulation_generator

DIGITS = string.digits
ALPHANUMERIC = string.ascii_uppercase + string.digits


@dataclass(frozen=True)
class Kind:
    """How a canary reads: ``prefix + secret + suffix``, the secret being `length` characters of `alphabet`.

    Attributes:
        own_record: whether it is a record of its own, or is appended to a record that exists.
    """

    prefix: str
    suffix: str
    alphabet: str
    length: int
    own_record: bool

    def text(self, secret: str) -> str:
        """The canary with this secret."""
        return f"{self.prefix}{secret}{self.suffix}"


KINDS = {
    "six-digit": Kind("My ID is ", ".", DIGITS, 6, own_record=True),
    "secret-id": Kind(" secret_id=", "", ALPHANUMERIC, 10, own_record=False),
    "id-record": Kind("secret_id=", ".", ALPHANUMERIC, 10, own_record=True),
}


@dataclass(frozen=True)
class Canaries:
    """What is planted.

    Attributes:
        kind: key of :data:`KINDS`.
        count: different secrets; 0 plants nothing.
        copies: records each secret is planted in.
        seed: of the secrets and of the places.
    """

    kind: str = "six-digit"
    count: int = 0
    copies: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        checks.one_of(tuple(KINDS), canaries_kind=self.kind)
        checks.integer_at_least(0, canaries=self.count, canaries_seed=self.seed)
        checks.integer_at_least(1, canaries_copies=self.copies)

    @property
    def secrets(self) -> list[str]:
        """The planted secrets, all different, in order."""
        return secrets(self.kind, self.count, self.seed)


def secrets(kind: str, count: int, seed: int, stream: str = "canaries") -> list[str]:
    """`count` different random secrets; another `stream` gives secrets that were not planted, to compare with."""
    shape = KINDS[kind]
    if count > len(shape.alphabet) ** shape.length // 2:
        raise ValueError(f"canaries must be <= {len(shape.alphabet) ** shape.length // 2} of kind {kind}, got {count}")
    draws, found = simulation_generator(seed, stream, kind), dict[str, None]()
    while len(found) < count:
        letters = draws.integers(0, len(shape.alphabet), shape.length)
        found["".join(shape.alphabet[letter] for letter in letters)] = None
    return list(found)
