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
from simulations.benchmarks.release_paths import ABSENT, BOUND, CLIENTS, SAMPLING, flower, flower_strategy, ours

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


def _moved(released: NDArray[Any], without: NDArray[Any]) -> Cell:
    difference = released.astype(np.float64) - without
    finite = np.isfinite(difference)
    moves = float(np.linalg.norm(difference[finite])) * CLIENTS / BOUND
    lost = int((~finite).sum())
    text = f"{lost} of {difference.size} coordinates not finite, the others moved by {moves:.4g}"
    return Cell(lost == 0 and moves <= 1 + 1e-5, text, moves)


def _odd_update(update: NDArray[np.float32], ledger: Ledger) -> Pair:
    rows, without = honest(), honest()
    rows[0], without[0] = update, ABSENT

    def through_flower() -> Cell:
        with np.errstate(all="ignore"):
            base = flower("server-side fixed", without).update
            return _moved(flower("server-side fixed", rows).update, base)  # type: ignore[arg-type]

    base = ours(torch.from_numpy(without), ledger, noiseless=True).update.numpy()
    return Pair(
        _attempt(through_flower), _moved(ours(torch.from_numpy(rows), ledger, noiseless=True).update.numpy(), base)
    )


def nan_update(ledger: Ledger) -> Pair:
    """A client sends one NaN and 1e6 everywhere else"""
    return _odd_update(np.where(np.arange(PARAMS) == 0, np.nan, 1e6).astype(np.float32), ledger)


def infinite_update(ledger: Ledger) -> Pair:
    """A client sends one infinity"""
    return _odd_update(np.where(np.arange(PARAMS) == 0, np.inf, 0.01).astype(np.float32), ledger)


def zero_update(ledger: Ledger) -> Pair:
    """A client sends an update of zeros"""
    return _odd_update(np.zeros(PARAMS, dtype=np.float32), ledger)


def integer_arrays(ledger: Ledger) -> Pair:
    """Updates of integer type, longer than C"""
    rows, without = honest().round().astype(np.int64), honest().round().astype(np.int64)
    without[0] = 0
    without[0, 0] = 1

    def through_flower() -> Cell:
        return _moved(flower("server-side fixed", rows).update, flower("server-side fixed", without).update)  # type: ignore[arg-type]

    mine, base = (ours(torch.from_numpy(r), ledger, noiseless=True).update.numpy() for r in (rows, rows[1:]))
    return Pair(_attempt(through_flower), _moved(mine, base))


def example_weights(ledger: Ledger) -> Pair:
    """A client reports 1000 examples, the others 10 each"""
    rows, without = honest(), honest()
    without[0] = ABSENT
    examples = [1000.0] + [10.0] * (CLIENTS - 1)
    one, other = (flower("server-side fixed", r, examples=examples).update for r in (rows, without))
    mine, base = (ours(torch.from_numpy(r), ledger, noiseless=True).update.numpy() for r in (rows, without))
    lacquer = _moved(mine, base)
    return Pair(_moved(one, other), Cell(lacquer.holds, lacquer.text + "; counts are not asked for", lacquer.value))  # type: ignore[arg-type]


def unclipped_client(ledger: Ledger) -> Pair:
    """A client does not clip (client-side clipping; Flower: its app lacks the mod; here: one client a node)"""
    rows, without = honest(), honest()
    rows[0], without[0] = 100.0, ABSENT
    one, other = (flower("client-side fixed", r, mods=()).update for r in (rows / 1e3, without / 1e3))
    plan = Plan(FlatClip(BOUND, PARAMS), 1.0)
    reply = contribute(Units(torch.from_numpy(rows[:1])), plan)
    reply.encoded.mul_(100)
    try:
        validate(reply, plan, max_units=1)
    except ValueError:
        return Pair(_moved(one, other), Cell(True, "the reply is refused: longer than one unit can be"))  # type: ignore[arg-type]
    return Pair(_moved(one, other), Cell(False, "the reply is accepted"))  # type: ignore[arg-type]


