"""A deployment as processes: Flower's SuperLink and SuperNodes with TLS and keys, and the `lacquer` command."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from privacy.ledger.ledger import Ledger

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
PATIENCE = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class CommandLines(threading.Thread):
    """The command lines of Flower's own processes, as every user of this host reads them, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[str] = set()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if "--runtime-api-address" in line:
                        self.seen.add(line)


class Deployment:
    """A SuperLink, nodes with records of their own, and `insider`, who has been let in too.

    Args:
        settings: of the run, ``run.toml``.
        records: of every node, by its name.
        database: the SuperLink's; default in ``folder``.
    """

    def __init__(self, folder: Path, settings: str, records: dict[str, Path], database: Path | None = None) -> None:
        self.folder, self.keys, self.port = folder, folder / "keys", free_port()
        self.database = database or folder / "state.db"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "LACQUER_SUPERLINK": f"127.0.0.1:{self.port}",
            "LACQUER_CA": str(self.keys / "executor" / "ca.crt"),
            "LACQUER_OPERATOR_KEY": str(self.keys / "executor" / "operator.key"),
            "LACQUER_SIGNING_KEY": str(self.keys / "executor" / "signing.key"),
            "LACQUER_CLIENT_KEYS": str(self.keys / "executor" / "clients"),
            "LACQUER_CLIENT_NAMES": str(folder / "clients.json"),
        }
        (folder / "run.toml").write_text(settings)
        names = [option for name in (*records, "insider") for option in ("--client", name)]
        assert self.lacquer("certificates", str(self.keys), *names).returncode == 0
        self.records = records

    def start(self, name: str, *command: str) -> None:
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, "FLWR_HOME": str(self.folder / f"home-{name}")},
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / f"{name}.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def superlink(self) -> None:
        keys = self.keys / "superlink"
        self.start(
            "superlink",
            *(sys.executable, "-m", "server.network.superlink"),
            *(f"--ssl-ca-certfile={keys}/ca.crt", f"--ssl-certfile={keys}/server.crt"),
            *(f"--ssl-keyfile={keys}/server.key", "--enable-supernode-auth", "--host=127.0.0.1"),
            *("--isolation=process", f"--superexec-auth-secret-file={keys}/operator.key"),
            *(f"--port={self.port}", f"--database={self.database}"),
        )

        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        self.until(answers)

    def executor(self) -> None:
        keys = self.keys / "executor"
        self.start(
            "executor",
            *(sys.executable, "-m", "server.network.patience", f"--runtime-api-address=127.0.0.1:{self.port}"),
            *(f"--root-certificates={keys}/ca.crt", f"--superexec-auth-secret-file={keys}/operator.key"),
        )

    def node(self, name: str, more: str = "") -> None:
        keys, own = self.keys / name, self.folder / f"own-{name}"
        settings = f'data="jsonl:{self.records[name]}" cache="{own}" authority="{keys}/ca.crt" {more}'
        self.start(
            name,
            *(sys.executable, "-m", "client.fork_server", "flower-supernode", f"--superlink=127.0.0.1:{self.port}"),
            *(f"--root-certificates={keys}/ca.crt", f"--auth-supernode-private-key={keys}/key"),
            *(f"--port={free_port()}", f"--node-config={settings}"),
        )

    def begin(self, more: Sequence[str] = ()) -> None:
        """All processes; ``more`` is what every node is told besides."""
        self.superlink()
        self.executor()
        assert self.lacquer("admit").returncode == 0
        for name, told in zip(self.records, more or [""] * len(self.records), strict=True):
            self.node(name, told)
        self.until(lambda: self.online(*self.records))

    def lacquer(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [BIN / "lacquer", *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def clients(self) -> dict[str, dict[str, str]]:
        return {one["name"]: one for one in json.loads(self.lacquer("clients", "--json").stdout or "[]")}

    def online(self, *names: str) -> bool:
        return {name for name, one in self.clients().items() if one["status"] == "online"} == set(names)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(1.0)

    @property
    def run(self) -> Path:
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def charges(self) -> int:
        with Ledger.open(self.run / "ledger.jsonl", read_only=True) as ledger:
            return len(ledger.charges)

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            time.sleep(3.0)
