"""Who trusts whom with what in a silo, and what its guarantee does not cover: the words of its privacy.json."""

from server.config import RunConfig

TRUST = (
    "the silo itself: it holds the records, draws the batches and adds the noise; the guarantee is against everyone "
    "who sees only what the run releases (the adapter, its metrics, its ledger)"
)
NOT_COVERED = (
    "choices made by looking at other runs on the same data (hyper-parameters, seeds, the best of several models): "
    "every such run spends an epsilon of its own, and they add up",
    "the number of protected units, the names of the labels, the texts' largest length and every setting: they are "
    "taken as public",
    "the held-out validation and test records: they are not among the protected, and their metrics are published",
    "which units were in a file before these and the training records were drawn from it",
    "one person behind several units: k units together are protected by a k-fold group guarantee only",
    "the base model: what it was trained on before",
    "anything computed on the data outside this ledger, such as the prepared files, logs and timing inside the silo",
    "that a silo fails: a record that makes the whole of a step raise shows in that",
)


def not_covered(config: RunConfig, *, steered: bool) -> tuple[str, ...]:
    """What the guarantee of a silo does not cover, with what this run does with the held-out records.

    ``steered``: whether its controller or optimizer reads their loss.
    """
    found = list(NOT_COVERED)
    if config.public.warm_start_epochs:
        found.append(
            f"{config.public.training_fraction:.0%} of the held-out validation records: they are trained on WITHOUT "
            "noise before the first step (public.warm-start-epochs), so the adapter may hold what they say"
        )
    if steered:
        found.append(
            "the loss on held-out validation records after every step: it is read without noise and steers what is "
            f"released ({config.strategy.controller}, {config.strategy.optimizer})"
        )
    return tuple(found)
