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
from dataclasses import dataclass, replace
from typing import Any

from client.data.sources import Texts
from client.data.spec import DataSettings
from privacy import checks
from privacy.randomness.rng import simulation_generator

DIGITS = string.digits
ALPHANUMERIC = string.ascii_uppercase + string.digits


@dataclass(frozen=True)
class Kind:
    """The form of a canary: ``prefix + secret + suffix``, the secret being `length` characters of `alphabet`.

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
    """The secrets that are planted, and where.

    Attributes:
        kind: key of :data:`KINDS`.
        count: different secrets; 0 plants nothing.
        copies: records each secret is planted in.
    """

    kind: str = "six-digit"
    count: int = 0
    copies: int = 1
    seed: int = 42

    def __post_init__(self) -> None:
        checks.one_of(tuple(KINDS), canaries_kind=self.kind)
        checks.integer_at_least(0, canaries=self.count, canaries_seed=self.seed)
        checks.integer_at_least(1, canaries_copies=self.copies)

    @staticmethod
    def of(data: DataSettings, seed: int) -> "Canaries":
        """The canaries of a data set."""
        return Canaries(data.canary_kind, data.canaries, data.canary_copies, seed)

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


def plant(texts: Texts, canaries: Canaries) -> Texts:
    """`texts` with every canary in `copies` records, at places drawn by the seed.

    A record of its own takes its label, client and unit from a record drawn at random, but where the texts name units
    it is a unit of its own: one unit per copy. An appended one stays within its record's client and unit, and no
    record gets two.

    Raises:
        ValueError: too few records to append to, or pairs of texts.
    """
    if not canaries.count:
        return texts
    if texts.pairs is not None:
        raise ValueError("canaries are planted into single texts; data.text-pair-column must be empty")
    planted = [KINDS[canaries.kind].text(secret) for secret in canaries.secrets for _ in range(canaries.copies)]
    draws = simulation_generator(canaries.seed, "canaries", "places")
    if KINDS[canaries.kind].own_record:
        hosts = draws.integers(0, len(texts), len(planted))
        added = replace(texts.select(hosts), texts=planted)
        if texts.units is not None:
            added = replace(added, units=[f"canary {number}" for number in range(len(planted))])
        return _joined(texts, added)
    if len(planted) > len(texts):
        raise ValueError(
            f"{len(planted)} canaries do not fit into {len(texts)} training records; lower data.canaries or "
            "data.canary-copies"
        )
    hosts = draws.permutation(len(texts))[: len(planted)]
    changed = list(texts.texts)
    for host, canary in zip(hosts, planted, strict=True):
        changed[host] += canary
    return replace(texts, texts=changed)


def _joined(first: Texts, second: Texts) -> Texts:
    def both(one: list[Any] | None, two: list[Any] | None) -> list[Any] | None:
        return None if one is None or two is None else [*one, *two]

    return replace(
        first,
        texts=[*first.texts, *second.texts],
        labels=both(first.labels, second.labels),
        clients=both(first.clients, second.clients),
        units=both(first.units, second.units),
    )
