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
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import load_file

from simulations.benchmarks.faults.containers import CLIENTS, SERVICES, Federation, until
from simulations.benchmarks.faults.soak import account
from simulations.benchmarks.harness.results import RESULTS, origin, say, write

STALL = 600.0
"""Seconds without a round after which a run counts as hung; Flower gives a node up after 60, the ServerApp a SuperLink
after 300."""


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
