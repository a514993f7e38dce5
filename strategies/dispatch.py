"""Who is asked in a round: the nodes that are there, and what each of them is given of the cohort."""

import time
from collections.abc import Sequence

import numpy as np
from flwr.serverapp import Grid
from jaxtyping import Int64

from strategies.shards import split


class RoundFailed(RuntimeError):
    """A round that cannot go on: too few nodes, or too few sound replies. Its charge stands."""


def connected(grid: Grid, nodes: int, patience: float) -> list[int]:
    """The first ``nodes`` node ids, sorted. The ServerApp may start before they are registered.

    Raises:
        RoundFailed: fewer are there after ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    while len(ids := sorted(grid.get_node_ids())) < nodes:
        if time.monotonic() > deadline:
            raise RoundFailed(f"{len(ids)} of {nodes} nodes connected within {patience:g} s")
        time.sleep(0.1)
    return ids[:nodes]


def asked(grid: Grid, nodes: int | tuple[int, ...], patience: float) -> tuple[list[int], frozenset[int]]:
    """The nodes of a round, and those of them that are known to be away: their shares fail without being sent.

    Workers of a simulation are interchangeable and waited for. A deployed client is its node; nobody waits for it.
    """
    if isinstance(nodes, int):
        return connected(grid, nodes, patience), frozenset()
    return list(nodes), frozenset(nodes) - frozenset(grid.get_node_ids())


def shares(
    cohort: Int64[np.ndarray, " n"],
    nodes: Sequence[int],
    work: Sequence[float] | np.ndarray | None,
    clients_per_node: int | None,
) -> list[tuple[int, Int64[np.ndarray, " k"]]]:
    """Node and clients of every message; nobody is asked to train no client.

    Args:
        cohort: sorted ids.
        nodes: ids.
        work: expected work of each client of the population; None counts all alike.
        clients_per_node: None splits the cohort over the nodes; 1 gives every client a message to its own node.
    """
    if clients_per_node is not None:
        return [(nodes[client % len(nodes)], cohort[i : i + 1]) for i, client in enumerate(cohort.tolist())]
    split_over = zip(nodes, split(cohort, len(nodes), work), strict=True)
    return [(node, clients) for node, clients in split_over if len(clients)]
