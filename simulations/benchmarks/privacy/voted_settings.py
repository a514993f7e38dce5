"""What a vote of clients over settings costs (DP-Hype, arXiv 2510.04902, as far as known), and why there is no command.

Run: `python -m simulations.benchmarks privacy.voted_settings`. Pure accounting, and committed results; a minute.

Every client tries each of K settings on its own records, without noise, and votes for one. The counts are one Gaussian
release of all clients: a row of one 1, sensitivity 1 for adding or removing a client. Its noise is as large as a winner
by MARGIN of the clients allows, so that each rival overtakes it with a chance of WRONG / (K - 1) at most. Beside it:
the best of as many tries on average, chosen by public records and paid for (`lacquer sweep --private`). What each
leaves of epsilon is told by the noise of the run that follows.

A vote must also bring something. The sweep ``worth`` holds the server's rate with and without noise: what training of
all clients without noise would choose is more than clients who try it alone can know, so it bounds the gain.
"""

import json
import math
from statistics import NormalDist, fmean
from typing import Any

import typer
from scipy.optimize import brentq

from privacy.accountants import composition, selection
from privacy.accountants.calibration import calibrate
from privacy.commitment import FloorStep, Tries
from privacy.events import Poisson
from simulations.benchmarks.harness.markdown import Columns, Row, provenance, table
from simulations.benchmarks.harness.results import RESULTS, say, write

EPSILON, DELTA = 4.0, 1e-5
SETTINGS, MARGIN, WRONG = 8, 0.1, 0.05
RATE, ROUNDS = 0.05, 50
CLIENTS = (100, 300, 1000, 10_000)
CELL = "tuning-rate/{kind}/learning-rate={rate}/seed=100"
RATES = ("0.003", "0.01", "0.03")


def vote_noise(clients: int) -> float:
    """The largest noise multiplier under which a winner by the margin is found."""
    return MARGIN * clients / (math.sqrt(2) * NormalDist().inv_cdf(1 - WRONG / (SETTINGS - 1)))


def vote_line(clients: int) -> dict[str, Any]:
    """The price of one vote, and the noise of the training behind it."""
    everyone, cohort = Poisson(1.0, clients), Poisson(RATE, clients)
    noise = vote_noise(clients)
    price = composition.epsilon([(everyone, noise, 1)], DELTA)
    line: dict[str, Any] = {"clients": clients, "noise": noise, "epsilon": price}
    alone = calibrate(EPSILON, DELTA, cohort, ROUNDS)
    if price < EPSILON:
        left = calibrate(EPSILON, DELTA, cohort, ROUNDS, extra=[FloorStep("vote", everyone, noise)])
        line |= {"more_noise": left / alone - 1}
    return line


def paid_line() -> dict[str, Any]:
    """The noise of a candidate where the best of K = 8 tries is released, K by the Poisson law."""
    cohort = Poisson(RATE, CLIENTS[-1])

    def excess(noise: float) -> float:
        steps = [FloorStep("round", cohort, noise, ROUNDS)]
        return selection.epsilon(Tries(float(SETTINGS), math.inf), [steps], DELTA)[0] - EPSILON

    noise = float(brentq(excess, 0.5, 4.0, xtol=1e-3))
    epsilon = composition.epsilon([(cohort, noise, ROUNDS)], DELTA)
    return {"epsilon_of_a_candidate": epsilon, "more_noise": noise / calibrate(EPSILON, DELTA, cohort, ROUNDS) - 1}


def choice_lines() -> list[dict[str, Any]]:
    """The share of the way from public records to training without noise at each rate of the server."""
    cells = json.loads((RESULTS / "worth.json").read_text())["cells"]

    def loss(kind: str, rate: str, of: str = "end") -> float:
        return fmean(cells[CELL.format(kind=kind, rate=rate)]["losses"][of])

    public, best = loss("private", RATES[0], "public"), min(loss("no-noise", rate) for rate in RATES)
    return [
        {"rate": rate, "no_noise": loss("no-noise", rate), "share": (public - loss("private", rate)) / (public - best)}
        for rate in RATES
    ]


def main() -> None:
    """Account votes and paid tuning, read the sweep, and write the results."""
    lines = [vote_line(clients) for clients in CLIENTS]
    for line in lines:
        say(line)
    given = {"epsilon": EPSILON, "delta": DELTA, "settings": SETTINGS, "margin": MARGIN, "wrong": WRONG}
    write(
        "voted-settings",
        {**given, "rate": RATE, "rounds": ROUNDS, "lines": lines, "paid": paid_line(), "choices": choice_lines()},
    )


def prices(results: Row) -> str:
    """Votes of more and more clients, and paid tuning."""
    lines = [
        {
            "how": f"a vote of {line['clients']:,} clients",
            "epsilon": f"{line['epsilon']:.2f}",
            "more": f"{line['more_noise']:.0%}" if "more_noise" in line else "nothing is left",
        }
        for line in results["lines"]
    ]
    paid = results["paid"]
    kept = results["epsilon"] - paid["epsilon_of_a_candidate"]
    lines.append({"how": "the best of 8 tries, paid", "epsilon": f"{kept:.2f}", "more": f"{paid['more_noise']:.0%}"})
    columns: Columns = {"settings chosen by": "{how}", "ε of 4": "{epsilon}", "more noise in training": "{more}"}
    return table(lines, columns, "lr") + provenance(results)


def choices(results: Row) -> str:
    """The server's rate: what it decides with noise, and what training without noise would choose."""
    columns: Columns = {
        "server's rate": "{rate}",
        "loss without noise": "{no_noise:.3f}",
        "share of the way at ε = 4": "{share:.0%}",
    }
    return table(results["choices"], columns, "lr") + provenance(results)


if __name__ == "__main__":
    typer.run(main)
