"""`python -m simulations.benchmarks.papers.rl_overhead`: what the controller ``rl`` adds to a round, in seconds.

Two adapters: MiniLM's (rank 4 on query and value of 6 layers, and a head) and one of a model of a billion parameters
(rank 8 on 32 projections). On one thread: the server's part (plan and update; medians over most rounds and over those
in which the agent acts or also learns), and the clients' part (clipping and bits of 50 updates; the least of five
times), each beside flat clipping by ``fixed``. Writes ``results/rl_overhead.json``.

Tables of the controller ``rl``: what it costs in seconds, and what it is worth on federations made of numbers.
"""

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from privacy.accountants.calibration import filter_commitment
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.mechanism import charged_release
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import torch_generator
from server.run_folder.provenance import describe_environment
from simulations.benchmarks.papers.synthetic_federation import Account
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed
from strategies.controllers.rl.controller import Rl

RESULTS = Path(__file__).resolve().parents[1] / "results" / "rl_overhead.json"
ADAPTERS = {"MiniLM": (4 * (384 + 384),) * 12 + (2 * 384 + 2,), "1B": (8 * (2048 + 2048),) * 32}
SAMPLING, ROUNDS, COHORT = Poisson(0.05, 1000), 40, 50
CONTROLLERS: dict[str, Any] = {
    "fixed": Fixed(),
    "rl": Rl(interval=5),
    "rl, learning": Rl(interval=5, learn=True, warm_up=2),
}


def main() -> None:
    """Time, print and write."""
    torch.set_num_threads(1)
    commitment, z = filter_commitment(4.0, 1e-5, SAMPLING, ROUNDS)
    rows = []
    for adapter, sizes in ADAPTERS.items():
        setting = RunInfo(ROUNDS, (sizes,), SAMPLING, (z,) * ROUNDS, commitment.order)
        updates = torch.randn(COHORT, sum(sizes), generator=torch_generator(0, "updates"))
        for name, controller in CONTROLLERS.items():
            quiet, acting, plan = _server(controller, setting, Account(commitment))
            clients = min(_clients(Units(updates), plan) for _ in range(5))
            timed = {"seconds_round": quiet, "seconds_round_of_action": acting, "seconds_clients": clients}
            rows.append({"adapter": adapter, "values": sum(sizes), "blocks": len(sizes), "controller": name, **timed})
            Console().print(rows[-1])
    document = {"benchmark": "rl_overhead", "rows": rows, "cohort": COHORT, "environment": describe_environment()}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def _server(controller: Any, setting: RunInfo, account: Account) -> tuple[float, float, Plan]:
    """Median seconds of plan and update in other rounds and in every fifth, and the last plan."""
    state, noise = controller.init(setting, PublicSignals(0, 0.7)), InsecureSeededNoise(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for round in range(1, setting.rounds + 1):
        start = time.perf_counter()
        plan = controller.plan(state, round)
        planned = time.perf_counter() - start
        release = charged_release(
            Contribution.zero(plan), plan, label="round", round=round, sampling=SAMPLING, ledger=account, noise=noise
        )
        start = time.perf_counter()
        state = controller.update(state, release, PublicSignals(round, 0.7 * 0.98**round, account.rho_spent))
        seconds[round % 5 == 0].append(planned + time.perf_counter() - start)
    return statistics.median(seconds[False]), statistics.median(seconds[True][2:]), plan


def _clients(units: Units, plan: Plan) -> float:
    start = time.perf_counter()
    contribute(units, plan)
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)


def overhead(result: Mapping[str, Any]) -> str:
    """One line per adapter and controller, in milliseconds."""
    lines = ["| adapter | values | controller | server, most rounds | server, when it acts | clipping of 50 clients |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    for row in result["rows"]:
        times = (row[key] for key in ("seconds_round", "seconds_round_of_action", "seconds_clients"))
        cells = " | ".join(f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2f} s" for seconds in times)
        lines.append(f"| {row['adapter']} | {row['values']:,} | {row['controller']} | {cells} |")
    return "\n".join(lines) + f"\n\n{_where(result)}\n"


def pretraining(result: Mapping[str, Any]) -> str:
    """One line per way: log final loss less that of the user's own fixed threshold."""
    lines = ["| way | mean log loss at the end, less that of fixed C_0 | standard error | better on |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, row in result["test"].items():
        lines.append(f"| {name} | {row['mean']:+.2f} | {row['standard_error']:.2f} | {row['better']} of {row['of']} |")
    return "\n".join(lines) + f"\n\n{_where(result)}\n"


def _where(result: Mapping[str, Any]) -> str:
    place = result["environment"]
    return f"Machine: {place['cores']} cores, {place['system']}; commit `{place['commit']}`."
