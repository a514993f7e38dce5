"""One private Flower: a SuperLink of its own port, folder and environment, and the one run submitted to it."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from server.config.schema import RunConfig
from simulations.engines.ahead import SUPERLINK, Ahead, FlowerAhead, inherited
from simulations.engines.hardware import Resources
from simulations.engines.processes import DRIVER, TAG, Family, free_port, running

_PATIENCE = 300.0
"""Seconds that a command of Flower may take on a busy machine."""


class RunFailed(RuntimeError):
    """The run did not complete; the message says why, in lines meant for people."""


class PrivateFlower:
    """One private SuperLink and the run submitted to it."""

    def __init__(
        self, root: Path, environment: Mapping[str, str], family: Family, output: Path, ahead: FlowerAhead
    ) -> None:
        self._root = root
        self._ahead = ahead
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
            self._superlink = self._ahead.superlink.call(
                [
                    "flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess",
                    "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port),
                ],
                folder=self._neutral, environment=self._environment, output=self._log, private=self._root,
            )  # fmt: skip
            self._family.adopt(self._superlink.pid)
            if self._answers(port):
                return
            self._ahead.superlink = Ahead(SUPERLINK)
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
        """``flwr run``."""
        said, errors = self._root / "flwr-run.out", self._root / "flwr-run.err"
        said.touch()
        errors.touch()
        command = self._ahead.flwr.call(
            ["flwr", "run", str(app), "--federation-config", federation, "--format", "json"],
            folder=self._neutral, environment=self._environment, output=said, errors=errors,
        )  # fmt: skip
        self._family.adopt(command.pid)
        code = command.wait(_PATIENCE)
        answer = _answer("run", code, said.read_text(), errors.read_text())
        if not answer.get("success"):
            raise RunFailed(f"Flower did not accept the run: {answer.get('error-message', answer)}")
        self._run_id = str(answer["run-id"])

    def goes_on(self, start_by: float) -> bool:
        """Whether the run still runs. Looks at processes, for asking Flower costs a second of a core."""
        assert self._superlink is not None
        if self._superlink.poll() is not None:
            return False
        if time.monotonic() < self._next_census:
            return True
        self._next_census = time.monotonic() + (1.0 if self._started else 0.3)
        if running(self._family.members(), DRIVER):
            self._started = True
        elif self._started:
            return False
        elif time.monotonic() > start_by:
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
            run = self._flwr("ls", "--run-id", self._run_id)["runs"][0]
            if run["status"].startswith("finished"):
                break
            time.sleep(1.0)
        return run["status"], run.get("status-details") or ""

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        return flwr(*arguments, folder=self._neutral, environment=self._environment)


def flwr(*arguments: str, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that ``flwr ARGUMENTS --format json`` answers with; Flower prints other lines before it.

    Raises:
        RunFailed: it answers with none.
    """
    command = [str(scripts() / "flwr"), *arguments, "--format", "json"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    return _answer(arguments[0], done.returncode, done.stdout, done.stderr)


def _answer(command: str, code: int, output: str, errors: str) -> dict[str, Any]:
    start = output.find("{")
    if start < 0:
        raise RunFailed(f"flwr {command} ended with exit code {code}:\n{output}{errors}")
    answer: dict[str, Any] = json.JSONDecoder().raw_decode(output[start:])[0]
    return answer


def scripts() -> Path:
    """The folder of this environment's commands, which need not be on PATH."""
    return Path(sys.executable).parent


def federation(config: RunConfig, plan: Resources) -> str:
    """Flower's federation settings such that exactly ``plan.workers`` actors exist.

    A node is a worker, or one client with ``simulation.clients-per-node = 1``. In a cluster that is there already a
    worker takes a core and, if this host has GPUs, a whole GPU; there may be more actors than workers, which stay idle.
    """
    nodes = config.clients if config.simulation.clients_per_node == 1 else plan.workers
    settings: dict[str, Any] = {"num-supernodes": nodes, "client-resources-num-cpus": 1}
    settings["init-args-log-to-driver"] = "true"
    if config.engine.ray_address:
        return _joined(settings | {"client-resources-num-gpus": float(plan.gpus > 0)})
    settings |= {"client-resources-num-gpus": plan.gpu_share, "init-args-num-cpus": plan.workers}
    if plan.gpus:
        settings["init-args-num-gpus"] = plan.gpus
    return _joined(settings)


def _joined(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def environment(root: Path, tag: str, plan: Resources, preload: str = "", ray_address: str = "") -> dict[str, str]:
    """The environment of everything that is started: the caller's, less what would bend a run."""
    environment = inherited(os.environ)
    loopback = "127.0.0.1,localhost"
    ray = root / "ray"
    ray.mkdir()
    environment |= {
        TAG: tag,
        "PATH": f"{scripts()}{os.pathsep}{environment.get('PATH', '')}",
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
        "RAY_worker_niceness": "0",  # the actors are the job, not background work beside it
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_prestart_worker_first_driver": "0",  # they lack the actors' environment, so they would never be used
        "RAY_enable_worker_prestart": "0",
        "RAY_preload_python_modules": preload,  # the actors import while the ServerApp prepares, not after
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(512 * 2**20),
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ray_address:
        environment["RAY_ADDRESS"] = ray_address  # Flower passes no address on, but Ray itself looks here
    for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        environment[f"{library}_NUM_THREADS"] = str(plan.threads)
    if "OMP_WAIT_POLICY" not in environment:
        # OpenMP's threads wait for each other in a loop, for milliseconds. Two threads beside another job on two cores
        # took 12 to 25 times the time of a private step; with a shorter loop they share the cores.
        environment.setdefault("GOMP_SPINCOUNT", "2000")
    return environment


def tail(file: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    if not file.is_file():
        return f"({file} was never written)"
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
