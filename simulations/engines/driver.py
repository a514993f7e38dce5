"""Flower's simulation engine in a process of its own, on a Ray that nobody else can reach.

    python -m simulations.engines.driver LAUNCHER FOLDER APP SIMULATION

This is the part of ``flower-simulation`` that is left without a SuperLink. ``flwr run`` would hand the app to a
SuperLink that lets every user of the host start code in its owner's name; here messages stay in this process and its
Ray, and there is no port to hand an app to.
"""

import importlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Context, RecordDict
from flwr.common.config import get_fused_config_from_dir
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType
from flwr.superlink.grid.inmemory_grid import InMemoryGrid
from ray._private.node import Node

from server import notice
from server.config.load import ConfigError, load
from server.config.schema import RunConfig
from server.run_folder.telemetry import Telemetry
from simulations.engines.cluster.look import check_nodes, join_cluster
from simulations.engines.processes import REFUSED, end_with_launcher
from simulations.engines.ray_actors import replace_dead_actors, tell_when_ready
from simulations.engines.staging import CLIENT_APP, SERVER_APP

RUN_ID = 1
SERVER_NODE = 1  # flwr.common.constant.SUPERLINK_NODE_ID
GRACE = 5.0
"""Seconds for Flower to end by itself behind the ServerApp."""


class PatientGrid(InMemoryGrid):
    """Flower's grid, on which a node is there once the actors live: so a round is not paid for that nobody works on."""

    ready = threading.Event()

    def get_node_ids(self) -> Iterable[int]:
        return super().get_node_ids() if self.ready.is_set() else []


def simulate(app: Path, simulation: dict[str, Any]) -> None:
    """Run a staged app to its end; what its ServerApp raises is raised here.

    Args:
        app: folder of :func:`simulations.engines.staging.stage`.
        simulation: see :func:`simulations.engines.flower.simulation`.
    """
    keys = get_fused_config_from_dir(app, {})
    config = load(Path(str(keys["config-file"])))
    if config.engine.ray_address:
        _enter_cluster(config, app, Path(str(keys["run-folder"])), simulation["backend_config"])
    else:
        leave_out_services()
    replace_dead_actors()
    tell_when_ready(PatientGrid.ready, config.engine.workers)
    engine: Any = importlib.import_module("flwr.simulation.run_simulation")  # the package has a function of that name
    engine.InMemoryGrid = PatientGrid
    engine.run_serverapp_th = _ending_with_it(engine.run_serverapp_th)
    run = Run.create_empty(RUN_ID)
    run.primary_task_id, run.federation_id = RUN_ID, NOOP_FEDERATION_ID
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, SERVER_NODE, RUN_ID
    engine._run_simulation(
        server_app_attr=SERVER_APP,
        client_app_attr=CLIENT_APP,
        app_dir=str(app),
        is_app=True,
        run=run,
        server_app_context=Context(RUN_ID, SERVER_NODE, node_config={}, state=RecordDict(), run_config=keys),
        exit_event=EventType.FLWR_SIMULATION_RUN_LEAVE,
        **simulation,
    )


def leave_out_services() -> None:
    """Start no web server and no autoscaler with a Ray of this process's own: a run asks nothing of either.

    They are two of the processes that a start waits for, and the web server listens.
    """
    node: Any = Node
    node.start_api_server = node.start_monitor = lambda self, **settings: None


def _enter_cluster(config: RunConfig, app: Path, folder: Path, backend: Mapping[str, Any]) -> None:
    """Join the cluster; where a node lacks what the run needs, end with 2 and a status that says so."""
    sys.path.insert(0, str(app))
    try:
        join_cluster(backend["init_args"])
        check_nodes(config, config.engine.ray_address, folder, backend["client_resources"])
    except ConfigError as error:
        with Telemetry(folder, tensorboard=False) as telemetry:
            telemetry.status("failed", str(error))
        leave(REFUSED)


def _ending_with_it(start: Callable[..., threading.Thread]) -> Callable[..., threading.Thread]:
    """Flower's start of the ServerApp, whose end is this process's: a failed round's actors may work on for minutes."""

    def end(server: threading.Thread, failures: Any) -> None:
        server.join()
        failed = list(failures.queue)  # of Flower's main loop, which takes the first where it still can
        time.sleep(GRACE)
        for failure in failed:
            traceback.print_exception(failure)
        leave(1 if failed else 0)

    def start_watched(**named: Any) -> threading.Thread:
        server = start(**named)
        watching = (server, named["exception_queue"])
        threading.Thread(target=end, args=watching, name="end-with-server", daemon=True).start()
        return server

    return start_watched


def leave(code: int) -> NoReturn:
    """End this process at once: the run is on disk, and Ray's threads may hold up the interpreter's own end."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def main(launcher: int, private: Path, app: Path, simulation: dict[str, Any]) -> NoReturn:
    """Simulate, and end with 0 or, after a traceback, with 1."""
    end_with_launcher(launcher, private)
    notice.listen()
    code = 1
    try:
        simulate(app, simulation)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        leave(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
