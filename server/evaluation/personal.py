"""Personalisation: a client goes on alone from a released adapter, on its own device and for its own use.

What it trains is never sent. Adapter and, of a classifier, the head are then the client's own; they hold what its
records say, and no guarantee covers them: they must not be released. The released adapter keeps its guarantee.

How far clients get may be asked, as a statistic of private units: every client trains on the first four fifths of its
records, and tells by how much the mean loss of the others falls, clipped to a public bound, and whether it falls. The
answers of all clients are ONE Gaussian release, charged to a ledger of its own before any noise is drawn. Where the run
has trained on the judging records too, they gain less than records that nobody has trained on.

Guarantee: that ledger's, for adding or removing one client; a row of three numbers, none above 1, is no longer than the
square root of 3.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from client.data.prepared import PreparedData
from client.data.records import Records
from client.engine.engine import Engine
from client.engine.local_training import LocalTraining
from client.worker import local_seed
from privacy.accountants import floor_commitment
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.ledger.debited import debited_ledger
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At
from privacy.mechanism import charged_release
from privacy.randomness.sampling import CohortSampler
from server.evaluation.private import NORMAL_95

TRAINED_SHARE: Final = 0.8
"""Share of a client's records, its first, that it trains on; the others judge."""
AT_ONCE: Final = 256
LABEL: Final = "personal"


@dataclass(frozen=True)
class Personal:
    """The result of one client's own training.

    Attributes:
        adapter: full vector; not to be released.
        before, after: mean losses of the records that were not trained on.
        trained, judged: numbers of records.
    """

    adapter: Float[Tensor, " size"]
    before: float
    after: float
    trained: int
    judged: int


def split_own(records: Records) -> tuple[Records, Records]:
    """Split a client's records into the first, which it trains on, and the last, which judge; of one none judges."""
    trained = min(len(records), math.ceil(TRAINED_SHARE * len(records)))
    trained -= len(records) > 1 and trained == len(records)
    return records.span(0, trained), records.span(trained, len(records))


def personalise(engine: Engine, adapter: Float[Tensor, " size"], records: Records, local: LocalTraining) -> Personal:
    """Train on from a released adapter on one client's records, without noise.

    Args:
        adapter: full vector; it is not changed.

    Raises:
        ValueError: fewer than two records, so that none is left to judge.
    """
    if len(records) < 2:
        raise ValueError(f"personal training needs at least 2 records, one of them to judge by; got {len(records)}")
    trained, judged = split_own(records)
    change = engine.train_all(adapter, [trained], local, [local_seed(0, 0, 0)])[0]
    own = engine.layout.trainable_values(adapter) + change.to(adapter)
    vector = engine.layout.with_trainable(adapter, own)
    before, after = (float(engine.losses(each, [judged])[0]) for each in (adapter, vector))
    return Personal(vector, before, after, len(trained), len(judged))


@dataclass(frozen=True)
class GainQuestion:
    """The statistic of all clients, and its price.

    Attributes:
        bound: largest change of a loss that counts, in nats.
    """

    commitment: Commitment
    noise_multiplier: float
    bound: float

    @property
    def plan(self) -> Plan:
        """The release: a mean of rows of a gain, whether it is one, and whether the client counts."""
        return Plan(FlatClip(math.sqrt(3), 3), self.noise_multiplier)

    @property
    def price(self) -> str:
        """The price in words, before anything is spent."""
        one = self.commitment
        return (
            f"This costs epsilon {one.epsilon:g} at delta {one.delta:g} for each of {one.population:,} clients, added "
            "to whatever else is done with these data."
        )


def price_gain(clients: int, epsilon: float, delta: float, bound: float) -> GainQuestion:
    """Calibrate the noise of the statistic to a target; nothing is spent.

    Raises:
        ValueError: a bound that is not above 0, or a target that no noise keeps.
    """
    if not bound > 0:
        raise ValueError(f"the largest gain that counts must be above 0, got {bound}")
    commitment, z = floor_commitment(epsilon, delta, Poisson(1.0, clients), 1, label=LABEL)
    return GainQuestion(commitment, z, bound)


def gain_rows(
    engine: Engine,
    adapter: Float[Tensor, " size"],
    clients: list[Records],
    local: LocalTraining,
    seeds: list[int],
    bound: float,
) -> Float64[np.ndarray, "clients 3"]:
    """The rows of some clients: gain over its bound in [-1, 1], 1 if it is above 0, 1 if the client has two records."""
    parts = [split_own(records) for records in clients]
    changes = engine.train_all(adapter, [trained for trained, _ in parts], local, seeds)
    start = engine.layout.trainable_values(adapter)
    trials = torch.stack([torch.zeros_like(changes), changes], dim=1).to(start) + start
    losses = engine.candidate_losses(adapter, trials, [judged for _, judged in parts]).double().cpu().numpy()
    counts = np.array([len(judged) > 0 for _, judged in parts])
    gains = np.nan_to_num(losses[:, 0] - losses[:, 1], nan=-bound, posinf=bound, neginf=-bound)
    rows = np.stack([np.clip(gains / bound, -1.0, 1.0), gains > 0, np.ones(len(clients))], axis=1)
    result: Float64[np.ndarray, "clients 3"] = rows * counts[:, None]
    return result


def ask_gain(
    engine: Engine,
    adapter: Float[Tensor, " size"],
    data: PreparedData,
    local: LocalTraining,
    question: GainQuestion,
    ledger_file: Path,
    account: At | None = None,
) -> dict[str, Any]:
    """Charge a new ledger, then release by how much personal training helps.

    Args:
        account: of the data, debited first.

    Returns:
        "gain" and "share_that_gains", each with "value" and "within", half the width of its 95 % interval for these
        clients, and "clients", about how many counted.

    Raises:
        FileExistsError: there is a ledger; nothing is spent twice.
        AccountRefused: the account does not pay.
    """
    plan, paid = question.plan, question.commitment
    with debited_ledger(None, lambda: Ledger.create(ledger_file, paid), account, paid) as ledger:
        total = Contribution.zero(plan)
        for start in range(0, data.num_clients, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, data.num_clients))
            seeds = [local_seed(0, 0, number) for number in numbers]
            rows = gain_rows(engine, adapter, [data.client(i) for i in numbers], local, seeds, question.bound)
            total = total + contribute(Units(torch.from_numpy(rows)), plan)
        sampler = CohortSampler.create()
        cohort = sampler.draw(paid.floor[0].sampling, 0, label=LABEL)
        gain, better, counted = (
            charged_release(total, plan, cohort, ledger=ledger).update.double() * data.num_clients
        ).tolist()
    counted = max(1.0, counted)
    noise = NORMAL_95 * question.noise_multiplier * math.sqrt(3) / counted
    values = {"gain": (gain / counted, question.bound), "share_that_gains": (better / counted, 1.0)}
    return {
        **{
            name: {"value": scale * share, "within": scale * noise * math.hypot(1.0, share)}
            for name, (share, scale) in values.items()
        },
        "clients": round(counted),
        "epsilon": paid.epsilon,
        "delta": paid.delta,
    }
