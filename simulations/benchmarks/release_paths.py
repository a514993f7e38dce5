"""The two release paths that the negative control compares: ours, and Flower's wrappers, behind one call.

Both take one update per client and return what is released: the change of the global arrays. ``C = 1`` and 20 expected
clients throughout, so one client may move the release by 1/20.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from numpy.typing import NDArray
from torch import Tensor

from privacy.clipping import FlatClip
from privacy.commitment import Commitment
from privacy.events import Poisson
from privacy.ledger import Ledger
from privacy.mechanism import InsecureZeroNoise, Plan, Release, Units, charged_release, contribute
from simulations.benchmarks.flower_wrappers import Clients, Outcome, fedavg, one_round

BOUND = 1.0
CLIENTS = 20
SAMPLING = Poisson(rate=0.02, population=1000)  # expects 20 clients
ABSENT = 1e-9  # the update that stands for "took no part" in Flower's paths, which cannot take a zero one

FLOWER: dict[str, tuple[type[Any], tuple[Any, ...]]] = {
    "server-side fixed": (DifferentialPrivacyServerSideFixedClipping, ()),
    "client-side fixed": (DifferentialPrivacyClientSideFixedClipping, (fixedclipping_mod,)),
    "server-side adaptive": (DifferentialPrivacyServerSideAdaptiveClipping, ()),
    "client-side adaptive": (DifferentialPrivacyClientSideAdaptiveClipping, (adaptiveclipping_mod,)),
}


def flower_strategy(kind: str, noise_multiplier: float, bound: float = BOUND, **options: Any) -> Strategy:
    """One of Flower's wrappers around FedAvg for 20 sampled clients."""
    made, _ = FLOWER[kind]
    name = "clipping_norm" if "fixed" in kind else "initial_clipping_norm"
    strategy: Strategy = made(fedavg(), noise_multiplier, num_sampled_clients=CLIENTS, **{name: bound}, **options)
    return strategy


def flower(kind: str, updates: NDArray[Any], noise_multiplier: float = 0.0, **replies: Any) -> Outcome:
    """One round of one of Flower's wrappers; without noise unless a multiplier is given."""
    clients = Clients(updates, mods=replies.pop("mods", FLOWER[kind][1]), **replies)
    return one_round(flower_strategy(kind, noise_multiplier), clients)


def flower_path(
    kind: str, noise_multiplier: float, canary_examples: int = 10, present: int = CLIENTS
) -> Callable[[Tensor], Tensor]:
    """`rows -> release` for the two-world audit, zero-out adjacency: whoever is missing sends an update of 1e-9.

    present: how many of the 20 clients reply; the last of them is the canary's place.
    """

    def release(rows: Tensor) -> Tensor:
        updates = np.full((CLIENTS, rows.shape[1]), ABSENT, dtype=np.float32)
        updates[: len(rows)] = rows.numpy()
        canary = present - 1
        examples = [10.0] * CLIENTS
        examples[canary] = float(canary_examples)
        absent = frozenset(range(present, CLIENTS))
        outcome = flower(kind, updates, noise_multiplier, examples=examples, absent=absent)
        assert outcome.update is not None
        return torch.from_numpy(outcome.update)

    return release


@contextmanager
def scratch_ledger() -> Iterator[Ledger]:
    """A real ledger in a folder that is thrown away, with a budget that never ends."""
    commitment = Commitment("client", "add_remove", SAMPLING.population, 1e9, 1e-5, mode="filter", order=2, rho=1e8)
    with tempfile.TemporaryDirectory() as folder, Ledger.create(Path(folder) / "ledger.jsonl", commitment) as ledger:
        yield ledger


def ours(
    updates: Tensor, ledger: Ledger, plan: Plan | None = None, *, losses: Tensor | None = None, noiseless: bool = False
) -> Release:
    """One release of our path; without noise if asked (the ledger is then stamped NOT PRIVATE)."""
    plan = plan or Plan(FlatClip(BOUND, updates.shape[1]), 1.0)
    total = contribute(Units(updates, losses=losses), plan)
    noise = InsecureZeroNoise() if noiseless else None
    return charged_release(total, plan, label="round", round=0, sampling=SAMPLING, ledger=ledger, noise=noise)


def our_path(noise_multiplier: float, ledger: Ledger) -> Callable[[Tensor], Tensor]:
    """`rows -> release` for the two-world audit."""

    def release(rows: Tensor) -> Tensor:
        return ours(rows, ledger, Plan(FlatClip(BOUND, rows.shape[1]), noise_multiplier)).update

    return release
