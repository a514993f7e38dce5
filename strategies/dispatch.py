"""Who is asked in a round: the nodes that are there, and what each of them is given of the cohort.

Splitting a cohort over nodes: longest work first, so that no node is the one everybody waits for.
"""

import heapq
import time
from collections.abc import Sequence

import numpy as np
from flwr.serverapp import Grid
from jaxtyping import Int64


def split(
    clients: Int64[np.ndarray, " n"], nodes: int, work: Sequence[float] | np.ndarray | None = None
) -> list[Int64[np.ndarray, " k"]]:
    """The cohort as ``nodes`` disjoint, sorted arrays of client ids of about equal work.

    Greedy, longest first (Graham 1969): the largest share is at most 4/3 of the best possible. Ties go to the node with
    the lower number, so the split is a function of its arguments.

    Args:
        clients: ids of the cohort.
        nodes: >= 1.
        work: expected work of every client of the population, by id; None counts every client alike.
    """
    if nodes < 1:
        raise ValueError(f"nodes must be >= 1, got {nodes}; no node is connected")
    cost = np.ones(len(clients)) if work is None else np.asarray(work)[clients].astype(np.float64)
    shares: list[list[int]] = [[] for _ in range(nodes)]
    load = [(0.0, node) for node in range(nodes)]
    for position in np.argsort(-cost, kind="stable"):
        total, node = heapq.heappop(load)
        shares[node].append(int(clients[position]))
        heapq.heappush(load, (total + float(cost[position]), node))
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


class RoundFailed(RuntimeError):
    """A round that cannot be finished: too few nodes, or too few sound replies. Its charge stands."""


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
