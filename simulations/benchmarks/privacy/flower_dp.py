"""Flower's own DP wrappers under the checks that ours pass.

Run: `python -m simulations.benchmarks privacy.flower_dp`. Two minutes on two cores.

A negative control: it shows that the checks can fail, and why this project brings its own mechanism. Every cell of the
table in docs/results/guarantee.md is measured on unchanged library code: each check asks the same of Flower's wrappers
and of our path (``flower_rounds.py``), and measures both. "Moves" are in units of C/20, the most that one client may
move the release. Flower's wrappers are asked under the adjacency that suits them best (a missing client sends
nearly nothing, the cohort stays at 20).
"""

import logging
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import typer
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from privacy.audit.two_world import ReleasePath, TwoWorldAudit, two_world
from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.units import Units
from privacy.contribution import Plan, contribute, validate
from privacy.ledger.ledger import Ledger
from privacy.queries import BoundedMean, NormBit
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.harness import markdown
from simulations.benchmarks.harness.markdown import Columns, Row
from simulations.benchmarks.harness.results import say, write
from simulations.benchmarks.privacy.flower_accounting import (
    adaptive_accounting,
    epsilon_of_a_run,
    fixed_size_accounting,
    local_dp,
)
from simulations.benchmarks.privacy.flower_rounds import (
    ABSENT,
    BOUND,
    CLIENTS,
    PARAMS,
    SAMPLING,
    Cell,
    Clients,
    Nodes,
    Pair,
    accounted_outcome,
    arrays,
    fedavg,
    flower,
    flower_outcome,
    flower_path,
    flower_strategy,
    honest,
    one_round,
    our_path,
    ours,
    scratch_ledger,
)
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.quantile import Quantile

ADAPTIVE_ROUNDS = 5


def _move(released: NDArray[Any], without: NDArray[Any]) -> Cell:
    """How far the two releases lie apart, in units of C/20."""
    difference = released.astype(np.float64) - without
    finite = np.isfinite(difference)
    moves = float(np.linalg.norm(difference[finite])) * CLIENTS / BOUND
    lost = int((~finite).sum())
    size = f"{moves:,.0f}" if moves >= 1000 else f"{moves if moves > 1e-4 else 0:.3g}"
    text = f"{size} × C/{CLIENTS}"
    if lost:
        text = f"not finite in {lost} of {difference.size} coordinates, the others {text}"
    return Cell(lost == 0 and moves <= 1 + 1e-5, text, moves)


def _flower_move(rows: NDArray[Any], without: NDArray[Any], kind: str = "server-side fixed", **replies: Any) -> Cell:
    try:
        with np.errstate(all="ignore"):
            return _move(*(flower(kind, updates, **replies) for updates in (rows, without)))
    except (ArithmeticError, TypeError, ValueError) as error:  # what the table is to show
        return Cell(False, f"raises {type(error).__name__}")


def _our_move(rows: NDArray[Any], without: NDArray[Any], ledger: Ledger) -> Cell:
    return _move(*(ours(torch.from_numpy(r), ledger, noiseless=True).update.numpy() for r in (rows, without)))


def _odd_update(update: NDArray[np.float32], ledger: Ledger) -> Pair:
    rows, without = honest(), honest()
    rows[0], without[0] = update, ABSENT
    return Pair(_flower_move(rows, without), _our_move(rows, without, ledger))


def nan_update(ledger: Ledger) -> Pair:
    """How far a client moves the release by one NaN among 1e6s."""
    return _odd_update(np.where(np.arange(PARAMS) == 0, np.nan, 1e6).astype(np.float32), ledger)


def infinite_update(ledger: Ledger) -> Pair:
    """How far a client moves the release by one infinity."""
    return _odd_update(np.where(np.arange(PARAMS) == 0, np.inf, 0.01).astype(np.float32), ledger)


def zero_update(ledger: Ledger) -> Pair:
    """How far a client moves the release by zeros."""
    return _odd_update(np.zeros(PARAMS, dtype=np.float32), ledger)


def integer_arrays(ledger: Ledger) -> Pair:
    """How far a client moves a release of integer arrays."""
    rows = honest().round().astype(np.int64)
    without = rows.copy()
    without[0] = np.eye(1, PARAMS, dtype=np.int64)
    return Pair(_flower_move(rows, without), _our_move(rows, rows[1:], ledger))


