"""Runs one configuration on either engine and waits for its end: an honest outcome, nothing left behind.

Plain ``flwr run`` starts a SuperLink that outlives it, that every user of the host may hand code to, and that says 0
when the run fails. Here a run is one process with a Ray of its own (:mod:`simulations.engines.driver`), in a private
folder and a pinned environment; the outcome is how that process ended and what the ServerApp wrote itself; and
everything that was started is stopped, after success, failure, Ctrl-C and SIGTERM alike.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.names import FLOWER_LOG, LEDGER_FILE, PROCESS_LOG, write_config
from server.run_folder.telemetry import Telemetry, read_status
from simulations.engines.cluster.head import RayHead, cluster_nodes
from simulations.engines.cluster.nodes import allocate_workers
from simulations.engines.flower import RunFailed, environment, simulation, tail
from simulations.engines.hardware import available_cores, resources, with_workers
from simulations.engines.processes import REFUSED, Family, alive, deaf
from simulations.engines.staging import App, stage

log = logging.getLogger(__name__)

_RAY_TOO_SLOW = "The current node timed out during startup"
_AGENT_TOO_SLOW = "Timed out waiting for file"  # raylet's last words, 15 s after it started its Python agent
_TOO_BUSY = (
    "Ray did not start within the time that it allows itself (30 s, its parts 15 s), so the machine is too busy or too "
    "small; nothing was trained or released; try again later, or with --engine inprocess"
)
STARTS, PAUSE = 3, 10.0
"""How often Ray is started before a busy host is given up, and seconds between two starts."""
STATES_OF_SUCCESS = ("completed", "stopped-budget")

Follow = Callable[[Callable[[], bool]], None]
"""Watches a run: called with a function that says whether the run still runs; returns when it does not."""


def wait_quietly(is_alive: Callable[[], bool]) -> None:
    """The ``Follow`` that shows nothing."""
    while is_alive():
        time.sleep(0.5)


def run_flower(
    config: RunConfig,
    run_folder: Path,
    *,
    follow: Follow = wait_quietly,
    plugins: Path | None = None,
    app: App | None = None,
    keys: Mapping[str, str | bool] | None = None,
) -> None:
    """Run ``config`` through Flower's simulation engine on Ray and wait for its end.

    Args:
        config: the resolved configuration; its paths are absolute.
        run_folder: existing folder of the run; gets ``config.toml`` and ``flower.log``, and what the ServerApp writes.
        follow: shows the run while it lasts.
        plugins: folder to look for a user's own modules in (default: the current one).
        app: the modules to run, for tests.
        keys: further keys for the ServerApp: ``resume`` resumes the run in ``run_folder``.

    Raises:
        ConfigError: a cluster has no room for the run, or a node of it lacks what the run needs; nothing was spent.
        RunFailed: if the run did not complete. Everything that was started is stopped by then, as it is when another
            exception (``KeyboardInterrupt`` too) passes through.
    """
    run_folder, app, address = run_folder.resolve(), app or App(), config.engine.ray_address
    plan = allocate_workers(config, cluster_nodes(address)) if address else resources(config)
    if address:  # this host's process is the server's, whatever its nodes are
        plan = replace(plan, threads=min(plan.threads, available_cores()))
    config = with_workers(config, plan.workers)
    config_file, output = write_config(run_folder, config), run_folder / FLOWER_LOG

    def start() -> None:
        # The cluster's other hosts read the staged app too: it lies beside the run, on the storage that they share.
        with private_processes(run_folder if address else None) as (root, family):
            folder = stage(
                root / "app",
                app,
                config_file=config_file,
                run_folder=run_folder,
                log=output,
                plugins=(plugins or Path.cwd()).resolve(),
                keys=keys,
            )
            surroundings = environment(root, family.tag, plan, preload=app.client, ray_address=address)
            arguments = [str(folder), json.dumps(simulation(config, plan))]
            head = RayHead(address) if address else None
            _run_process(
                "simulations.engines.driver", arguments, root, family, surroundings, follow, run_folder, output, head
            )

    for attempt in range(1, STARTS + 1):
        try:
            return start()
        except RayTooSlow:
            if attempt == STARTS or (run_folder / LEDGER_FILE).exists():  # a ledger is resumed, not begun again
                raise
            with Telemetry(run_folder, tensorboard=False) as telemetry:
                telemetry.status("preparing", "the host is too busy for Ray to start; trying again")
            time.sleep(PAUSE)


def run_child(
    config: RunConfig,
    run_folder: Path,
    *,
    follow: Follow = wait_quietly,
    plugins: Path | None = None,
    keys: Mapping[str, str | bool] | None = None,
    module: str = "simulations.engines.inprocess",
    threads: int | None = None,
    gpu: str | None = None,
) -> None:
    """Run ``config`` in process, in a child process of its own, and wait for its end.

    Arguments and errors: see :func:`run_flower`; the log is ``inprocess.log``. ``module`` is what the child executes,
    ``threads`` how many CPU threads it gets (default: all cores), ``gpu`` the only GPU that it sees (default: all).
    """
    run_folder = run_folder.resolve()
    output = run_folder / PROCESS_LOG
    seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    plan = resources(config)
    if threads is not None:
        plan = replace(plan, threads=threads)
    write_config(run_folder, with_workers(config, plan.workers))
    with private_processes() as (root, family):
        surroundings = environment(root, family.tag, plan) | seen
        arguments = [
            str(run_folder),
            str((plugins or Path.cwd()).resolve()),
            *([json.dumps(dict(keys))] if keys else []),
        ]
        _run_process(module, arguments, root, family, surroundings, follow, run_folder, output)


def _run_process(
    module: str,
    arguments: Sequence[str],
    root: Path,
    family: Family,
    surroundings: Mapping[str, str],
    follow: Follow,
    run_folder: Path,
    output: Path,
    head: RayHead | None = None,
) -> None:
    """Run a module that holds the ServerApp, and judge the run by how it ended."""
    with output.open("ab") as sink:
        begun = sink.tell()
        command = [sys.executable, "-m", module, str(os.getpid()), str(root), *arguments]
        child = subprocess.Popen(
            command, cwd=root, env=surroundings, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
    family.lead(child.pid)
    ray = head or RayDaemons(family, child.pid, root)

    def goes_on() -> bool:
        ray.check()
        return child.poll() is None

    follow(goes_on)
    code = child.wait()
    own = read_status(run_folder)
    if code == REFUSED and own is not None and own.state == "failed":
        raise ConfigError(own.message)
    judge(run_folder, output, completed=code == 0, otherwise=f"it ended with exit code {code}", begun=begun)


class RayTooSlow(RunFailed):
    """The host was too busy for Ray to start; nothing was trained."""


class RayDaemons:
    """Notices that a daemon of Ray's has died although its driver has not: Flower would wait for it for ever.

    Args:
        family: of the run; its processes are so seen while it lives, which :meth:`Family.stop` needs.
        driver: process id of whoever started the daemons.
        root: private folder of the run, with the daemons' logs.
    """

    NAMES = ("gcs_server", "raylet")
    GRACE = 5.0
    """Seconds that a driver which ends its Ray may take to end as well."""

    def __init__(self, family: Family, driver: int, root: Path) -> None:
        self._family, self._driver, self._root = family, psutil.Process(driver), root
        self._known: dict[psutil.Process, str] = {}
        self._next_look, self._gone_since = 0.0, 0.0

    def check(self) -> None:
        """Look once a second at most.

        Raises:
            RunFailed: a daemon is gone, and the driver goes on.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + 1.0
        for process in self._family.members():
            with suppress(psutil.Error):  # it ends at this moment
                if process.ppid() == self._driver.pid and process.name() in self.NAMES:
                    self._known[process] = process.name()
        dead = [f"{name} (process {process.pid})" for process, name in self._known.items() if not alive(process)]
        self._gone_since = (self._gone_since or now) if dead else 0.0
        if dead and now - self._gone_since > self.GRACE and alive(self._driver):
            logs = self._root.glob("ray/ray/session_*/logs/raylet.err")
            if any(_AGENT_TOO_SLOW in path.read_text(errors="replace") for path in logs):
                raise RayTooSlow(_TOO_BUSY)
            raise RunFailed(
                f"Ray's {' and '.join(dead)} ended while the run went on; it may have been killed, perhaps for want of "
                "memory. What was released before is kept"
            )


