"""A client's vote for the first clipping threshold (DP-LAC, arXiv 2605.10272, initial round).

The client has trained and knows its own update Delta. For each candidate threshold c in {1/4, 1/2, 1} x ||Delta|| it
simulates what the server would make of Delta, clip(Delta, c) + N(0, (s c)^2) per coordinate with s the noise per unit
of threshold, and takes its own mean loss there. It votes for the candidate whose loss is closest to the loss of Delta
itself. The simulated noise protects nobody and is seeded; privacy comes from the noise on the histogram of votes. One
draw per client (the histogram averages over the cohort), shared by its candidates so that they differ by threshold and
not by luck, and s = z / (q N) are our reconstruction: the summary of the paper that this follows gives neither.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from client.data.records import Records
from client.engine.engine import Engine
from privacy.queries import OneHotVote
from privacy.randomness.rng import simulation_generator
from strategies.adapter.trainable import TrainedSubset

WHOLE = TrainedSubset()
CANDIDATE_MEMORY = 256 * 2**20
"""Bytes of simulated updates that are held at a time."""


def clip_votes(
    engine: Engine,
    start: Float[Tensor, " size"],
    rows: Float[Tensor, "clients d"],
    clients: Sequence[Records],
    query: OneHotVote,
    seeds: Sequence[int],
    part: TrainedSubset = WHOLE,
    ranks: int | None = None,
) -> Int64[Tensor, " clients"]:
    """The bin each client votes for; -1 where it has no vote (no update, or no finite loss).

    Args:
        engine: bound to nothing in particular; its layout says which values are trained.
        start: full vector the clients trained from.
        rows: their updates as they would be sent.
        query: grid, candidates and simulated noise.
        seeds: one per client, for the simulated noise.
        part: what they trained of the adapter.
        ranks: how many ranks these clients have; None: all that ``part`` trains. They try nothing beyond them.
    """
    origin = engine.layout.trainable_values(start)
    norms = rows.double().norm(dim=1)
    votes = torch.full((len(clients),), -1, dtype=torch.int64)
    voters = [i for i, records in enumerate(clients) if len(records) and 0 < float(norms[i]) < float("inf")]
    group = max(1, CANDIDATE_MEMORY // (4 * max(1, len(origin)) * (1 + len(query.candidates))))
    for first in range(0, len(voters), group):
        members = voters[first : first + group]
        trials = torch.stack([_trials(rows[i], float(norms[i]), query, seeds[i]) for i in members])
        trials = origin + part.engine_rows(engine.layout, trials, ranks)
        losses = engine.candidate_losses(start, trials, [clients[i] for i in members])
        distances = (losses[:, 1:] - losses[:, :1]).abs()
        for i, distance in zip(members, distances, strict=True):
            if bool(distance.isfinite().all()):
                votes[i] = query.nearest_bin(query.candidates[int(distance.argmin())] * float(norms[i]))
    return votes


def _trials(delta: Float[Tensor, " dim"], norm: float, query: OneHotVote, seed: int) -> Float[Tensor, "trials dim"]:
    """The update itself, then for each candidate threshold the update as the server would see it on average."""
    noise = torch.from_numpy(simulation_generator(seed, "vote").standard_normal(len(delta), dtype="float32"))
    scale = query.simulated_noise_std_per_bound * norm
    seen = [min(1.0, share) * delta + scale * share * noise for share in query.candidates]
    return torch.stack([delta, *seen])
