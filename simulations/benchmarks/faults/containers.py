"""The containers of a federation: asked, read, ended and waited for by the docker command."""

import json
import re
import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

CLIENTS = ("client-1", "client-2", "client-3")
SERVICES = ("superlink", "executor", "gateway", *CLIENTS)
NAMED = ("this SuperNode ends, with exit code", "Failed to initialize the connection to the SuperLink")
"""In the log of a client that ends because its server is out of reach, or still takes it for connected: Flower refuses
a node's new life for the minute in which it does not know that the old one has ended."""


class Federation:
    """The containers of one compose project, by the docker command.

    Args:
        compose: the command.
        project: its project, which is up.
    """

    def __init__(self, compose: Sequence[str], project: str) -> None:
        self._compose = [*compose, "-p", project, "--env-file", "env.server"]
        self.identifiers = {name: self.compose("ps", "-q", name).strip() for name in SERVICES}
        self._since = f"{time.time():.0f}"
        self.named_before = {name: self.named(name) for name in SERVICES}
        self.caused: Counter[str] = Counter()
        self.died: list[tuple[str, str]] = []
        command = [
            "docker",
            "events",
            "--filter",
            "event=die",
            "--filter",
            f"label=com.docker.compose.project={project}",
        ]
        self._events = subprocess.Popen([*command, "--format", "{{json .}}"], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        assert self._events.stdout is not None
        for line in self._events.stdout:
            attributes = json.loads(line)["Actor"]["Attributes"]
            self.died.append((attributes["com.docker.compose.service"], attributes["exitCode"]))

    def close(self) -> None:
        """Look no longer for containers that end."""
        self._events.kill()
        self._events.wait()

    def compose(self, *arguments: str) -> str:
        """What compose prints; CalledProcessError if it fails."""
        done = subprocess.run([*self._compose, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"compose {shlex.join(arguments)}: {done.stderr[-2000:]}"
        return done.stdout

    def inside(self, service: str, *command: str) -> "subprocess.CompletedProcess[str]":
        """A command inside a container, which may be down."""
        return docker("exec", self.identifiers[service], *command)

    def inspect(self, service: str, what: str) -> str:
        """A field of `docker inspect`."""
        return docker("inspect", "-f", "{{" + what + "}}", self.identifiers[service]).stdout.strip()

    def restarts(self, service: str) -> int:
        """How often the restart policy has brought a container back since it was last started by hand."""
        return int(self.inspect(service, ".RestartCount"))

    def read(self, path: str) -> str:
        """A file of the volume of runs; empty if there is none, or its container is down."""
        done = self.inside("executor", "cat", path)
        return "" if done.returncode else done.stdout

    def online(self) -> int:
        """Clients that the SuperLink counts as connected."""
        listed = self.inside("executor", "lacquer", "clients", "--json")
        try:
            return sum(one["status"] == "online" for one in json.loads(listed.stdout))
        except ValueError:
            return 0

    def healthy(self) -> bool:
        """Whether every container says so."""
        return all(self.inspect(name, ".State.Health.Status") == "healthy" for name in SERVICES)

    def await_all(self, limit: float = 300.0) -> None:
        """Until all clients are connected."""
        until(lambda: self.online() == len(CLIENTS), limit, "all clients are online")

    def memory(self, service: str) -> float:
        """Anonymous memory of a container's processes, in MB; 0 while it is down."""
        script = "cat /proc/[0-9]*/status 2>/dev/null | awk '/^RssAnon/ {kb += $2} END {print kb}'"
        found = self.inside(service, "sh", "-c", script).stdout.strip()
        return int(found or 0) / 1000

    def cpu(self, service: str) -> float:
        """Seconds of CPU that a container has used since it was started; cgroups of either version."""
        script = (
            "cat /sys/fs/cgroup/cpuacct/cpuacct.usage 2>/dev/null || sed -n 's/^usage_usec //p' /sys/fs/cgroup/cpu.stat"
        )
        value = int(self.inside(service, "sh", "-c", script).stdout)
        old = self.inside(service, "test", "-e", "/sys/fs/cgroup/cpuacct/cpuacct.usage").returncode == 0
        return value / (1e9 if old else 1e6)

    def database(self) -> float:
        """Size of the SuperLink's database with its log, in MB; 0 while it is down."""
        found = self.inside("superlink", "sh", "-c", "cat /state/superlink.db* | wc -c").stdout.strip()
        return int(found or 0) / 1e6

    # What is done to it; each returns when the container is back.

    def crash(self, service: str) -> None:
        """All processes of a container at once; its restart policy must bring it back."""
        before = self.restarts(service)
        self.caused[service] += 1
        self.inside(service, "sh", "-c", "kill -9 -1")
        until(
            lambda: self.restarts(service) > before and self.inspect(service, ".State.Running") == "true",
            90.0,
            f"{service} is started again by itself",
        )

    def kill(self, service: str) -> None:
        """By docker, which then leaves it to the operator."""
        self.caused[service] += 1
        docker("kill", self.identifiers[service])
        time.sleep(5.0)
        self.compose("up", "-d")
        assert self.compose("ps", "-q", service).strip() == self.identifiers[service]

    def docker(self, command: str, service: str) -> None:
        """A command of docker's for one container."""
        done = docker(command, self.identifiers[service])
        assert done.returncode == 0, done.stderr

    def pause(self, service: str, seconds: float) -> None:
        """Its processes stand still."""
        self.docker("pause", service)
        time.sleep(seconds)
        self.docker("unpause", service)

    def lock(self, seconds: float) -> None:
        """The SuperLink's database is locked, as by somebody's large upload: it answers 500."""
        script = (
            "import sqlite3, time; c = sqlite3.connect('/state/superlink.db', isolation_level=None, timeout=60); "
            f"c.execute('BEGIN EXCLUSIVE'); time.sleep({seconds}); c.execute('ROLLBACK')"
        )
        done = self.inside("superlink", "python", "-c", script)
        assert done.returncode == 0, done.stderr

    def slow(self, services: Sequence[str], rate: str, seconds: float) -> None:
        """Their lines carry so much outwards, on every interface; needs root on the engine's host."""
        for service in services:
            self._line(service, f"tc qdisc add dev $i root tbf rate {rate} burst 64kb latency 800ms")
        time.sleep(seconds)
        for service in services:
            self._line(service, "tc qdisc del dev $i root")

    def _line(self, service: str, command: str) -> None:
        script = f"for i in $(ip -o link | grep -o 'eth[0-9]*@' | tr -d @); do {command} || exit 1; done"
        process = self.inspect(service, ".State.Pid")
        done = subprocess.run(
            ["nsenter", "-t", process, "-n", "sh", "-c", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def answers(self) -> dict[str, int]:
        """How many calls the gateway has answered with each status that is no success."""
        log = docker("logs", "--since", self._since, self.identifiers["gateway"]).stdout
        found = re.findall(r'"POST [^"]*" (\d{3}), ', log)
        return dict(sorted(Counter(status for status in found if status >= "400").items()))

    def named(self, service: str) -> int:
        """How many ends of its own a container's log names."""
        done = docker("logs", self.identifiers[service])
        return sum(any(name in line for name in NAMED) for line in (done.stdout + done.stderr).splitlines())


def docker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the docker command; what it printed and its exit code, whatever that is."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, errors="replace")


def until(reached: Callable[[], bool], limit: float, what: str) -> None:
    """AssertionError if it is not so within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(1.0)
