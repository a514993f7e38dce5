"""A client's vote for the first clipping threshold (DP-LAC, arXiv 2605.10272, initial round).

The client has trained and knows its own update Delta. For each candidate threshold c in {1/4, 1/2, 1} x ||Delta|| it
simulates what the server would make of Delta, clip(Delta, c) + N(0, (s c)^2) per coordinate with s the noise per unit
of threshold, and takes its own mean loss there, averaged over a few draws. It votes for the candidate whose loss is
closest to the loss of Delta itself. The simulated noise protects nobody and is seeded; privacy comes from the noise on
the histogram of votes. The number of draws and s = z / (q N) are our reconstruction: the paper gives neither.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from client.cohort import CohortEngine
from client.records import Records
from privacy.queries import OneHotVote
from privacy.rng import simulation_generator

DRAWS = 2


def clip_votes(
    engine: CohortEngine,
    start: Float[Tensor, " size"],
    deltas: Float[Tensor, "clients dim"],
    clients: Sequence[Records],
    query: OneHotVote,
    seeds: Sequence[int],
) -> Int64[Tensor, " clients"]:
    """The bin each client votes for; -1 where it has no vote (no update, or no finite loss).

    Args:
        engine: bound to nothing in particular; its layout says which values are trained.
        start: full vector the clients trained from.
        deltas: their updates.
        clients: their records.
        query: grid, candidates and simulated noise.
        seeds: one per client, for the simulated noise.
    """
    origin = engine.layout.trainable(start)
    votes = torch.full((len(clients),), -1, dtype=torch.int64)
    norms = deltas.double().norm(dim=1)
    for i, (delta, records, seed) in enumerate(zip(deltas, clients, seeds, strict=True)):
        norm = float(norms[i])
        if not 0 < norm < float("inf") or not len(records):
            continue
        rows = [origin + delta]
        for share in query.candidates:
            threshold = share * norm
            for draw in range(DRAWS):
                generator = simulation_generator(seed, "vote", draw)
                noise = torch.from_numpy(generator.standard_normal(len(delta), dtype="float32"))
                simulated = min(1.0, threshold / norm) * delta
                rows.append(origin + simulated + query.simulated_noise_std_per_bound * threshold * noise)
        losses = engine.candidate_losses(start, torch.stack(rows)[None], [records])[0]
        simulated_losses = losses[1:].view(len(query.candidates), DRAWS).mean(dim=1)
        distance = (simulated_losses - losses[0]).abs()
        if bool(distance.isfinite().all()):
            votes[i] = query.nearest_bin(query.candidates[int(distance.argmin())] * norm)
    return votes
