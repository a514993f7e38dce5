"""Runs one configuration on either engine and waits for its end: an honest outcome, nothing left behind.

Plain ``flwr run`` starts a SuperLink that outlives it, shares it with every other checkout through a fixed port, keeps
the first caller's folder and environment, installs dependencies over the network at run time, and exits with 0 when the
run fails. Here every run has a SuperLink of its own: own ``FLWR_HOME``, own port, own empty working folder, a pinned
environment; the outcome is what the SuperLink says of the run at its end and what the ServerApp wrote itself; and
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from server.config.schema import RunConfig
from server.run_folder.names import FLOWER_LOG, PROCESS_LOG, write_config
from server.run_folder.telemetry import read_status
from simulations.engines.ahead import FlowerAhead
from simulations.engines.flower import PrivateFlower, RunFailed, environment, federation, tail
from simulations.engines.hardware import resources, with_workers
from simulations.engines.processes import Family, deaf
from simulations.engines.staging import App, stage

log = logging.getLogger(__name__)

_RAY_TOO_SLOW = "The current node timed out during startup"
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
    pending_timeout: float = 300.0,
    ahead: FlowerAhead | None = None,
) -> None:
    """Run ``config`` through Flower's simulation engine on Ray and wait for its end.

    Args:
        config: the resolved configuration; its paths are absolute.
        run_folder: existing folder of the run; gets ``config.toml`` and ``flower.log``, and what the ServerApp writes.
        follow: shows the run while it lasts.
        plugins: folder to look for a user's own modules in (default: the current one).
        app: the modules to run, for tests.
        keys: further keys for the ServerApp: ``resume`` resumes the run in ``run_folder``.
        pending_timeout: seconds within which the ServerApp must have started.
        ahead: Flower's commands, if they were started while the run was checked.

    Raises:
        RunFailed: if the run did not complete. Everything that was started is stopped by then, as it is when another
            exception (``KeyboardInterrupt`` too) passes through.
    """
    run_folder = run_folder.resolve()
    plan, app = resources(config), app or App()
    config = with_workers(config, plan.workers)
    config_file, output = write_config(run_folder, config), run_folder / FLOWER_LOG
    output.touch()
    begun = output.stat().st_size
    address = config.engine.ray_address
    # The cluster's other hosts read the staged app too: it lies beside the run, on the storage that they share.
    with ahead or FlowerAhead() as commands, private_processes(run_folder if address else None) as (root, family):
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
        flower = PrivateFlower(root, surroundings, family, output, commands)
        flower.start()
        flower.submit(folder, federation(config, plan))
        deadline = time.monotonic() + pending_timeout
        follow(lambda: flower.goes_on(deadline))
        state, details = flower.status()
        completed, otherwise = state == "finished:completed", details or f"Flower says {state}"
        judge(run_folder, output, completed=completed, otherwise=otherwise, begun=begun)


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
    with private_processes() as (root, family), output.open("ab") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), str(root), str(run_folder),
             str((plugins or Path.cwd()).resolve()), *([json.dumps(dict(keys))] if keys else [])],
            cwd=root, env=environment(root, family.tag, plan) | seen, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
        follow(lambda: child.poll() is None)
        judge(run_folder, output, completed=child.wait() == 0, otherwise=f"it ended with exit code {child.returncode}")


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
    reason = own.message if own is not None and own.state == "failed" else otherwise
    if _RAY_TOO_SLOW in output.read_bytes()[begun:].decode(errors="replace"):
        reason = (
            "Ray did not start within the 30 s that it allows itself, so the machine is too busy or too small; nothing "
            "was trained or released; try again later, or with --engine inprocess"
        )
    raise RunFailed(f"{reason}\n\nThe end of {output}:\n{tail(output)}")