def noise_scale(ledger: Ledger) -> Pair:
    """Noise std over zC/20, fixed clipping"""
    rows = np.full((CLIENTS, 100_000), ABSENT, dtype=np.float32)
    released = flower("server-side fixed", rows, 1.0).update
    mine = ours(torch.from_numpy(rows), ledger).update.numpy()
    return Pair(_ratio(float(released.std()) * CLIENTS), _ratio(float(mine.std()) * CLIENTS))  # type: ignore[union-attr]


def _ratio(ratio: float) -> Cell:
    return Cell(ratio > 0.99, f"{ratio:.3f}", ratio)


def adaptive_noise_scale(ledger: Ledger) -> Pair:
    """Noise std over zC_t/20 in an adaptive round in which C falls (every update is clipped)"""
    rows = np.full((CLIENTS, 100_000), 0.01, dtype=np.float32)  # norm 3.2 > C = 1
    strategy: Any = flower_strategy("server-side adaptive", 1.0, clipped_count_stddev=10.0)
    released = one_round(strategy, Clients(rows)).update
    needed = strategy.noise_multiplier * BOUND / CLIENTS
    query = NormBit(BOUND, 10.0)
    plan = Plan(FlatClip(BOUND, rows.shape[1]), 1.0, (query,))
    mine = ours(torch.from_numpy(rows), ledger, plan).update.numpy()
    return Pair(_ratio(float(released.std()) / needed), _ratio(float(mine.std()) * CLIENTS))  # type: ignore[union-attr]


def adaptive_direction(ledger: Ledger) -> Pair:
    """C after 60 adaptive rounds, all norms 1, target quantile 0.5, from C = 0.1 and from C = 10"""
    rows = honest() / np.linalg.norm(honest(), axis=1, keepdims=True)
    ends, mine = [], []
    for start in (0.1, 10.0):
        strategy: Any = flower_strategy("server-side adaptive", 0.0, bound=start)
        bound = start
        for number in range(1, 61):
            one_round(strategy, Clients(rows), number)
            plan = Plan(NoUpdate(), 1.0, (NormBit(bound, 1.0),))
            answer = ours(torch.from_numpy(rows), ledger, plan, noiseless=True).answers[0]
            unclipped = float(answer[0]) / CLIENTS + 0.5
            bound *= float(np.exp(-0.2 * (unclipped - 0.5)))  # Andrew et al. 2021, arXiv 1905.03871v5
        ends.append(float(strategy.clipping_norm))
        mine.append(bound)
    return Pair(
        Cell(all(0.8 < end < 1.25 for end in ends), f"{ends[0]:.2g} and {ends[1]:.4g}"),
        Cell(
            all(0.8 < end < 1.25 for end in mine), f"{mine[0]:.2f} and {mine[1]:.2f} (NormBit, rule of Andrew et al.)"
        ),
    )


def replayed_noise(ledger: Ledger) -> Pair:
    """Noise of two releases after seeding every seedable generator alike"""
    rows, seen = np.full((CLIENTS, PARAMS), ABSENT, dtype=np.float32), []
    for _ in range(2):
        np.random.seed(0)
        random.seed(0)
        torch.manual_seed(0)
        seen.append(
            (flower("server-side fixed", rows, 1.0).update, ours(torch.from_numpy(rows), ledger).update.numpy())
        )
    same = [bool(np.array_equal(one, other)) for one, other in zip(*seen, strict=True)]  # type: ignore[arg-type]
    texts = ["identical" if equal else "different" for equal in same]
    return Pair(Cell(not same[0], texts[0]), Cell(not same[1], texts[1]))


def replayed_cohort(ledger: Ledger) -> Pair:
    """Two draws of a cohort after seeding every seedable generator alike"""
    drawn = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        strategy = fedavg()
        strategy.fraction_train = 0.02
        messages = strategy.configure_train(1, arrays(np.zeros(1)), ConfigRecord({}), Nodes(1000))  # type: ignore[arg-type]
        drawn.append(sorted(message.metadata.dst_node_id for message in messages))
    mine = [CohortSampler.fresh().draw(SAMPLING, 1).tolist() for _ in range(2)]
    texts = [f"{'identical' if a == b else 'different'}, sizes {len(a)} and {len(b)}" for a, b in (drawn, mine)]
    return Pair(Cell(drawn[0] != drawn[1], texts[0]), Cell(mine[0] != mine[1], texts[1]))