def example_weights(ledger: Ledger) -> Pair:
    """How far a client moves the release if it reports 1000 examples and all others 10."""
    rows, without = honest(), honest()
    without[0] = ABSENT
    examples = [1000.0] + [10.0] * (CLIENTS - 1)
    theirs, mine = _flower_move(rows, without, examples=examples), _our_move(rows, without, ledger)
    accounted = f"; with an accountant: {accounted_outcome(rows, examples=examples)}"
    return Pair(
        Cell(theirs.holds, theirs.text + accounted, theirs.value),
        Cell(mine.holds, f"{mine.text}; no counts are asked for", mine.value),
    )


def unclipped_client(ledger: Ledger) -> Pair:
    """What a client does that skips clipping where clipping is the client's task."""
    rows, without = honest() / 1000, honest() / 1000
    rows[0], without[0] = 100.0, ABSENT
    plan = Plan(FlatClip(BOUND, PARAMS), 1.0)
    reply = contribute(Units(torch.from_numpy(rows[:1])), plan)
    reply.encoded.mul_(100)
    try:
        validate(reply, plan, max_units=1)
        mine = Cell(False, "the reply is accepted")
    except ValueError:
        mine = Cell(True, "the reply is refused: longer than one unit can be")
    return Pair(_flower_move(rows, without, "client-side fixed", mods=()), mine)


def noise_scale(ledger: Ledger) -> Pair:
    """Noise std of fixed clipping over the zC/20 that is needed."""
    rows = np.full((CLIENTS, 100_000), ABSENT, dtype=np.float32)
    released = flower("server-side fixed", rows, 1.0)
    mine = ours(torch.from_numpy(rows), ledger).update.numpy()
    return Pair(_ratio(float(released.std()) * CLIENTS), _ratio(float(mine.std()) * CLIENTS))


def _ratio(ratio: float) -> Cell:
    return Cell(ratio > 0.99, f"{ratio:.3f}", ratio)


def adaptive_noise_scale(ledger: Ledger) -> Pair:
    """Least noise std over the z C_t/20 that is needed, of adaptive rounds in which C_t moves.

    Both sides alike: their own rule for C, from C = 1, five rounds in which every update is longer than C and five in
    which none is, so that C falls in one of the two whichever way a rule goes. C_t is what clipped the round. Rows have
    one value in all coordinates, so the spread of a release is its noise.
    """
    theirs, mine = [], []
    for value in (0.01, 0.0003):  # norms 3.2 and 0.09
        rows = np.full((CLIENTS, 100_000), value, dtype=np.float32)
        strategy: Any = flower_strategy("server-side adaptive", 1.0, clipped_count_stddev=0.6)
        controller = Quantile(clip_norm=BOUND, bit_noise=0.6)
        info = RunInfo(ADAPTIVE_ROUNDS, ((rows.shape[1],),), SAMPLING, (1.0,) * ADAPTIVE_ROUNDS)
        state = controller.init(info, PublicSignals(0, None))
        for number in range(1, ADAPTIVE_ROUNDS + 1):
            bound = float(strategy.clipping_norm)
            released = one_round(strategy, Clients(rows), number).released()
            theirs.append(float(released.std()) * CLIENTS / (strategy.noise_multiplier * bound))
            plan = controller.plan(state, info, number)
            release = ours(torch.from_numpy(rows), ledger, plan)
            mine.append(float(release.update.std()) * CLIENTS / (plan.noise_multiplier * state.bound))
            state = controller.update(state, info, release, PublicSignals(number, None))
    return Pair(_ratio(min(theirs)), _ratio(min(mine)))


def adaptive_direction(ledger: Ledger) -> Pair:
    """C after 60 adaptive rounds without noise, all norms 1, target quantile 1/2, from C = 0.1 and from C = 10."""
    rows = honest() / np.linalg.norm(honest(), axis=1, keepdims=True)
    theirs, mine = [], []
    for start in (0.1, 10.0):
        strategy: Any = flower_strategy("server-side adaptive", 0.0, bound=start)
        bound = start
        for number in range(1, 61):
            one_round(strategy, Clients(rows), number)
            plan = Plan(NoUpdate(), 1.0, (NormBit(bound, 1.0),))
            answer = ours(torch.from_numpy(rows), ledger, plan, noiseless=True).answers[0]
            unclipped = float(answer[0]) / CLIENTS + 0.5
            bound *= float(np.exp(-0.2 * (unclipped - 0.5)))  # Andrew et al. 2021, arXiv 1905.03871v5
        theirs.append(float(strategy.clipping_norm))
        mine.append(bound)
    return Pair(_reached(theirs, ""), _reached(mine, " (norm bit, rule of Andrew et al. 2021)"))


