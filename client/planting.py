"""Canaries into training texts; what they are: :mod:`client.canaries`."""

from dataclasses import replace
from typing import Any

from client.canaries import KINDS, Canaries
from client.sources import Texts
from privacy.rng import simulation_generator


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
