"""Workers that the nodes of a Ray cluster hold, and the share of a node that each gets.

The host that submits a run is often a head without a GPU, or without a CPU to give away. So everything is counted on
the nodes, as Ray itself counts them when it looks for a place for an actor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.config.load import ConfigError
from server.config.schema import RunConfig
from simulations.engines.hardware import Resources, gpu_fraction
from simulations.engines.host import MEMORY_A_WORKER


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster, by what it gives to actors.

    Attributes:
        name: for people.
        cores: CPUs; 0 for a head that only manages.
        memory: bytes.
    """

    name: str
    cores: float
    gpus: float = 0.0
    memory: float = math.inf

    @staticmethod
    def of(listed: Mapping[str, Any]) -> "Node":
        """A living node as ``ray.nodes()`` lists it."""
        name = " ".join(filter(None, (listed.get("NodeManagerHostname"), listed.get("NodeManagerAddress"))))
        has = listed["Resources"]
        return Node(name, has.get("CPU", 0.0), has.get("GPU", 0.0), has.get("memory", math.inf))

    def room(self, cores: int, to_a_gpu: int) -> int:
        """Actors that fit here, of so many cores each; ``to_a_gpu`` of them share a GPU, 0 needs none."""
        fit = int(self.cores // cores)
        return min(fit, int(self.gpus) * to_a_gpu) if to_a_gpu else fit


def living_nodes(listed: Iterable[Mapping[str, Any]]) -> list[Node]:
    """The nodes of ``ray.nodes()``, less those that are gone: they stay on its list, with no resources."""
    return [Node.of(each) for each in listed if each["Alive"] and each["Resources"]]


def allocate_workers(config: RunConfig, nodes: Sequence[Node]) -> Resources:
    """Workers for a run on a cluster: as asked (``engine.workers``), or as many as its nodes and the cohort employ.

    Raises:
        ConfigError: as of :func:`spread_processes`.
    """
    engine = config.engine
    return spread_processes("engine.workers", engine.workers, engine.device, nodes, math.ceil(config.expected_cohort))


def spread_processes(key: str, asked: int, device: str, nodes: Sequence[Node], most: int) -> Resources:
    """Processes over a cluster, and what each gets.

    All get the same, because Flower asks Ray for one kind of actor: the largest share of a GPU with which all find
    room, then the most cores. Where GPUs are used, nobody is on a node without.

    Args:
        key: what a person sets ``asked`` with.
        asked: processes; 0 takes one for each GPU, or core with memory for it, and not more than ``most``.
        device: ``engine.device``.

    Raises:
        ConfigError: ``device`` is "cuda" and no node has a GPU, or they find no room.
    """
    has_gpus = any(node.gpus >= 1 for node in nodes)
    if device == "cuda" and not has_gpus:
        raise ConfigError(
            f"engine.device = 'cuda': none of the cluster's nodes has a GPU to give ({_listed(nodes)}); start Ray with "
            "--num-gpus on those that have, or set engine.device = 'cpu'"
        )
    on_gpus = has_gpus and device != "cpu"
    workers = asked or max(1, min(_employed(nodes, on_gpus), most))

    def room(cores: int, to_a_gpu: int) -> int:
        return sum(node.room(cores, to_a_gpu) for node in nodes)

    to_a_gpu = int(on_gpus)
    if on_gpus:
        to_a_gpu = next((share for share in range(1, workers + 1) if room(1, share) >= workers), workers)
    if (most := room(1, to_a_gpu)) < workers:
        raise ConfigError(
            f"{key} = {workers}: the cluster has room for {most}, one a core"
            f"{' of a node with a GPU' if on_gpus else ''} ({_listed(nodes)}); ask for fewer, or start Ray with more"
        )
    cores = max(c for c in range(1, int(max(node.cores for node in nodes)) + 1) if room(c, to_a_gpu) >= workers)
    gpus = int(sum(node.gpus for node in nodes)) if on_gpus else 0
    return Resources(workers, cores, gpus, gpu_fraction(to_a_gpu), cores)


def _employed(nodes: Sequence[Node], on_gpus: bool) -> int:
    """One worker a GPU, else one a core that has memory for it."""
    if on_gpus:
        return sum(node.room(1, 1) for node in nodes)
    return sum(min(node.room(1, 0), int(min(node.memory / (MEMORY_A_WORKER * 2**30), node.cores))) for node in nodes)


def _listed(nodes: Sequence[Node]) -> str:
    return "; ".join(f"{node.name}: {node.cores:g} CPUs, {node.gpus:g} GPUs" for node in nodes) or "no node"