@contextmanager
def private_processes(parent: Path | None = None) -> Iterator[tuple[Path, Family]]:
    """A private folder and a family of processes that both end with the block; the folder is in ``parent`` if given."""
    # A short path: Ray puts sockets in there, and a socket's path may have 107 bytes. macOS's temporary folder is long.
    short = Path("/tmp") if os.path.isdir("/tmp") else None
    root = Path(tempfile.mkdtemp(prefix="lq-", dir=parent or short))
    family = Family(uuid.uuid4().hex)
    try:
        yield root, family
    finally:
        with deaf():
            left = family.stop()
        if left:
            log.error("these processes of the run would not end: %s", ", ".join(str(process.pid) for process in left))
        shutil.rmtree(root, ignore_errors=True)


def judge(run_folder: Path, output: Path, *, completed: bool, otherwise: str, begun: int = 0) -> None:
    """Hold the engine's word against the ServerApp's own; ``begun`` is where in ``output`` this run, resumed, began.

    Raises:
        RunFailed: unless both say that the run completed.
    """
    own = read_status(run_folder)
    if completed and own is not None and own.state in STATES_OF_SUCCESS:
        return
    end = f"The end of {output}:\n{tail(output)}"
    if _RAY_TOO_SLOW in output.read_bytes()[begun:].decode(errors="replace"):
        raise RayTooSlow(f"{_TOO_BUSY}\n\nIts log: {output}", end)
    if own is not None and own.state == "failed":  # it has said why; the traceback is for who looks for it
        raise RunFailed(f"{own.message}\n\nIts log, with the traceback: {output}", end)
    raise RunFailed(f"{otherwise}\n\n{end}")
