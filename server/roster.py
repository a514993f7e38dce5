"""Which node is which client of a deployed run: settled at its start, the same until its end.

The population of the privacy statement is the number of nodes in the federation. It is public, so it stands in the
configuration (``clients``), and the run starts when exactly so many are connected: more would leave open who takes
part. A node that goes away stays a client; in a round that samples it, it contributes zero. A node that joins later
takes part in the next run. Flower knows a node by its key, so it has the same number after a restart of either side.
"""

import json
import os
import time
from pathlib import Path

from flwr.serverapp import Grid

from privacy.errors import CorruptRun
from server.config import ConfigError
from strategies.dispatch import RoundFailed

ROSTER_FILE = "nodes.json"


def roster(
    run_folder: Path, grid: Grid, clients: int, *, patience: float = 600.0, settle: float = 5.0
) -> tuple[int, ...]:
    """The node of every client, in the order of the clients' ids; kept in the run folder from the first time on.

    Args:
        run_folder: of the run.
        grid: connection to the nodes.
        clients: how many nodes there must be.
        patience: seconds to wait for them.
        settle: seconds for which their number must stay the same.

    Raises:
        ConfigError: more nodes are connected than the configuration has clients.
        RoundFailed: fewer are, after ``patience`` seconds.
        CorruptRun: the run folder's list is not of this run.
    """
    path = run_folder / ROSTER_FILE
    if path.exists():
        return _kept(path, clients)
    deadline, since, seen = time.monotonic() + patience, time.monotonic(), -1
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) != seen:
            seen, since = len(nodes), time.monotonic()
        if len(nodes) == clients and time.monotonic() - since >= settle:
            break
        if len(nodes) > clients and time.monotonic() - since >= settle:
            raise ConfigError(
                f"clients = {clients}, but {len(nodes)} nodes are connected; set clients = {len(nodes)}, the size of "
                "the federation, or stop the nodes that are not part of it"
            )
        if time.monotonic() > deadline:
            raise RoundFailed(f"{len(nodes)} of {clients} nodes connected within {patience:g} s")
        time.sleep(min(0.5, settle or 0.1))
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"nodes": nodes}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return tuple(nodes)


def _kept(path: Path, clients: int) -> tuple[int, ...]:
    try:
        nodes = tuple(int(node) for node in json.loads(path.read_text(encoding="utf-8"))["nodes"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; restore it") from error
    if len(nodes) != clients:
        raise CorruptRun(f"{path} names {len(nodes)} nodes, the run has {clients} clients; restore it")
    return nodes
