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


def connected(grid: Grid, nodes: int, patience: float, *, settle: float = 0.0) -> list[int]:
    """All node ids, sorted, as soon as there are ``nodes`` or more. The ServerApp may start before they are registered.

    Args:
        grid: connection to the nodes.
        nodes: how many to wait for.
        patience: seconds to wait.
        settle: seconds for which their number must have stayed the same.

    Raises:
        RoundFailed: there are fewer after ``patience`` seconds, or their number does not settle.
    """
    deadline, since, seen = time.monotonic() + patience, time.monotonic(), -1
    while True:
        ids = sorted(grid.get_node_ids())
        if len(ids) != seen:
            seen, since = len(ids), time.monotonic()
        if seen >= nodes and time.monotonic() - since >= settle:
            return ids
        if time.monotonic() > deadline:
            raise RoundFailed(f"{seen} of {nodes} nodes connected within {patience:g} s")
        time.sleep(0.1)


def asked(grid: Grid, nodes: int | tuple[int, ...], patience: float) -> tuple[list[int], frozenset[int]]:
    """The nodes of a round, and those of them that are known to be away: their shares fail without being sent.

    Workers of a simulation are interchangeable and waited for. A deployed client is its node; nobody waits for it.
    """
    if isinstance(nodes, int):
        return connected(grid, nodes, patience)[:nodes], frozenset()
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
