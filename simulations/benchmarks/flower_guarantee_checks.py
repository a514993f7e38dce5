"""The checks of the negative control that are about the guarantee as a whole: absences, metrics, accounting, audits."""

from inspect import signature

import numpy as np
import torch
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from privacy import accountants
from privacy.audit.bounds import gdp_epsilon
from privacy.audit.two_world import ReleasePath, TwoWorldAudit, two_world
from privacy.clipping import FlatClip
from privacy.events import FixedSize, Poisson
from privacy.ledger import Ledger
from privacy.mechanism import Plan
from privacy.queries import BoundedMean
from simulations.benchmarks.flower_checks import Cell, Pair, honest
from simulations.benchmarks.flower_wrappers import Clients, fedavg, one_round
from simulations.benchmarks.release_paths import BOUND, CLIENTS, flower, flower_path, our_path, ours

DELTA = 1e-5
AUDIT_PARAMS = 64
AUDIT_Z = 0.5
ROUNDS, Z = 200, 1.7618  # the noise for epsilon 4 with 100 of 1000 clients a round


def absent_clients(ledger: Ledger) -> Pair:
    """10 of 20 clients do not reply: noise std over zC/(divisor), the z that one client meets at z = 1"""
    rows = np.full((CLIENTS, 100_000), 1e-9, dtype=np.float32)
    half = frozenset(range(CLIENTS // 2, CLIENTS))
    shifted = rows.copy()
    shifted[0] = 1.0
    one, other = (flower("server-side fixed", updates, absent=half).update for updates in (shifted, rows))
    move = _difference(one, other)
    spread = flower("server-side fixed", rows, 1.0, absent=half).update.std()  # type: ignore[union-attr]
    present = torch.from_numpy(rows[: CLIENTS // 2])
    mine = _difference(
        ours(torch.from_numpy(shifted[: CLIENTS // 2]), ledger, noiseless=True).update.numpy(),
        ours(present, ledger, noiseless=True).update.numpy(),
    )
    met = (float(spread) / move, float(ours(present, ledger).update.std()) / mine)
    return Pair(*(Cell(z > 0.99, f"{z:.3f}", z) for z in met))


def _difference(one: np.ndarray | None, other: np.ndarray | None) -> float:
    assert one is not None
    assert other is not None
    return float(np.linalg.norm(one.astype(np.float64) - other))


def failed_client(ledger: Ledger) -> Pair:
    """One of 20 clients replies with an error"""
    outcome = flower("server-side fixed", honest(), 1.0, failing=frozenset({3}))
    text = "nothing is released, nothing is accounted" if outcome.update is None else "released"
    before = len(ledger.events)
    ours(torch.from_numpy(honest()[1:]), ledger)
    charged = len(ledger.events) == before + 1
    return Pair(Cell(outcome.update is not None, text), Cell(charged, "released and charged, same scale, same noise"))


def metrics(ledger: Ledger) -> Pair:
    """A client reports a training loss of 1e6, the others 0: how far the released mean loss is from the exact one"""
    outcome = flower("server-side fixed", honest(), 1.0, losses=[1e6] + [0.0] * (CLIENTS - 1))
    off = abs(outcome.metrics["train_loss"] - 1e6 / CLIENTS)
    query = BoundedMean(bound=4.0, noise_std=40.0)
    plan = Plan(FlatClip(BOUND, honest().shape[1]), 1.0, (query,))
    losses = torch.tensor([1e6] + [0.0] * (CLIENTS - 1))
    released = ours(torch.from_numpy(honest()), ledger, plan, losses=losses)
    sum_error = float(released.answers[0]) - query.bound
    charged = ledger.events[-1].components[-1].name == query.name
    return Pair(
        Cell(off > 1e-6, f"{off:.1g}: released exactly, unclipped, outside the accounting"),
        Cell(
            charged, f"{abs(sum_error) / CLIENTS:.2g}: clipped to {query.bound:g}, noise on the sum, part of the charge"
        ),
    )


def epsilon_of_a_run(ledger: Ledger) -> Pair:
    """Epsilon of 200 rounds, 100 of 1000 clients, z = 1.7618 (delta 1e-5)"""
    config = PrivacyConfig(DELTA, 1000, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    accountant = RdpAccountant(config)
    accountant.compose(GaussianPrivacyEvent(Z, 100, 1000), ROUNDS)
    theirs = accountant.get_privacy_spent().epsilon
    mine = accountants.epsilon([(Poisson(0.1, 1000), Z, ROUNDS)], DELTA)
    return Pair(
        Cell(True, f"{theirs:.2f} (RDP, the only sampling its DP strategies account: none)", theirs),
        Cell(True, f"{mine:.2f} (PLD, Poisson)", mine),
    )


def fixed_size_accounting(ledger: Ledger) -> Pair:
    """Epsilon of the same 200 rounds drawn without replacement, replace-one, z = 2 (sound: 20.7)"""
    config = PrivacyConfig(DELTA, 1000, NeighboringRelation.REPLACE_ONE, SamplingMethod.WITHOUT_REPLACEMENT)
    accountant = RdpAccountant(config)
    accountant.compose(GaussianPrivacyEvent(2.0, 100, 1000), ROUNDS)
    theirs = accountant.get_privacy_spent().epsilon
    mine = accountants.epsilon([(FixedSize(100, 1000), 2.0, ROUNDS)], DELTA, "rdp", adjacency="replace_one")
    # Replacing one client moves a sum by 2C, so the noise over the distance is z / 2.
    return Pair(*(Cell(value > 20, f"{value:.2f}", value) for value in (theirs, mine)))


def adaptive_accounting(ledger: Ledger) -> Pair:
    """Accounting of adaptive clipping"""
    offered = "accountant" in signature(DifferentialPrivacyServerSideAdaptiveClipping.__init__).parameters
    charged = ledger.events[-1].components
    return Pair(
        Cell(offered, "an accountant can be given" if offered else "no accountant can be given"),
        Cell(len(charged) == 2, "norm bit and update are one charged event"),
    )


def local_dp(ledger: Ledger) -> Pair:
    """LocalDpMod asked for epsilon 10 at delta 1e-5, sensitivity C: what one message really has, add/remove"""
    rows = np.full((CLIENTS, 100_000), 1e-9, dtype=np.float32)
    mod = LocalDpMod(BOUND, BOUND, 10.0, DELTA)
    released = one_round(fedavg(), Clients(rows, mods=(mod,))).update
    std = float(released.std()) * CLIENTS**0.5  # type: ignore[union-attr]
    real = gdp_epsilon(BOUND / std, DELTA)
    return Pair(Cell(real <= 10, f"{real:.2f}", real), Cell(True, "no local mechanism is offered"))


def audit(path: ReleasePath, honest_units: int) -> TwoWorldAudit:
    """Two-world test at z = 1/2, R = 1000, alpha 1e-3, canary of norm 800."""
    rows = torch.randn(honest_units, AUDIT_PARAMS, generator=torch.Generator().manual_seed(1)) * 5
    return two_world(path, rows, torch.full((AUDIT_PARAMS,), 100.0), noise_multiplier=AUDIT_Z)


def verdict(result: TwoWorldAudit) -> Cell:
    """The outcome in words."""
    text = f"mu >= {result.mu_lower:.2f} (estimate {result.mu_estimate:.2f}, claim {result.claimed_mu:g})"
    return Cell(result.passed, text, result.mu_lower)


AUDITS: dict[str, tuple[str, int, int]] = {
    "Two-world audit: fixed, server-side, equal counts": ("server-side fixed", 10, CLIENTS),
    "Two-world audit: fixed, client-side, equal counts": ("client-side fixed", 10, CLIENTS),
    "Two-world audit: fixed, the canary reports 1000 examples": ("server-side fixed", 1000, CLIENTS),
    "Two-world audit: fixed, 10 of 20 reply": ("server-side fixed", 10, CLIENTS // 2),
    "Two-world audit: adaptive, server-side, equal counts": ("server-side adaptive", 10, CLIENTS),
}


def audits(ledger: Ledger) -> dict[str, Pair]:
    """Every audit of Flower's paths beside the audit of ours with as many units present."""
    mine = {present: verdict(audit(our_path(AUDIT_Z, ledger), present - 1)) for present in (CLIENTS, CLIENTS // 2)}
    return {
        name: Pair(verdict(audit(flower_path(kind, AUDIT_Z, examples, present), present - 1)), mine[present])
        for name, (kind, examples, present) in AUDITS.items()
    }
