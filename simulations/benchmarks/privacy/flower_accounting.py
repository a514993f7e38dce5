"""What Flower's own accountants state of a run, beside what ours do: lines of the table of ``flower_dp.py``."""

from inspect import signature

import dp_accounting
import dp_accounting.rdp
import numpy as np
import torch
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from privacy.accountants import composition
from privacy.audit.bounds import gdp_epsilon
from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.queries import NormBit
from simulations.benchmarks.privacy.flower_rounds import (
    ABSENT,
    BOUND,
    CLIENTS,
    Cell,
    Clients,
    Pair,
    fedavg,
    honest,
    one_round,
    ours,
)

DELTA = 1e-5
ROUNDS, Z = 200, 1.7618  # the noise for epsilon 4 with 100 of 1000 clients a round


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
    mine = composition.epsilon([(Poisson(0.1, 1000), Z, ROUNDS)], DELTA)
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
    # Replacing one client moves a sum by 2C, so the noise over the distance of neighbours is z / 2.
    sound = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    cohort = dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, dp_accounting.GaussianDpEvent(2.0 / 2))
    mine = float(sound.compose(cohort, ROUNDS).get_epsilon(DELTA))
    return Pair(Cell(theirs > 20, f"{theirs:.2f} (its accountant alone)", theirs), Cell(mine > 20, f"{mine:.2f}", mine))


def local_dp(ledger: Ledger) -> Pair:
    """What epsilon one message has when LocalDpMod is asked for 10, with sensitivity C, add or remove one."""
    rows = np.full((CLIENTS, 100_000), ABSENT, dtype=np.float32)
    mod = LocalDpMod(BOUND, BOUND, 10.0, DELTA)
    std = float(one_round(fedavg(), Clients(rows, mods=(mod,))).released().std()) * CLIENTS**0.5
    real = gdp_epsilon(BOUND / std, DELTA)
    return Pair(Cell(real <= 10, f"{real:.2f}", real), Cell(True, "no local mechanism is offered"))
