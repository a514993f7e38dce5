"""The checks of the negative control that are about the guarantee as a whole: absences, metrics, accounting, audits."""

from inspect import signature
from typing import Any

import numpy as np
import torch
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from numpy.typing import NDArray

from privacy import accountants
from privacy.audit.bounds import gdp_epsilon
from privacy.audit.two_world import ReleasePath, TwoWorldAudit, two_world
from privacy.clipping import FlatClip
from privacy.events import FixedSize, Poisson
from privacy.ledger import Ledger
from privacy.mechanism import Plan
from privacy.queries import BoundedMean, NormBit
from simulations.benchmarks.flower_checks import Cell, Pair, honest
from simulations.benchmarks.flower_wrappers import Clients, fedavg, one_round
from simulations.benchmarks.release_paths import (
    ABSENT,
    BOUND,
    CLIENTS,
    accounted_outcome,
    flower,
    flower_outcome,
    flower_path,
    our_path,
    ours,
)

DELTA = 1e-5
AUDIT_PARAMS = 64
AUDIT_Z = 0.5
ROUNDS, Z = 200, 1.7618  # the noise for epsilon 4 with 100 of 1000 clients a round


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


def adaptive_accounting(ledger: Ledger) -> Pair:
    """How adaptive clipping is accounted."""
    offered = "accountant" in signature(DifferentialPrivacyServerSideAdaptiveClipping.__init__).parameters
    plan = Plan(FlatClip(BOUND, honest().shape[1]), 1.0, (NormBit(BOUND, 2.0),))
    ours(torch.from_numpy(honest()), ledger, plan)
    charged = [part.name for part in ledger.events[-1].components]
    return Pair(
        Cell(offered, "an accountant can be given" if offered else "no accountant can be given"),
        Cell(charged == ["update", "norm-bit"], f"{' and '.join(charged)} are one charged event"),
    )


def epsilon_of_a_run(ledger: Ledger) -> Pair:
    """Epsilon reported for 200 rounds of 100 of 1000 clients at z = 1.7618."""
    config = PrivacyConfig(DELTA, 1000, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    accountant = RdpAccountant(config)
    accountant.compose(GaussianPrivacyEvent(Z, 100, 1000), ROUNDS)
    theirs = accountant.get_privacy_spent().epsilon
    mine = accountants.epsilon([(Poisson(0.1, 1000), Z, ROUNDS)], DELTA)
    return Pair(
        Cell(True, f"{theirs:.2f} (RDP, no amplification: all that its strategies take)", theirs),
        Cell(True, f"{mine:.2f} (PLD, Poisson sampling)", mine),
    )


def fixed_size_accounting(ledger: Ledger) -> Pair:
    """Epsilon reported for 200 cohorts of 100 of 1000 without replacement, replace-one, z = 2 (sound: 20.7)."""
    config = PrivacyConfig(DELTA, 1000, NeighboringRelation.REPLACE_ONE, SamplingMethod.WITHOUT_REPLACEMENT)
    accountant = RdpAccountant(config)
    accountant.compose(GaussianPrivacyEvent(2.0, 100, 1000), ROUNDS)
    theirs = accountant.get_privacy_spent().epsilon
    mine = accountants.epsilon([(FixedSize(100, 1000), 2.0, ROUNDS)], DELTA, "rdp", adjacency="replace_one")
    # Replacing one client moves a sum by 2C, so the noise over the distance of neighbours is z / 2.
    return Pair(Cell(theirs > 20, f"{theirs:.2f} (its accountant alone)", theirs), Cell(mine > 20, f"{mine:.2f}", mine))


def local_dp(ledger: Ledger) -> Pair:
    """What epsilon one message has when LocalDpMod is asked for 10, with sensitivity C, add or remove one."""
    rows = np.full((CLIENTS, 100_000), ABSENT, dtype=np.float32)
    mod = LocalDpMod(BOUND, BOUND, 10.0, DELTA)
    std = float(one_round(fedavg(), Clients(rows, mods=(mod,))).released().std()) * CLIENTS**0.5
    real = gdp_epsilon(BOUND / std, DELTA)
    return Pair(Cell(real <= 10, f"{real:.2f}", real), Cell(True, "no local mechanism is offered"))


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
