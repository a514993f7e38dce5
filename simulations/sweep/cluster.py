"""The cells of a sweep as tasks on a Ray cluster, each with a share of a GPU of its own.

A task starts the cell's process on its node, as a sweep on one host does, in the folder that the nodes share. So the
rule for ledgers is the same: a cell that is cut off keeps its account, and its next attempt gets a fresh folder.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import ray

from server.config.schema import RunConfig
from simulations.engines.cluster.head import cluster_nodes
from simulations.engines.cluster.look import check_nodes, join_cluster
from simulations.engines.cluster.nodes import spread_processes
from simulations.engines.flower import RunFailed, cluster_environment
from simulations.engines.launcher import Follow, run_child
from simulations.sweep.cells import CELL_MODULE, Cell


class OnCluster:
    """Launches cells on a cluster, which this process joins.

    Attributes:
        plan: how many cells run at once, and what each has.
    """

    def __init__(self, address: str, cells: list[Cell], jobs: int, folder: Path) -> None:
        """Ask the cluster what it has, join it, and look at its nodes.

        Args:
            address: of its head, HOST:PORT.
            cells: to be run; at least one.
            jobs: cells at once; 0 takes one for each GPU, or core, of the cluster.
            folder: of the sweep, which the nodes share.

        Raises:
            ConfigError: the cluster cannot be joined, has no room, or a node lacks what a cell needs.
        """
        some = next((cell.config for cell in cells if cell.config.engine.device != "cpu"), cells[0].config)
        self.plan = spread_processes("--jobs", jobs, some.engine.device, cluster_nodes(address), len(cells))
        os.environ.update(cluster_environment(address))
        join_cluster({"log_to_driver": False})
        each = {"num_cpus": self.plan.cores, "num_gpus": self.plan.gpu_share}
        check_nodes(some, address, folder, each)
        self._task = ray.remote(run_cell).options(max_retries=0, **each)

    def __call__(
        self, cell: Cell, folder: Path, plugins: Path, keys: Mapping[str, str | bool] | None, follow: Follow
    ) -> None:
        """Run a cell wherever Ray finds room; errors as of :func:`simulations.engines.launcher.run_child`."""
        task = self._task.remote(cell.config, folder, plugins, keys)
        try:
            follow(lambda: not ray.wait([task], timeout=0)[0])
        except BaseException:
            ray.cancel(task, force=True)  # with it ends what it has started on its node
            raise
        if failure := ray.get(task):
            raise RunFailed(failure)


def run_cell(config: RunConfig, folder: Path, plugins: Path, keys: Mapping[str, str | bool] | None) -> str:
    """Run a cell on a node, in a process that sees the GPU that Ray gave it; why it failed, or nothing."""
    try:
        run_child(config, folder, plugins=plugins, keys=keys, module=CELL_MODULE, threads=1)
    except RunFailed as failure:
        return str(failure)
    return ""
