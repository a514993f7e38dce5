"""What a run needs of Flower: the settings of its simulation engine, and the environment."""

import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from server.config.schema import RunConfig
from simulations.engines.hardware import Resources
from simulations.engines.processes import TAG
from simulations.engines.staging import packages_root


class RunFailed(RuntimeError):
    """The run did not complete; the message says why, in lines meant for people.

    Attributes:
        log: the end of its log, for who asks for it.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def scripts() -> Path:
    """The folder of this environment's commands, which need not be on PATH."""
    return Path(sys.executable).parent


def simulation(config: RunConfig, plan: Resources) -> dict[str, Any]:
    """Number of nodes and Ray's resources for Flower's simulation engine, such that ``plan.workers`` actors exist.

    A node is a worker, or one client with ``simulation.clients-per-node = 1``.

    Returns:
        keyword arguments of Flower's ``run_simulation``, in types that JSON has.
    """
    nodes = config.clients if config.simulation.clients_per_node == 1 else plan.workers
    init: dict[str, Any] = {"log_to_driver": True}
    if not config.engine.ray_address:
        init |= {"num_cpus": plan.workers} | ({"num_gpus": plan.gpus} if plan.gpus else {})
    client = {"num_cpus": plan.cores, "num_gpus": plan.gpu_share}
    return {"num_supernodes": nodes, "backend_config": {"client_resources": client, "init_args": init}}


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, less what would bend a child process, with our packages on its path.

    What is left out: settings of Flower, Ray and the interpreter, colours and the size of a terminal, the notebook's
    plotting backend. The locale is that of a plain UTF-8 terminal.
    """
    kept = {
        key: value
        for key, value in environment.items()
        if key in _KEPT or not (key in _TERMINAL or key.startswith(("FLWR_", "RAY_", "FLOWER_", "PYTHON", "LC_")))
    }
    path: Iterable[str] = [str(packages_root()), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    if packages_root().name in ("site-packages", "dist-packages"):
        path = list(path)[1:]
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in path)
    return kept | {"PYTHONPATH": path, "LC_ALL": "C.UTF-8", "NO_COLOR": "1", "TERM": "dumb"}


_KEPT = {"PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
_TERMINAL = {
    "CLICOLOR", "CLICOLOR_FORCE", "COLORTERM", "COLUMNS", "FORCE_COLOR", "LANG", "LANGUAGE", "LINES", "MPLBACKEND",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE",
}  # fmt: skip


def environment(root: Path, tag: str, plan: Resources, preload: str = "", ray_address: str = "") -> dict[str, str]:
    """The environment of everything that a run starts: the caller's, less what would bend a run.

    Args:
        root: private folder of the run, which nobody else can enter.
        tag: by which the run's processes are found.
        preload: module that Ray's workers import ahead of their work.
        ray_address: of a Ray cluster that runs already; "" lets the run have a Ray of its own.
    """
    environment = clean_environment(os.environ)
    loopback = "127.0.0.1,localhost"
    ray = root / "ray"
    ray.mkdir()
    environment |= {
        TAG: tag,
        "PATH": f"{scripts()}{os.pathsep}{environment.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": loopback,
        "no_proxy": loopback,
        "FLWR_HOME": str(root / "home"),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_TMPDIR": str(ray),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # the actors are the job, not background work beside it
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_prestart_worker_first_driver": "0",  # they lack the actors' environment, so they would never be used
        "RAY_enable_worker_prestart": "0",
        "RAY_preload_python_modules": preload,  # the actors import while the ServerApp prepares, not after
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(512 * 2**20),
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    path = filter(None, (str(_shadow(root)), environment["PYTHONPATH"]))  # an empty entry would be the current folder
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment |= cluster_environment(ray_address) if ray_address else _own_ray(ray)
    for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        environment[f"{library}_NUM_THREADS"] = str(plan.threads)
    if "OMP_WAIT_POLICY" not in environment:
        # OpenMP's threads wait for each other in a loop, for milliseconds. Two threads beside another job on two cores
        # took 12 to 25 times the time of a private step; with a shorter loop they share the cores.
        environment.setdefault("GOMP_SPINCOUNT", "2000")
    return environment


def _shadow(root: Path) -> Path:
    """A folder, first on the path of a run's processes, in which a slow module that none of them needs is missing.

    Ray imports jsonschema, and that a parser of international web addresses where it is installed, as it is beside
    JupyterLab. The parser builds its grammar at import: two thirds of the time of every one of Ray's dozen processes,
    which have 15 seconds to start. jsonschema goes without it where its import fails.
    """
    folder = root / "shadow"
    folder.mkdir()
    (folder / "rfc3987_syntax.py").write_text('raise ImportError("left out: no process of a run needs it")\n')
    return folder


def _own_ray(folder: Path) -> dict[str, str]:
    """A Ray that listens on the loopback interface alone and obeys nobody without the token in ``folder``.

    Whoever may talk to a Ray can run code as its owner; without these two settings that is every host of the network
    and every user of this one.
    """
    token = folder / "token"
    with open(token, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: a node's address is 127.0.0.1, on Linux too
    }


def cluster_environment(address: str) -> dict[str, str]:
    """A cluster that is there already, by the caller's token; `RAY_AUTH_MODE=disabled` is the caller's own word."""
    own = {key: value for key, value in os.environ.items() if key.startswith("RAY_AUTH_")}
    # A driver that has lost its cluster's head ends after so many seconds, and the run with it, which can be resumed.
    return {"RAY_AUTH_MODE": "token", **own, "RAY_ADDRESS": address, "RAY_gcs_rpc_server_reconnect_timeout_s": "10"}


def tail(file: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    if not file.is_file():
        return f"({file} was never written)"
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
