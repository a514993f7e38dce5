"""What clients and rounds cost the SuperLink of a federation in containers: CPU of its container.

Run: `docker/soak_test.sh`, which brings the federation of docker/compose.yaml up and calls this first.

Clients that only ask for work are compared with paused ones: what remains is the executor's asking and the container's
health check. Flower logs no polls, so what a call costs follows from the intervals at which a client makes them. Then a
run without faults is trained. The result is ``results/deployment-cost.json``.
"""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.benchmarks.faults.containers import CLIENTS, Federation
from simulations.benchmarks.faults.deployment import Soak
from simulations.benchmarks.harness.results import write


@dataclass
class Spent:
    """CPU of the SuperLink from now on."""

    federation: Federation
    began: float = field(default_factory=time.time)
    before: float = 0.0

    def __post_init__(self) -> None:
        self.before = self.federation.cpu("superlink")

    def until_now(self) -> dict[str, Any]:
        """Seconds and CPU seconds."""
        used, seconds = self.federation.cpu("superlink") - self.before, time.time() - self.began
        return {"seconds": round(seconds, 1), "cpu_seconds": round(used, 3)}


def cost(federation: Federation, root: Path, seconds: float, rounds: int) -> dict[str, Any]:
    """What the SuperLink spends while clients ask for work, while they stand still, and in a run without faults."""
    spent = Spent(federation)
    time.sleep(seconds)
    asking = spent.until_now()
    for name in CLIENTS:
        federation.docker("pause", name)
    try:
        spent = Spent(federation)
        time.sleep(seconds)
        still = spent.until_now()
    finally:
        for name in CLIENTS:
            federation.docker("unpause", name)
    federation.await_all()
    found = {"clients": len(CLIENTS), "asking": asking, "still": still, "rounds": rounds}
    if not rounds:
        return found
    spent = Spent(federation)
    soak = Soak(federation, root, (f"rounds={rounds}",))
    soak.train(rounds, ())
    return {**found, "run": spent.until_now()}


def main(
    compose: Annotated[list[str], typer.Argument(help="the compose command")],
    project: Annotated[str, typer.Option(help="compose project that is up, in the folder docker")],
    stack_seconds: Annotated[int, typer.Option(help="from the first `up -d` to three clients online")],
    seconds: Annotated[float, typer.Option(help="for which idle clients are looked at, and paused ones")] = 60.0,
    rounds: Annotated[int, typer.Option(help="of a run without faults; 0: none")] = 8,
) -> None:
    """Measure a federation that is up, and write the result."""
    federation = Federation(compose, project)
    try:
        with tempfile.TemporaryDirectory(prefix="cost-") as folder:
            found = cost(federation, Path(folder), seconds, rounds)
    finally:
        federation.close()
    write("deployment-cost", {"stack_seconds": stack_seconds, **found})


if __name__ == "__main__":
    typer.run(main)
