"""`python -m simulations.benchmarks.papers.rldp_pretraining`: make the policy that ships with the controller ``rl``.

Runs soft actor-critic over synthetic federations (``synthetic_federation.py``), one after the other, with one agent and
one buffer. Every so often the policy's mode is judged on federations that are not trained on; the best one is kept, and
judged once more on others still, against thresholds that stay and against an agent without experience. Writes
``strategies/controllers/rl/policy.json`` and ``results/rl_pretraining.json``.
"""

import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from server.run_folder.provenance import describe_environment
from simulations.benchmarks.papers.synthetic_federation import Problem, draw_problem, hold_run
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.controllers.rl import sac
from strategies.controllers.rl.controller import Rl
from strategies.controllers.rl.decisions import RlState, begin
from strategies.controllers.rl.sac import Agent, Weights

ROOT = Path(__file__).resolve().parents[3]
POLICY = ROOT / "strategies" / "controllers" / "rl" / sac.FILE
RESULTS = Path(__file__).resolve().parents[1] / "results" / "rl_pretraining.json"
VALIDATION, TEST = 10_000, 20_000
CAPACITY, WARM_UP, UPDATES = 20_000, 300, 3
FACTORS = (1 / 64, 1 / 10, 1 / 3, 1.0, 3.0)


def main(
    episodes: Annotated[int, typer.Option(help="Federations to learn on; 0 judges the policy that is there.")] = 200,
    every: Annotated[int, typer.Option(help="Episodes between two judgements.")] = 40,
    judged: Annotated[int, typer.Option(help="Federations for validation.")] = 8,
    tested: Annotated[int, typer.Option(help="Federations for the final comparison.")] = 20,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
) -> None:
    """Train, choose, write the policy; then judge the policy that ships, and write the results."""
    torch.set_num_threads(1)
    if episodes:
        train(episodes, every, judged, seed)
    document = {
        "benchmark": "rl_pretraining",
        "card": sac.card(),
        "test": compare([draw_problem(TEST + i) for i in range(tested)], sac.pretrained_weights()),
        "environment": describe_environment(),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    Console().print(document["test"])


def train(episodes: int, every: int, judged: int, seed: int) -> None:
    """Soft actor-critic over federations; after every judgement the best policy so far is on the disk."""
    console, started = Console(), time.monotonic()
    agent = sac.new_agent(sac.fresh_weights(seed), len(draw_problem(0).sizes), CAPACITY)
    validation = [draw_problem(VALIDATION + i) for i in range(judged)]
    reference = statistics.mean(final(p, Fixed(p.clip_norm)) for p in validation)
    curve: list[dict[str, float]] = []
    for episode in range(1, episodes + 1):
        problem = draw_problem(seed * 1_000_000 + 100_000 + episode)
        _, state = hold_run(problem, trainer(problem, seed), episode, state_with(problem, agent))
        agent = state.agent
        if episode % every == 0:
            score = statistics.mean(final(p, mode(p), weights_of(agent)) for p in validation) - reference
            console.print(f"episode {episode}: {score:+.4f} ({time.monotonic() - started:.0f} s)")
            curve.append({"episode": episode, "score": score})
            if score == min(point["score"] for point in curve):
                POLICY.write_text(sac.document(weights_of(agent), card(seed, curve)), encoding="utf-8")


def card(seed: int, curve: list[dict[str, float]]) -> dict[str, Any]:
    """What a reader of the policy must know."""
    return {
        "data": "synthetic federations (simulations/benchmarks/papers/synthetic_federation.py); no person's data",
        "made by": "python -m simulations.benchmarks.papers.rldp_pretraining",
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


if __name__ == "__main__":
    typer.run(main)