def _reached(ends: list[float], how: str) -> Cell:
    return Cell(all(0.8 < end < 1.25 for end in ends), f"{ends[0]:.2g} and {ends[1]:.4g}{how}")


def replayed_noise(ledger: Ledger) -> Pair:
    """Noise of two releases, every seedable generator seeded alike before each."""
    rows, theirs, mine = np.full((CLIENTS, PARAMS), ABSENT, dtype=np.float32), [], []
    for _ in range(2):
        _seed_everything()
        theirs.append(flower("server-side fixed", rows, 1.0))
        mine.append(ours(torch.from_numpy(rows), ledger).update.numpy())
    return Pair(*(_different(np.array_equal(one, other)) for one, other in (theirs, mine)))


def replayed_cohort(ledger: Ledger) -> Pair:
    """Two draws of a cohort of 1000 clients, every seedable generator seeded alike before each."""
    theirs, mine = [], []
    for _ in range(2):
        _seed_everything()
        strategy = fedavg()
        strategy.fraction_train = SAMPLING.rate
        messages = strategy.configure_train(1, arrays(np.zeros(1)), ConfigRecord({}), Nodes(SAMPLING.population))  # type: ignore[arg-type]
        theirs.append(sorted(message.metadata.dst_node_id for message in messages))
        mine.append(CohortSampler.create().draw(SAMPLING, 1).ids.tolist())
    return Pair(*(_different(one == other) for one, other in (theirs, mine)))


def _seed_everything() -> None:
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(0)


def _different(equal: bool) -> Cell:
    return Cell(not equal, "identical" if equal else "different")


AUDIT_PARAMS = 64
AUDIT_Z = 0.5


