"""How the policy of the controller ``rl`` was learnt and judged, and what the controller costs a round.

Run: `python -m simulations.benchmarks papers.rldp_pretraining [--episodes 200] [--to FILE] [--part policy|overhead]`.

Policy: soft actor-critic over federations that exist only as random numbers (``synthetic_federation.py``), one after
the other, with one agent and one buffer. Every so often the policy's mode is judged on federations that are not trained
on; the best one is kept, and judged once more on others still, against thresholds that stay and against an agent
without experience. Writes ``strategies/controllers/rl/policy.json`` and ``results/rl_pretraining.json``.

Overhead: seconds that ``rl`` adds to a round, for two adapters: MiniLM's (rank 4 on query and value of 6 layers, and a
head) and one of a model of a billion parameters (rank 8 on 32 projections). On one thread: the server's part (plan and
update; medians over most rounds and over those in which the agent acts or also learns), and the clients' part (clipping
and bits of 50 updates; the least of five times), each beside flat clipping by ``fixed``.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from privacy.accountants.calibration import filter_commitment
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.mechanism import charged_release
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.harness.markdown import Columns, Row, table
from simulations.benchmarks.harness.results import ROOT, say, write
from simulations.benchmarks.papers.synthetic_federation import Account, Problem, draw_problem, hold_run
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.controllers.rl import sac
from strategies.controllers.rl.controller import Rl
from strategies.controllers.rl.decisions import RlState, begin
from strategies.controllers.rl.sac import Agent, Weights

POLICY = ROOT / "strategies" / "controllers" / "rl" / sac.FILE
VALIDATION, TEST = 10_000, 20_000
CAPACITY, WARM_UP, UPDATES = 20_000, 300, 3
FACTORS = (1 / 64, 1 / 10, 1 / 3, 1.0, 3.0)


def train(episodes: int, every: int, judged: int, seed: int, file: Path) -> None:
    """Soft actor-critic over federations; after every judgement the best policy so far is in `file`."""
    started = time.monotonic()
    agent = sac.new_agent(sac.fresh_weights(seed), len(draw_problem(0).sizes), CAPACITY)
    validation = [draw_problem(VALIDATION + i) for i in range(judged)]
    reference = statistics.mean(final(p, Fixed(p.clip_norm)) for p in validation)
    curve: list[dict[str, float]] = []
    for episode in range(1, episodes + 1):
        problem = draw_problem(seed * 1_000_000 + 100_000 + episode)
        _, state = hold_run(problem, trainer(problem, seed), episode, state_with(problem, agent))
        agent = state.agent
        if episode % every == 0 or episode == episodes:
            score = statistics.mean(final(p, mode(p), weights_of(agent)) for p in validation) - reference
            say(f"episode {episode}: {score:+.4f} ({time.monotonic() - started:.0f} s)")
            curve.append({"episode": episode, "score": score})
            if score == min(point["score"] for point in curve):
                file.write_text(sac.document(weights_of(agent), card(seed, curve)), encoding="utf-8")


def card(seed: int, curve: list[dict[str, float]]) -> dict[str, Any]:
    """What a reader of the policy must know."""
    return {
        "data": "synthetic federations (simulations/benchmarks/papers/synthetic_federation.py); no person's data",
        "made by": "python -m simulations.benchmarks papers.rldp_pretraining",
        "seed": seed,
        "score": "mean log final loss on validation federations less that of the threshold a user starts with",
        "curve, whose last point is this policy": curve,
    }


def trainer(problem: Problem, seed: int) -> Rl:
    """The controller that learns on a problem."""
    return replace(_controller(problem), policy="scratch", warm_up=WARM_UP, updates=UPDATES, seed=seed)


def mode(problem: Problem) -> Rl:
    """The controller that acts by a policy's mode."""
    return _controller(problem)


def still(problem: Problem) -> Rl:
    """Per-adapter clipping whose thresholds and noise stay where they are; the bits are paid for."""
    return replace(_controller(problem), step=1e-9, noise_step=1e-9)


def _controller(problem: Problem) -> Rl:
    return Rl(clip_norm=problem.clip_norm, bit_share=problem.bit_share)


def weights_of(agent: Agent) -> Weights:
    """What of an agent is worth keeping: its targets start as its critics."""
    return {name: value.contiguous() for name, value in agent.weights.items() if not name.startswith("target-")}


def state_with(problem: Problem, agent: Agent) -> RlState:
    """The state of ``rl`` before round 1, with an agent that has a past."""
    return begin(problem.setting, agent, problem.loss(problem.start))


def final(problem: Problem, controller: Any, weights: Weights | None = None) -> float:
    """Logarithm of the last public loss; ``rl`` starts from ``weights`` where they are given."""
    state = None if weights is None else state_with(problem, sac.new_agent(weights, len(problem.sizes), 64))
    return math.log(hold_run(problem, controller, 1, state)[0][-1])


