"""Joins a Ray cluster, and sees to it that every node that may hold a worker finds what the run needs.

A node whose shared storage is not mounted would fail each message that its workers get, behind the first charge. So
every one is looked at by a small task before the ServerApp begins.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from client.models.files import locate
from client.settings import cache_folder
from privacy import durable
from server.config.load import ConfigError
from server.config.schema import RunConfig
from simulations.engines.cluster.nodes import Node
from simulations.engines.staging import packages_root

PATIENCE = 180.0
"""Seconds in which a node must answer; one that is busy takes half a minute to start a process."""

FOR_ACTORS = (
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME",
    "TOKENIZERS_PARALLELISM", "GOMP_SPINCOUNT",
)  # fmt: skip
"""Of the caller's environment: an actor otherwise has that of the `ray start` of its node."""


def join_cluster(init: Mapping[str, Any]) -> None:
    """Connect this process to the cluster in ``RAY_ADDRESS``; Flower takes the connection that is there.

    Tasks and actors import what this process can import.

    Args:
        init: further arguments of ``ray.init``.
    """
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"), str(packages_root()))))
    told = {name: os.environ[name] for name in FOR_ACTORS if name in os.environ}
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path, **told}}, include_dashboard=False, **init)


def check_nodes(config: RunConfig, address: str, folder: Path, actor: Mapping[str, float]) -> None:
    """Refuse nodes that lack a folder of the run's, or whose GPU torch cannot use.

    Args:
        address: of the cluster, which this process has joined.
        folder: where the nodes write; exists.
        actor: what Ray sets aside for one, see :func:`simulations.engines.flower.simulation`.

    Raises:
        ConfigError: naming every such node and what it lacks.
    """
    cache = Path(config.data.cache or cache_folder())
    with _marked(folder) as written, _marked(cache) as marker:
        paths = {str(packages_root()): f"the code in {packages_root()}"}
        paths |= {str(written): f"output {folder}", str(marker): f"data.cache = {str(cache)!r}"}
        if not config.model.name.startswith("random:") and os.path.isdir(model := locate(config.model.name)[0]):
            paths[model] = f"model.name = {config.model.name!r} in {model}"
        lacking = [f"{node}: {said}" for node, said in _asked(paths, config.engine.device, actor)]
    if lacking:
        raise ConfigError(
            f"the Ray cluster at {address}: not every node finds what the run needs, the same "
            "environment and shared storage at the same paths (docs/scale.md):\n" + "\n".join(lacking)
        )


@contextmanager
def _marked(folder: Path) -> Iterator[Path]:
    """A file of a new name in a folder, for as long as the nodes look for it."""
    durable.new_folder(folder)
    marker = folder / f".seen-by-nodes-{os.getpid()}-{os.urandom(4).hex()}"
    durable.write(marker, "")
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def _asked(paths: Mapping[str, str], device: str, actor: Mapping[str, float]) -> list[tuple[str, str]]:
    """What each node that may hold a worker lacks, as name and words; ``paths`` with what people call them."""
    look, asked, nodes = ray.remote(_looker()), dict[Any, str](), cast(Any, ray.nodes)
    for listed in nodes():
        node = Node.of(listed)
        if not listed["Alive"] or node.cores < actor["num_cpus"] or (actor["num_gpus"] and node.gpus < 1):
            continue
        there = NodeAffinitySchedulingStrategy(listed["NodeID"], soft=False)
        on_gpu = device if actor["num_gpus"] else ""
        options = {"num_cpus": 0, "num_gpus": actor["num_gpus"], "max_retries": 0, "scheduling_strategy": there}
        asked[look.options(**options).remote(dict(paths), on_gpu)] = node.name
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE)
    lacking = [(asked[each], f"no answer within {PATIENCE:.0f} s; is it lost, or its GPU taken?") for each in silent]
    for each in answered:
        try:
            lacking += [(asked[each], said) for said in ray.get(each)]
        except RayError as error:
            lacking.append((asked[each], str(error).strip().splitlines()[-1]))
    return lacking


def _looker() -> Callable[[dict[str, str], str], list[str]]:
    """What a node is asked: a nested function, which Ray sends whole, to nodes that do not find our code too."""

    def look(paths: dict[str, str], device: str) -> list[str]:
        import os

        missing = [f"{name} is not there" for path, name in paths.items() if not os.path.exists(path)]
        if device and not missing:
            from client.models.devices import choose_device

            try:
                choose_device(device)
            except ValueError as error:
                return [str(error)]
        return missing

    return look
