"""A federation in containers under faults, and what must hold of it afterwards.

Run: `docker/soak_test.sh`, which brings the federation of docker/compose.yaml up and calls this.

Two runs over three clients, one of a tiny model over many rounds, one whose messages are tens of megabytes. Meanwhile
containers are paused, their lines are slow, the SuperLink's database is locked (so that it answers 500), and every
container is ended: once by `kill -9` of all its processes, after which its restart policy must bring it back, and once
by `docker kill`, after which the operator says `compose up -d`. The ServerApp dies with the executor; then the run is
resumed as docs/deploy.md says.

At the end ledger, metrics and adapter must agree (:func:`simulations.benchmarks.faults.soak.account`), no more releases
may be lost than a ServerApp was ended, every end of a container must be one that was caused here or one that its log
names, all containers must be healthy with all clients in the last round, and the SuperLink's database must be small.
The script fails if not; what it counted is written to ``results/soak-containers.json``.
"""

import json
import os
import random
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import load_file

from simulations.benchmarks.faults.soak import account
from simulations.benchmarks.harness.results import RESULTS, origin, say, write

CLIENTS = ("client-1", "client-2", "client-3")
SERVICES = ("superlink", "executor", "gateway", *CLIENTS)
STALL = 600.0
"""Seconds without a round after which a run counts as hung; Flower gives a node up after 60, the ServerApp a SuperLink
after 300."""
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
        return _docker("exec", self.identifiers[service], *command)

    def inspect(self, service: str, what: str) -> str:
        """A field of `docker inspect`."""
        return _docker("inspect", "-f", "{{" + what + "}}", self.identifiers[service]).stdout.strip()

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
        _docker("kill", self.identifiers[service])
        time.sleep(5.0)
        self.compose("up", "-d")
        assert self.compose("ps", "-q", service).strip() == self.identifiers[service]

    def docker(self, command: str, service: str) -> None:
        """A command of docker's for one container."""
        done = _docker(command, self.identifiers[service])
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
        log = _docker("logs", "--since", self._since, self.identifiers["gateway"]).stdout
        found = re.findall(r'"POST [^"]*" (\d{3}), ', log)
        return dict(sorted(Counter(status for status in found if status >= "400").items()))

    def named(self, service: str) -> int:
        """How many ends of its own a container's log names."""
        done = _docker("logs", self.identifiers[service])
        return sum(any(name in line for name in NAMED) for line in (done.stdout + done.stderr).splitlines())


def _docker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, errors="replace")


