"""The two release paths that the negative control compares: ours, and Flower's wrappers, behind one call.

Both take one update per client and return what is released: the change of the global arrays. ``C = 1`` and 20 expected
clients throughout, so one client may move the release by 1/20.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from numpy.typing import NDArray
from torch import Tensor

from privacy.audit.two_world import ReleasePath
from privacy.clipping import FlatClip
from privacy.commitment import Commitment
from privacy.events import Poisson
from privacy.ledger import Ledger
from privacy.mechanism import InsecureZeroNoise, Plan, Release, Units, charged_release, contribute
from privacy.queries import NormBit
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


def flower_outcome(kind: str, updates: NDArray[Any], noise_multiplier: float = 0.0, **replies: Any) -> Outcome:
    """One round of one of Flower's wrappers; without noise unless a multiplier is given."""
    clients = Clients(updates, mods=replies.pop("mods", FLOWER[kind][1]), **replies)
    return one_round(flower_strategy(kind, noise_multiplier), clients)


def accounted_outcome(updates: NDArray[Any], **replies: Any) -> str:
    """What server-side fixed clipping does with such a round if it is given an accountant, in one word."""
    config = PrivacyConfig(1e-5, 1000, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    strategy = flower_strategy("server-side fixed", 1.0, accountant=RdpAccountant(config))
    try:
        outcome = one_round(strategy, Clients(updates, **replies))
    except ValueError:
        return "refused"
    return "not released" if outcome.update is None else "released"


def flower(kind: str, updates: NDArray[Any], noise_multiplier: float = 0.0, **replies: Any) -> NDArray[Any]:
    """What such a round releases: the change of the arrays."""
    return flower_outcome(kind, updates, noise_multiplier, **replies).released()


def flower_path(kind: str, noise_multiplier: float, canary_examples: int = 10, present: int = CLIENTS) -> ReleasePath:
    """Rows -> release for the two-world audit, zero-out adjacency: whoever is missing sends an update of 1e-9.

    present: how many of the 20 clients reply; the last of them is the canary's place.
    """
    examples = [10.0] * CLIENTS
    examples[present - 1] = float(canary_examples)
    absent = frozenset(range(present, CLIENTS))

    def release(rows: Tensor) -> Tensor:
        updates = np.full((CLIENTS, rows.shape[1]), ABSENT, dtype=np.float32)
        updates[: len(rows)] = rows.numpy()
        return torch.from_numpy(flower(kind, updates, noise_multiplier, examples=examples, absent=absent))

    return release


@contextmanager
def scratch_ledger() -> Iterator[Ledger]:
    """A real ledger in a folder that is thrown away, with a budget that never ends; in memory where the system can."""
    memory = Path("/dev/shm")
    commitment = Commitment("client", "add_remove", SAMPLING.population, 1e9, 1e-5, mode="filter", order=2, rho=1e8)
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        Ledger.create(Path(folder) / "ledger.jsonl", commitment) as ledger,
    ):
        yield ledger


def ours(
    updates: Tensor, ledger: Ledger, plan: Plan | None = None, *, losses: Tensor | None = None, noiseless: bool = False
) -> Release:
    """One release of our path; without noise if asked (the ledger is then stamped NOT PRIVATE)."""
    plan = plan or Plan(FlatClip(BOUND, updates.shape[1]), 1.0)
    total = contribute(Units(updates, losses=losses), plan)
    noise = InsecureZeroNoise() if noiseless else None
    return charged_release(total, plan, label="round", round=0, sampling=SAMPLING, ledger=ledger, noise=noise)


def our_path(noise_multiplier: float, ledger: Ledger, bit_std: float | None = None) -> ReleasePath:
    """Rows -> released update for the two-world audit.

    bit_std: release a norm bit with this noise in the same event, at the same effective multiplier; None for no bit.
    """
    queries = () if bit_std is None else (NormBit(BOUND, bit_std),)
    update = sum((noise_multiplier**-2, *(-((query.sensitivity / query.noise_std) ** 2) for query in queries))) ** -0.5

    def release(rows: Tensor) -> Tensor:
        return ours(rows, ledger, Plan(FlatClip(BOUND, rows.shape[1]), update, queries)).update

    return release