def absent_clients(ledger: Ledger) -> Pair:
    """Noise std over the move of one client, at z = 1, when 10 of 20 clients do not reply."""
    rows = np.full((CLIENTS, 100_000), ABSENT, dtype=np.float32)
    shifted = rows.copy()
    shifted[0] = 1.0
    half = frozenset(range(CLIENTS // 2, CLIENTS))
    one, other = (flower("server-side fixed", updates, absent=half) for updates in (shifted, rows))
    theirs = float(flower("server-side fixed", rows, 1.0, absent=half).std()) / _distance(one, other)
    came, changed = torch.from_numpy(rows[: CLIENTS // 2]), torch.from_numpy(shifted[: CLIENTS // 2])
    one, other = (ours(updates, ledger, noiseless=True).update.numpy() for updates in (changed, came))
    mine = float(ours(came, ledger).update.std()) / _distance(one, other)
    accounted = f"; with an accountant: {accounted_outcome(honest(), absent=half)}"
    return Pair(Cell(theirs > 0.99, f"{theirs:.3f}{accounted}", theirs), Cell(mine > 0.99, f"{mine:.3f}", mine))


def _distance(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - other))


def failed_client(ledger: Ledger) -> Pair:
    """What comes of a round in which one of 20 clients replies with an error."""
    outcome = flower_outcome("server-side fixed", honest(), 1.0, failing=frozenset({3}))
    before = len(ledger.events)
    ours(torch.from_numpy(honest()[1:]), ledger)
    charged = len(ledger.events) == before + 1
    return Pair(
        Cell(outcome.update is not None, "no release" if outcome.update is None else "released"),
        Cell(charged, "released at the same scale and noise, charged"),
    )


def metrics(ledger: Ledger) -> Pair:
    """How far the released mean training loss is from the exact one, when one client reports 1e6 and all others 0."""
    losses = [1e6] + [0.0] * (CLIENTS - 1)
    outcome = flower_outcome("server-side fixed", honest(), 1.0, losses=losses)
    exact = abs(outcome.metrics["train_loss"] - 1e6 / CLIENTS) < 1e-6
    query = BoundedMean(bound=4.0, noise_std=40.0)
    plan = Plan(FlatClip(BOUND, honest().shape[1]), 1.0, (query,))
    released = ours(torch.from_numpy(honest()), ledger, plan, losses=torch.tensor(losses))
    charged = ledger.events[-1].components[-1].name == query.name
    off = abs(float(released.answers[0]) - sum(losses)) / CLIENTS
    return Pair(
        Cell(not exact, "0: released as it is, outside the accounting" if exact else "not exact"),
        Cell(charged and off > 1e4, f"{off:,.0f}: clipped to {query.bound:g}, noised, part of the charged event"),
    )


def audit(path: ReleasePath, honest_units: int) -> TwoWorldAudit:
    """Two-world test at z = 1/2, R = 1000, alpha 1e-3, canary of norm 800."""
    rows = torch.randn(honest_units, AUDIT_PARAMS, generator=torch.Generator().manual_seed(1)) * 5
    return two_world(path, rows, torch.full((AUDIT_PARAMS,), 100.0), noise_multiplier=AUDIT_Z)


def verdict(result: TwoWorldAudit) -> Cell:
    """The outcome in words."""
    text = f"μ ≥ {result.mu_lower:.2f}, estimate {result.mu_estimate:.2f}, claim {result.claimed_mu:g}"
    return Cell(result.passed, text, result.mu_lower)


# What the audit is asked of: wrapper, examples that the canary reports (the others 10), clients that reply.
AUDITS: dict[str, tuple[str, int, int]] = {
    "two-world audit: fixed, server-side": ("server-side fixed", 10, CLIENTS),
    "two-world audit: fixed, client-side": ("client-side fixed", 10, CLIENTS),
    "two-world audit: adaptive, server-side": ("server-side adaptive", 10, CLIENTS),
    "two-world audit: fixed, the canary reports 1000 examples, the others 10": ("server-side fixed", 1000, CLIENTS),
    "two-world audit: fixed, 10 of 20 clients reply": ("server-side fixed", 10, CLIENTS // 2),
}


def audit_of(name: str, ledger: Ledger) -> Pair:
    """One of the AUDITS, beside ours with as many units, and with a norm bit where C adapts."""
    kind, examples, present = AUDITS[name]
    theirs = audit(flower_path(kind, AUDIT_Z, examples, present), present - 1)
    bit_std = CLIENTS / 20 if "adaptive" in kind else None  # Flower's default for its bit
    return Pair(verdict(theirs), verdict(audit(our_path(AUDIT_Z, ledger, bit_std), present - 1)))


# The line of the table -> its check.
CHECKS: dict[str, Callable[[Ledger], Pair]] = {
    "the move one client causes by a NaN among 1e6s": nan_update,
    "... by an infinity": infinite_update,
    "... by zeros": zero_update,
    "... in integer arrays": integer_arrays,
    "... by reporting 1000 examples, the others 10": example_weights,
    "... by not clipping, where clients clip": unclipped_client,
    "noise std / (zC/20), fixed clipping": noise_scale,
    "least noise std / (z C_t/20), five adaptive rounds with all updates clipped, five with none": adaptive_noise_scale,
    "adaptive C after 60 rounds from 0.1 and from 10, all norms 1": adaptive_direction,
    "noise of two releases, every generator seeded alike": replayed_noise,
    "two cohorts, every generator seeded alike": replayed_cohort,
    "noise std / move of one client at z = 1, 10 of 20 reply": absent_clients,
    "a round in which one client replies with an error": failed_client,
    "released mean loss − exact one, one client reports 1e6": metrics,
    "accounting of adaptive clipping": adaptive_accounting,
    "ε of 200 rounds, 100 of 1000 clients, z = 1.7618": epsilon_of_a_run,
    "ε of 200 rounds without replacement, replace-one, z = 2 (sound: 20.7)": fixed_size_accounting,
    "ε of one message of LocalDpMod asked for 10": local_dp,
}


def measure() -> dict[str, Pair]:
    """Every line of the table: what is asked, and what both sides did."""
    with scratch_ledger() as ledger:
        checks = {name: check(ledger) for name, check in CHECKS.items()}
        return checks | {name: audit_of(name, ledger) for name in AUDITS}


def silence() -> None:
    """Flower logs every clipping; the checks read its results, not its log."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def main() -> None:
    """Measure and write the results."""
    silence()
    lines = measure()
    for name, pair in lines.items():
        say(name, f"   Flower: {pair.flower}", f"   ours:   {pair.lacquer}")
    write("flower-dp-control", {"lines": [{"check": name, **asdict(pair)} for name, pair in lines.items()]})


def table(results: Row) -> str:
    """One line per check, ✓ or ✗ and what was measured."""
    columns: Columns = {
        "check": "{check}",
        f"Flower {results['environment']['packages']['flwr']}": lambda row: _cell(row["flower"]),
        "Lacquer": lambda row: _cell(row["lacquer"]),
    }
    return markdown.table(results["lines"], columns) + markdown.provenance(results)


def _cell(measured: Row) -> str:
    return f"{'✓' if measured['holds'] else '✗'} {measured['text']}"


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
