"""Splitting a cohort over nodes: longest work first, so that no node is the one everybody waits for."""

import heapq
from collections.abc import Sequence

import numpy as np
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