def until(reached: Callable[[], bool], limit: float, what: str) -> None:
    """AssertionError if it is not so within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not reached():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        time.sleep(1.0)


@dataclass
class Soak:
    """A run, from `lacquer deploy` to its end.

    Attributes:
        settings: of the configuration that are changed.
        resumes: how often it was resumed here.
        lives_ended: how many ServerApps were ended from outside.
        waits: seconds from a fault to the next round.
    """

    federation: Federation
    root: Path
    settings: Sequence[str]
    run: str = ""
    resumes: int = 0
    lives_ended: int = 0
    waits: list[tuple[str, float]] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)

    def deploy(self) -> None:
        """Start it; its folder is known then."""
        known = set(self._runs())
        changes = [part for setting in self.settings for part in ("--set", setting)]
        self._command("/config/test.toml", *changes)
        until(lambda: len(set(self._runs()) - known) == 1, 120.0, "the run has a folder")
        (self.run,) = set(self._runs()) - known

    def _runs(self) -> list[str]:
        return self.federation.inside("executor", "sh", "-c", "ls -d /runs/* 2>/dev/null").stdout.split()

    def _command(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """`lacquer deploy`, which ends with the executor's container, as the run does."""
        command = ["docker", "exec", self.federation.identifiers["executor"], "lacquer", "deploy", "--quiet"]
        with (self.root / "deploy.log").open("ab") as log:
            return subprocess.Popen([*command, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def resume(self) -> None:
        """As docs/deploy.md says: stop what the SuperLink still takes for running, then `lacquer deploy --resume`."""
        self.federation.await_all()
        for attempt in range(3):
            self.federation.inside("executor", "lacquer", "stop", self.run)
            before = self.federation.read(f"{self.run}/flower-run.json")
            command = self._command("--resume", self.run)
            while command.poll() is None and self.federation.read(f"{self.run}/flower-run.json") == before:
                time.sleep(1.0)
            if self.federation.read(f"{self.run}/flower-run.json") != before:
                self.resumes += 1
                until(lambda: not self.state().startswith("failed"), 240.0, "the resumed run is started")
                return
            say(f"not resumed, {attempt + 1}: {(self.root / 'deploy.log').read_text()[-600:]}")
        raise AssertionError("the run cannot be resumed")

    def rounds(self) -> int:
        """Of which there is a record."""
        lines = self.federation.read(f"{self.run}/metrics.jsonl").splitlines()
        return sum('"phase": "round"' in line for line in lines)

    def state(self) -> str:
        """Of its status file, and the words."""
        try:
            status = json.loads(self.federation.read(f"{self.run}/status.json"))
        except ValueError:
            return "unknown"
        return f"{status['state']}: {status['message']}"

    def sample(self, began: float) -> None:
        """Sizes now."""
        superlink, executor = self.federation.memory("superlink"), self.federation.memory("executor")
        if superlink and executor:
            at = {"at": time.monotonic() - began, "round": float(self.rounds())}
            at |= {"superlink_mb": superlink, "executor_mb": executor, "database_mb": self.federation.database()}
            self.samples.append({name: round(value, 1) for name, value in at.items()})

    def train(
        self, rounds: int, faults: Sequence[tuple[str, Callable[["Soak"], None]]], seed: int = 0
    ) -> dict[str, Any]:
        """To its end, with the faults spread over its rounds; what became of it."""
        rng, began = random.Random(seed), time.monotonic()
        self.deploy()
        due = [2 + (rounds - 4) * number // max(1, len(faults)) for number in range(len(faults))]
        seen, since, sampled, struck = 0, time.monotonic(), -1e9, ""
        done: list[str] = []
        while True:
            now, state = self.rounds(), self.state()
            if now > seen:
                if struck:
                    self.waits.append((struck, round(time.monotonic() - since, 1)))
                    struck = ""
                seen, since = now, time.monotonic()
            if state.startswith(("completed", "stopped-budget")):
                break
            if state.startswith("failed"):
                say(f"round {now}: {state}; the run is resumed")
                self.resume()
                since = time.monotonic()
            assert time.monotonic() - since < STALL, f"no round since {STALL:g} s; {state}"
            if len(done) < len(due) and now >= due[len(done)] and not struck:
                struck, fault = faults[len(done)]
                self.federation.await_all()  # two clients of three that are away end a run, as docs/faults.md says
                time.sleep(rng.uniform(0.0, 8.0))  # at any moment of a round
                since = time.monotonic()
                say(f"{since - began:5.0f} s, round {now}: {struck}")
                fault(self)
                done.append(struck)
                seen = max(seen, self.rounds())
            if time.monotonic() - sampled > 15.0:
                self.sample(began)
                sampled = time.monotonic()
            time.sleep(1.0)
        assert len(done) == len(faults), f"the run ended before {faults[len(done)][0]}"
        self.federation.await_all()
        return self._result(rounds, done, time.monotonic() - began)

    def _result(self, rounds: int, done: list[str], seconds: float) -> dict[str, Any]:
        folder = self.root / Path(self.run).name
        folder.mkdir()
        source = ["docker", "exec", self.federation.identifiers["executor"], "tar", "-C", self.run, "-c", "."]
        with subprocess.Popen(source, stdout=subprocess.PIPE) as packed:
            subprocess.run(["tar", "-C", str(folder), "-x"], stdin=packed.stdout, check=True)
        found = account(folder)
        assert found["charged_and_lost"] <= self.lives_ended, "more was lost than ServerApps were ended"
        assert found["rounds_released"] + found["charged_and_lost"] == rounds, "a planned round is missing"
        assert found["resumes"] >= self.resumes > 0 or not self.lives_ended
        presence = [json.loads(line).get("presence") for line in (folder / "metrics.jsonl").read_text().splitlines()]
        connected = Counter(str(one["connected"]) for one in presence if one)
        assert presence[-1]["connected"] == len(CLIENTS), "a client is missing from the last round"
        adapter = sum(value.numel() for value in load_file(next(folder.rglob("adapter_model.safetensors"))).values())
        return {
            "rounds_planned": rounds,
            "message_mb": adapter * 8 / 1e6,  # a reply holds an int64 for every value
            "seconds": seconds,
            "faults": done,
            "longest_wait": max(self.waits, key=lambda wait: wait[1], default=("", 0.0)),
            "waits": self.waits,
            "server_apps_ended": self.lives_ended,
            "rounds_by_connected_clients": dict(connected),
            "database_mb": [sample["database_mb"] for sample in self.samples],
            "superlink_mb": [sample["superlink_mb"] for sample in self.samples],
            "executor_mb": [sample["executor_mb"] for sample in self.samples],
            **found,
        }


Fault = tuple[str, Callable[[Soak], None]]
"""Its name, and what does it and waits until the container is back."""


def _ends_server_app(how: str) -> Callable[[Soak], None]:
    def fault(soak: Soak) -> None:
        getattr(soak.federation, how)("executor")
        soak.lives_ended += 1
        soak.resume()

    return fault


def _on(how: str, *arguments: Any) -> Callable[[Soak], None]:
    return lambda soak: getattr(soak.federation, how)(*arguments)


SMALL = (
    ("gateway stands still for 20 s", _on("pause", "gateway", 20.0)),
    ("crash of client-1", _on("crash", "client-1")),
    ("SuperLink answers 500 for 40 s", _on("lock", 40.0)),
    ("crash of gateway", _on("crash", "gateway")),
    ("crash of SuperLink", _on("crash", "superlink")),
    ("crash of executor, resumed", _ends_server_app("crash")),
    ("all lines at 64 kbit/s for 60 s", _on("slow", ("gateway", *CLIENTS), "64kbit", 60.0)),
    ("SuperLink stands still for 30 s", _on("pause", "superlink", 30.0)),
    *((f"docker kill of {name}", _on("kill", name)) for name in CLIENTS),
    ("docker kill of gateway", _on("kill", "gateway")),
    ("docker kill of SuperLink", _on("kill", "superlink")),
    ("docker kill of executor, resumed", _ends_server_app("kill")),
    ("gateway stands still for 75 s", _on("pause", "gateway", 75.0)),
)
LARGE = (
    ("all lines at 20 Mbit/s for 90 s", _on("slow", ("gateway", *CLIENTS), "20mbit", 90.0)),
    ("crash of client-1", _on("crash", "client-1")),
    ("crash of SuperLink", _on("crash", "superlink")),
)


def idle(federation: Federation, seconds: float) -> dict[str, float]:
    """What idle clients cost the SuperLink."""
    before, began = federation.cpu("superlink"), time.monotonic()
    time.sleep(seconds)
    used, lasted = federation.cpu("superlink") - before, time.monotonic() - began
    return {"idle_clients": len(CLIENTS), "idle_seconds": round(lasted, 1), "idle_cpu_seconds": round(used, 3)}


def afterwards(federation: Federation, message: float) -> dict[str, Any]:
    """What must hold of the containers when a run has ended, and what they did meanwhile.

    Args:
        federation: is up.
        message: MB that the server sends a client in a round.
    """
    federation.await_all()
    until(federation.healthy, 240.0, "all containers are healthy")
    ends = Counter(service for service, _ in federation.died)
    others = {name: ends[name] - federation.caused[name] for name in SERVICES if ends[name] != federation.caused[name]}
    named = {name: federation.named(name) - federation.named_before[name] for name in others}
    assert named == others, f"containers ended and nothing says why: {others}, {named} of {federation.died}"
    before = federation.database()
    federation.compose("restart", "superlink")
    federation.await_all()
    after = federation.database()
    # What a client had not taken when it ended stays until the SuperLink forgets the run: one message each.
    left = message * sum(federation.caused[name] + named.get(name, 0) for name in CLIENTS)
    assert after < 10.0 + left, f"the database has {after} MB after a restart, of which {left} may be messages"
    return {
        "answers": federation.answers(),
        "killed": dict(federation.caused),
        "ended_by_themselves": named,
        "database_end_mb": round(before, 1),
        "database_after_restart_mb": round(after, 1),
    }


def main(
    compose: Annotated[list[str], typer.Argument(help="the compose command")],
    project: Annotated[str, typer.Option(help="compose project that is up, in the folder docker")],
    stack_seconds: Annotated[int, typer.Option(help="from the first `up -d` to three clients online")],
    rounds: Annotated[int, typer.Option(help="of the run with small messages; 0: its last result is kept")] = 90,
    large_rounds: Annotated[int, typer.Option(help="of the run with large messages; 0: its last result is kept")] = 9,
    rank: Annotated[int, typer.Option(help="of its adapter")] = 384,
) -> None:
    """Soak a federation that is up, and write the result."""
    last = RESULTS / "soak-containers.json"
    legs = {leg["leg"]: leg for leg in json.loads(last.read_text())["legs"]} if last.is_file() else {}
    for name, count, faults, settings in (
        ("small", rounds, SMALL, ()),
        ("large", large_rounds, LARGE, ("model.name=minilm", f"model.rank={rank}")),
    ):
        if not count:
            continue
        federation = Federation(compose, project)
        try:
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                cost = idle(federation, 30.0)
                soak = Soak(federation, Path(folder), (f"rounds={count}", *settings))
                leg = {"leg": name, "stack_seconds": stack_seconds, **cost, **soak.train(count, faults)}
                legs[name] = {
                    **leg,
                    **afterwards(federation, leg["message_mb"] / 2),
                    **origin(),
                    "load": round(os.getloadavg()[2], 1),
                }
        finally:
            federation.close()
        say(json.dumps(legs[name]))
        write("soak-containers", {"legs": list(legs.values())})


if __name__ == "__main__":
    typer.run(main)
