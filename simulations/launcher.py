"""Drives ``flwr run`` for one run: a private Flower, an honest exit status, nothing left behind.

Plain ``flwr run`` starts a SuperLink that outlives it, shares it with every other checkout through a fixed port, keeps
the first caller's folder and environment, installs dependencies over the network at run time, and exits with 0 when the
run fails. Here every run has a SuperLink of its own: own ``FLWR_HOME``, own port, own empty working folder, a pinned
environment; the status is what the SuperLink says of the run at its end and what the ServerApp wrote itself; and
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
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from server.config import RunConfig
from simulations.hardware import Resources, resources
from simulations.processes import TAG, Family, free_port, running
from simulations.staging import App, packages_root, stage

log = logging.getLogger(__name__)

DRIVER = "flwr-simulation"  # the process that holds the ServerApp and drives Ray
_STATES_OF_SUCCESS = ("completed", "stopped-budget")

Follow = Callable[[Callable[[], bool]], None]
"""Watches a run: called with a function that says whether the run still goes on; returns when it does not."""


class RunFailed(RuntimeError):
    """The run did not complete; the message says why, in lines meant for people."""


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
    pending_timeout: float = 300.0,
) -> int:
    """Run ``config`` through Flower's simulation engine on Ray and wait for its end.

    Args:
        config: the resolved configuration; its paths are absolute.
        run_folder: existing folder of the run; gets ``config.toml`` and ``flower.log``, and what the ServerApp writes.
        follow: shows the run while it goes on.
        plugins: folder to look for a user's own modules in (default: the current one).
        app: the modules to run, for tests.
        pending_timeout: seconds within which the ServerApp must have started.

    Returns:
        0 if the run completed.

    Raises:
        RunFailed: if it did not; everything that was started is stopped by then, as it is when an exception
            (``KeyboardInterrupt`` too) passes through.
    """
    run_folder = run_folder.resolve()
    plan = resources(config)
    config_file = run_folder / "config.toml"
    config_file.write_text(config.to_toml())
    # A short path: Ray puts sockets in there, and a socket's path may have 107 bytes. macOS's temporary folder is long.
    root = Path(tempfile.mkdtemp(prefix="lq-", dir="/tmp" if os.path.isdir("/tmp") else None))
    tag = uuid.uuid4().hex
    family = Family(tag)
    try:
        output = run_folder / "flower.log"
        output.touch()
        folder = stage(
            root / "app",
            app or App(),
            config_file=config_file,
            run_folder=run_folder,
            log=output,
            plugins=(plugins or Path.cwd()).resolve(),
        )
        flower = _Flower(root, _environment(root, tag, plan), family, output)
        flower.start()
        flower.submit(folder, _federation(config, plan))
        deadline = time.monotonic() + pending_timeout
        follow(lambda: flower.goes_on(run_folder, deadline))
        return _verdict(flower.status(), run_folder, output)
    finally:
        left = family.stop(first=DRIVER)
        if left:
            log.error("these processes of the run would not end: %s", ", ".join(str(process.pid) for process in left))
        shutil.rmtree(root, ignore_errors=True)


class _Flower:
    """One private SuperLink and the run submitted to it."""

    def __init__(self, root: Path, environment: Mapping[str, str], family: Family, output: Path) -> None:
        self._home = root / "home"
        self._neutral = root / "cwd"
        self._log = root / "superlink.log"
        self._environment = {**environment, "FLWR_HOME": str(self._home)}
        self._family = family
        self._output = output
        self._started = False
        self._next_census = 0.0
        self._superlink: subprocess.Popen[bytes] | None = None
        self._run_id = ""

    def start(self) -> None:
        """Start the SuperLink and wait until it answers; another process may have taken the port meanwhile."""
        self._home.mkdir()
        self._neutral.mkdir()
        for _ in range(3):
            port = free_port()
            connection = {"address": f"127.0.0.1:{port}", "insecure": True}
            (self._home / "config.toml").write_text(
                tomli_w.dumps({"superlink": {"default": "lacquer", "lacquer": connection}})
            )
            with self._log.open("ab") as sink:
                self._superlink = subprocess.Popen(
                    [
                        sys.executable, "-m", "simulations.superlink", str(os.getpid()),
                        "--insecure", "--simulation", "--isolation", "subprocess",
                        "--disable-runtime-dependency-installation",
                        "--host", "127.0.0.1", "--port", str(port),
                    ],
                    cwd=self._neutral, env=self._environment, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                )  # fmt: skip
            if self._answers(port):
                return
        raise RunFailed(f"Flower's SuperLink did not start:\n{tail(self._log)}")

    def _answers(self, port: int, timeout: float = 120.0) -> bool:
        assert self._superlink is not None
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + timeout
        while self._superlink.poll() is None and time.monotonic() < deadline:
            try:
                with no_proxy.open(f"http://127.0.0.1:{port}/health", timeout=2.0):
                    return self._superlink.poll() is None  # else somebody else's SuperLink answered
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        return False

    def submit(self, app: Path, federation: str) -> None:
        """``flwr run``; Flower prints other lines before the JSON."""
        answer = self._flwr("run", str(app), "--federation-config", federation, "--format", "json")
        if not answer.get("success"):
            raise RunFailed(f"Flower did not accept the run: {answer.get('error-message', answer)}")
        self._run_id = str(answer["run-id"])

    def goes_on(self, run_folder: Path, start_by: float) -> bool:
        """Whether the run still goes on. Looks at processes, for asking Flower costs a second of a core."""
        assert self._superlink is not None
        if self._superlink.poll() is not None:
            return False
        if time.monotonic() < self._next_census:
            return True
        self._next_census = time.monotonic() + 1.0
        if running(self._family.members(), DRIVER):
            self._started = True
        elif self._started or read_status(run_folder).get("state"):
            return False
        if time.monotonic() > start_by and not read_status(run_folder).get("state"):
            raise RunFailed(
                f"Flower accepted the run, but its ServerApp did not start:\n{tail(self._output)}\n{tail(self._log)}"
            )
        return True

    def status(self) -> tuple[str, str]:
        """Flower's status of the run ("finished:completed" is the good one) and its details."""
        assert self._superlink is not None
        if self._superlink.poll() is not None:
            return "unknown", f"the SuperLink ended with exit code {self._superlink.returncode}:\n{tail(self._log)}"
        for _ in range(5):
            run = self._flwr("ls", "--run-id", self._run_id, "--format", "json")["runs"][0]
            if run["status"].startswith("finished"):
                break
            time.sleep(1.0)
        return run["status"], run.get("status-details") or ""

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        command = [str(_scripts() / "flwr"), *arguments]
        done = subprocess.run(
            command, cwd=self._neutral, env=self._environment, capture_output=True, text=True, timeout=300, check=False
        )
        start = done.stdout.find("{")
        if start < 0:
            raise RunFailed(f"flwr {arguments[0]} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        answer: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout[start:])[0]
        return answer


def _scripts() -> Path:
    """The folder of this environment's commands, which need not be on PATH."""
    return Path(sys.executable).parent


def _federation(config: RunConfig, plan: Resources) -> str:
    """Flower's federation settings such that exactly ``plan.workers`` actors exist.

    A node is a worker, or one client with ``simulation.clients-per-node = 1``.
    """
    nodes = config.clients if config.simulation.clients_per_node == 1 else plan.workers
    settings = {
        "num-supernodes": nodes,
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": plan.gpu_share,
        "init-args-num-cpus": plan.workers,
        "init-args-log-to-driver": "true",
    }
    if plan.gpus:
        settings["init-args-num-gpus"] = plan.gpus
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _environment(root: Path, tag: str, plan: Resources) -> dict[str, str]:
    """The environment of everything that is started: the caller's, less what would bend a run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "RAY_", "FLOWER_"))}
    path = [str(packages_root()), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if packages_root().name in ("site-packages", "dist-packages"):
        path = path[1:]
    loopback = "127.0.0.1,localhost"
    ray = root / "ray"
    ray.mkdir()
    environment |= {
        TAG: tag,
        "PATH": f"{_scripts()}{os.pathsep}{environment.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in path),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": loopback,
        "no_proxy": loopback,
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "RAY_TMPDIR": str(ray),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(512 * 2**20),
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        environment[f"{library}_NUM_THREADS"] = str(plan.threads)
    return environment


def read_status(run_folder: Path) -> dict[str, str]:
    """What the ServerApp says of itself (``status.json``, written atomically); empty before it says anything."""
    file = run_folder / "status.json"
    status: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    return status


def _verdict(status: tuple[str, str], run_folder: Path, output: Path) -> int:
    """0 if both Flower and the ServerApp say that the run completed.

    Raises:
        RunFailed: otherwise.
    """
    flower, details = status
    own = read_status(run_folder)
    if flower == "finished:completed" and own.get("state") in _STATES_OF_SUCCESS:
        return 0
    reason = own["message"] if own.get("state") == "failed" else details or f"Flower says {flower}"
    raise RunFailed(f"{reason}\n\nThe end of {output}:\n{tail(output)}")


def tail(file: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    if not file.is_file():
        return f"({file} was never written)"
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