def compare(problems: list[Problem], weights: Weights) -> dict[str, Any]:
    """Per way: mean log final loss less that of flat clipping at the user's own C_0, and its standard error.

    ``best fixed`` knows the best of five thresholds of every federation, which a user could only find by paying for it.
    """
    fixed = [[final(p, Fixed(p.clip_norm * factor)) for factor in FACTORS] for p in problems]
    start = [tried[FACTORS.index(1.0)] for tried in fixed]
    ways = {
        "fixed, C_0 / 10": [tried[FACTORS.index(1 / 10)] for tried in fixed],
        "best fixed": [min(tried) for tried in fixed],
        "dp-lac": [final(p, DpLac(clip_norm=p.clip_norm)) for p in problems],
        "per adapter, still": [final(p, still(p), weights) for p in problems],
        "rl": [final(p, mode(p), weights) for p in problems],
        "rl, thresholds only": [final(p, replace(mode(p), noise_step=1e-9), weights) for p in problems],
        "rl, learning": [final(p, replace(mode(p), learn=True), weights) for p in problems],
        "rl, from scratch": [final(p, replace(mode(p), policy="scratch")) for p in problems],
    }
    rows = {}
    for name, values in ways.items():
        gains = [value - first for value, first in zip(values, start, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        better = sum(gain < 0 for gain in gains)
        rows[name] = {"mean": statistics.mean(gains), "standard_error": error, "better": better, "of": len(gains)}
    return rows


ADAPTERS = {"MiniLM": (4 * (384 + 384),) * 12 + (2 * 384 + 2,), "1B": (8 * (2048 + 2048),) * 32}
SAMPLING, ROUNDS, COHORT = Poisson(0.05, 1000), 40, 50
CONTROLLERS: dict[str, Any] = {
    "fixed": Fixed(),
    "rl": Rl(interval=5),
    "rl, learning": Rl(interval=5, learn=True, warm_up=2),
}


def overhead() -> list[dict[str, Any]]:
    """Seconds of a round, by adapter and controller."""
    commitment, z = filter_commitment(4.0, 1e-5, SAMPLING, ROUNDS)
    rows = []
    for adapter, sizes in ADAPTERS.items():
        setting = RunInfo(ROUNDS, (sizes,), SAMPLING, (z,) * ROUNDS, commitment.order)
        units = Units(torch.randn(COHORT, sum(sizes), generator=torch_generator(0, "updates")))
        for name, controller in CONTROLLERS.items():
            quiet, acting, plan = _server(controller, setting, Account(commitment))
            clients = min(_seconds(partial(contribute, units, plan)) for _ in range(5))
            timed = {"seconds_round": quiet, "seconds_round_of_action": acting, "seconds_clients": clients}
            rows.append({"adapter": adapter, "values": sum(sizes), "blocks": len(sizes), "controller": name, **timed})
            say(rows[-1])
    return rows


def _server(controller: Any, setting: RunInfo, account: Account) -> tuple[float, float, Plan]:
    """Median seconds of plan and update in other rounds and in every fifth, and the last plan."""
    state, noise = controller.init(setting, PublicSignals(0, 0.7)), InsecureSeededNoise(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for round in range(1, setting.rounds + 1):
        start = time.perf_counter()
        plan = controller.plan(state, setting, round)
        planned = time.perf_counter() - start
        cohort = CohortSampler.insecure_from_seed(0).draw(SAMPLING, round)
        release = charged_release(Contribution.zero(plan), plan, cohort, ledger=account, noise=noise)
        start = time.perf_counter()
        state = controller.update(state, setting, release, PublicSignals(round, 0.7 * 0.98**round, account.rho_spent))
        seconds[round % 5 == 0].append(planned + time.perf_counter() - start)
    return statistics.median(seconds[False]), statistics.median(seconds[True][2:]), plan


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(
    episodes: Annotated[int, typer.Option(help="federations to learn on; 0 judges the policy that is there")] = 200,
    every: Annotated[int, typer.Option(help="episodes between two judgements")] = 40,
    judged: Annotated[int, typer.Option(help="federations for validation")] = 8,
    tested: Annotated[int, typer.Option(help="federations for the final comparison")] = 20,
    seed: Annotated[int, typer.Option(help="of everything")] = 0,
    to: Annotated[Path, typer.Option(help="file of the policy: that of the package, or of one of your own")] = POLICY,
    part: Annotated[Literal["policy", "overhead"], typer.Option(help="what to do")] = "policy",
) -> None:
    """Train, choose, write the policy and judge the one that ships; or time rounds."""
    torch.set_num_threads(1)
    if part == "overhead":
        write("rl_overhead", {"benchmark": "rl_overhead", "rows": overhead(), "cohort": COHORT})
        return
    if episodes:
        train(episodes, every, judged, seed, to)
    test = compare([draw_problem(TEST + i) for i in range(tested)], sac.policy_weights(str(to)))
    say(test)
    if to != POLICY:
        return
    write("rl_pretraining", {"benchmark": "rl_pretraining", "card": sac.card(), "test": test})


def overhead_table(results: Row) -> str:
    """One line per adapter and controller, in milliseconds."""

    def seconds(key: str) -> Any:
        return lambda row: f"{1000 * row[key]:.2g} ms" if row[key] < 0.1 else f"{row[key]:.2f} s"

    columns: Columns = {
        "adapter": "{adapter}",
        "values": "{values:,}",
        "controller": "{controller}",
        "server, most rounds": seconds("seconds_round"),
        "server, when it acts": seconds("seconds_round_of_action"),
        "clipping of 50 clients": seconds("seconds_clients"),
    }
    return f"{table(results['rows'], columns, 'lrlr')}\n{_machine(results)}"


def comparison_table(results: Row) -> str:
    """One line per way: log final loss less that of the user's own fixed threshold."""
    columns: Columns = {
        "way": "{way}",
        "mean log loss at the end, less that of fixed C_0": "{mean:+.2f}",
        "standard error": "{standard_error:.2f}",
        "better on": "{better} of {of}",
    }
    rows = [{"way": way, **row} for way, row in results["test"].items()]
    return f"{table(rows, columns, 'lr')}\n{_machine(results)}"


def _machine(results: Row) -> str:
    place = results["environment"]
    return f"Machine: {place['cores']} cores, {place['system']}; commit `{place['commit']}`.\n"


if __name__ == "__main__":
    typer.run(main)
