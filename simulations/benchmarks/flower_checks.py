"""The checks of the negative control: each asks the same of Flower's wrappers and of our path, and measures both.

C = 1, 20 clients expected; "moves" are in units of C/20, the most that one client may move the release. Flower's
wrappers are asked under the adjacency that suits them best (a missing client sends nearly nothing, the cohort stays at
20).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from privacy.clipping import FlatClip, NoUpdate
from privacy.contribution import contribute, validate
from privacy.ledger import Ledger
from privacy.mechanism import Plan, Units
from privacy.queries import NormBit
from privacy.sampling import CohortSampler
from simulations.benchmarks.flower_wrappers import Clients, Nodes, arrays, fedavg, one_round
from simulations.benchmarks.release_paths import (
    ABSENT,
    BOUND,
    CLIENTS,
    SAMPLING,
    accounted_outcome,
    flower,
    flower_strategy,
    ours,
)

PARAMS = 1000


@dataclass(frozen=True)
class Cell:
    """What was measured, in words, and whether the property held."""

    holds: bool
    text: str
    value: float | None = None


@dataclass(frozen=True)
class Pair:
    """One line of the table."""

    flower: Cell
    lacquer: Cell


def honest() -> NDArray[np.float32]:
    """Updates of 20 clients, all longer than C."""
    return np.random.default_rng(0).normal(size=(CLIENTS, PARAMS)).astype(np.float32)


def _attempt(measure: Callable[[], Cell]) -> Cell:
    try:
        return measure()
    except (ArithmeticError, TypeError, ValueError) as error:
        return Cell(False, f"raises {type(error).__name__}")


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
    """Noise std over the zC_t/20 that is needed, in an adaptive round after which C falls (all updates clipped)."""
    rows = np.full((CLIENTS, 100_000), 0.01, dtype=np.float32)  # norm 3.2 > C = 1
    strategy: Any = flower_strategy("server-side adaptive", 1.0, clipped_count_stddev=0.6)
    released = one_round(strategy, Clients(rows)).released()
    needed = strategy.noise_multiplier * BOUND / CLIENTS
    plan = Plan(FlatClip(BOUND, rows.shape[1]), 1.0, (NormBit(BOUND, 0.6),))
    exact = ours(torch.from_numpy(rows), ledger, plan, noiseless=True).update
    mine = ours(torch.from_numpy(rows), ledger, plan).update - exact
    return Pair(_ratio(float(released.std()) / needed), _ratio(float(mine.std()) * CLIENTS))


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
        mine.append(CohortSampler.fresh().draw(SAMPLING, 1).tolist())
    return Pair(*(_different(one == other) for one, other in (theirs, mine)))


def _seed_everything() -> None:
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(0)


def _different(equal: bool) -> Cell:
    return Cell(not equal, "identical" if equal else "different")
