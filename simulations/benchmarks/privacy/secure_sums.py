"""What a secure sum costs, in CPU seconds and in bytes: the table of docs/results/costs.md.

Run: `python -m simulations.benchmarks privacy.secure_sums`. Two minutes.

All parties and the server of one round in one process, with the messages of a deployment built and read, for 10, 50 and
100 clients and vectors of 3,842 and 100,000 numbers; once with everybody there, once with a tenth of the clients gone
when vectors are due. Every opened sum is compared with the plain one. CPU time of one thread, so that a busy machine
does not show. Bytes are those of the serialised records, without the model that a round sends down in any case.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import typer
from flwr.app import RecordDict
from flwr.common.serde import recorddict_to_proto

from privacy.accountants.calibration import filter_commitment
from privacy.clipping.norms import FlatClip
from privacy.contribution import Contribution, Plan
from privacy.events import NoiseShares, Poisson
from privacy.mechanism import noisy_share
from privacy.secagg import keys, party, primitives
from privacy.secagg.aggregator import Aggregator
from privacy.secagg.federation import Federation
from simulations.benchmarks.harness import markdown
from simulations.benchmarks.harness.markdown import Columns, Row
from simulations.benchmarks.harness.results import say, write
from strategies.messages.client_update import contribution_records
from strategies.messages.secure_sum import (
    KeysRequest,
    StepRequest,
    masked_records,
    read_masked,
    read_table,
    table_records,
)

CLIENTS = (10, 50, 100)
DIMENSIONS = (3_842, 100_000)
CONTENT = bytes(32)
NOISE_MULTIPLIER = 2.0
SERVER = -1


@dataclass
class Meter:
    """CPU seconds and bytes of everyone in one round."""

    seconds: dict[int, float] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def of(self, who: int) -> Iterator[None]:
        """What is done within counts as the work of ``who``."""
        start = time.process_time()
        yield
        self.seconds[who] = self.seconds.get(who, 0.0) + time.process_time() - start

    def sent(self, who: int, request: RecordDict, reply: RecordDict) -> None:
        """Count a message to ``who`` and its reply."""
        self.down[who] = self.down.get(who, 0) + size(request)
        self.up[who] = self.up.get(who, 0) + size(reply)


def size(records: RecordDict) -> int:
    """Bytes of a message's content on the wire."""
    return len(recorddict_to_proto(records).SerializeToString())


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(1)
    rows = []
    for dim in DIMENSIONS:
        for clients in CLIENTS:
            for gone in (0, clients // 10):
                rows.append(measured(clients, dim, gone))
                say(rows[-1])
    write("secure-sums", {"noise_multiplier": NOISE_MULTIPLIER, "rows": rows})


def measured(clients: int, dim: int, gone: int) -> dict[str, Any]:
    """One round of ``clients`` clients, of which ``gone`` do not hand in a vector."""
    shares = NoiseShares(clients, math.ceil(0.8 * clients))
    identities = [keys.fresh_identity() for _ in range(clients)]
    everybody = Poisson(1.0, clients)
    commitment, _ = filter_commitment(4.0, 1e-5, everybody, 1, adjacency="zero_out", noise_shares=shares)
    federation = Federation(tuple(map(keys.public_identity, identities)), commitment)
    plan = Plan(FlatClip(1.0, dim), NOISE_MULTIPLIER)
    meter = Meter()
    noise, plain = noisy_vector(dim, plan, shares)
    vectors = np.random.Generator(np.random.PCG64(0)).integers(-(1 << 20), 1 << 20, (clients, dim))
    opened = round_of(federation, identities, vectors, gone, meter)
    if not np.array_equal(opened, vectors[gone:].sum(axis=0)):
        raise AssertionError("the opened sum is not the sum")
    there = range(gone, clients)
    return {
        "clients": clients,
        "dimension": dim,
        "gone": gone,
        "modulus_bits": shares.modulus_bits,
        "client_seconds": float(np.median([meter.seconds[one] for one in there])),
        "noise_seconds": noise,
        "server_seconds": meter.seconds[SERVER],
        "client_bytes_up": int(np.median([meter.up[one] for one in there])),
        "client_bytes_down": int(np.median([meter.down[one] for one in there])),
        "plain_bytes_up": plain,
    }


def noisy_vector(dim: int, plan: Plan, shares: NoiseShares) -> tuple[float, int]:
    """CPU seconds of one share of the noise, least of three, and bytes of the reply without secure sums."""
    contribution = Contribution.zero(plan)
    times = []
    for _ in range(3):
        start = time.process_time()
        noisy_share(contribution, plan, shares)
        times.append(time.process_time() - start)
    random = Contribution(torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(-(1 << 30), 1 << 30, dim)))
    return min(times), size(contribution_records(random, 1))


def round_of(
    federation: Federation, identities: list[bytes], vectors: np.ndarray, gone: int, meter: Meter
) -> np.ndarray:
    """One round with its messages; the opened sum."""
    session = federation.session("benchmark", "round", 1, 0, CONTENT)
    server, states = Aggregator(federation, session, vectors.shape[1]), {}
    for one, identity in enumerate(identities):
        with meter.of(one):
            states[one], said = party.begin(identity, federation, one, session, CONTENT)
        reply = table_records({one: said.to_bytes()})
        meter.sent(one, KeysRequest("0" * 32, "round", 1, 0, CONTENT, one).to_records(), reply)
        with meter.of(SERVER):
            server.add_announcement(one, read_table(reply, keys.ANNOUNCEMENT_BYTES, 1)[one])
    announced = list(server.announcements.values())
    said_by_all = {said.party: said.to_bytes() for said in announced}
    for one in states:
        with meter.of(one):
            states[one], boxes = party.share(states[one], federation, announced)
        reply = table_records(boxes)
        meter.sent(one, StepRequest(session, one, said_by_all).to_records(), reply)
        with meter.of(SERVER):
            server.add_sealed(one, read_table(reply, party.SEALED_BYTES, len(states)))
    for one in range(gone, len(states)):
        boxes = server.sealed_for(one)
        with meter.of(one):
            states[one] = party.accept(states[one], federation, CONTENT, boxes)
            states[one], data = party.mask_vector(states[one], federation, vectors[one])
        reply = masked_records(data)
        meter.sent(one, StepRequest(session, one, boxes).to_records(), reply)
        with meter.of(SERVER):
            server.add_masked(one, read_masked(reply, len(data)))
    listed = server.survivors
    for one in listed:
        with meter.of(one):
            states[one], word = party.confirm(states[one], federation, identities[one], listed)
        meter.sent(one, StepRequest(session, one, dict.fromkeys(listed, b"")).to_records(), table_records({one: word}))
        with meter.of(SERVER):
            server.add_signature(one, word)
    signed = dict(server.signatures)
    for one in listed:
        with meter.of(one):
            reply = table_records(party.reveal(states[one], federation, signed))
        meter.sent(one, StepRequest(session, one, signed).to_records(), reply)
        with meter.of(SERVER):
            server.add_revealed(one, read_table(reply, primitives.SHARE_BYTES, len(states)))
    with meter.of(SERVER):
        return server.open_sum()


def table(results: Row) -> str:
    """One line per number of clients, length and dropouts."""
    columns: Columns = {
        "clients": "{clients}",
        "of them gone": "{gone}",
        "length": "{dimension:,}",
        "client: protocol": "{client_seconds:.3f} s",
        "client: noise": "{noise_seconds:.3f} s",
        "server": "{server_seconds:.2f} s",
        "client sends": lambda row: _size(row["client_bytes_up"]),
        "without secure sums": lambda row: _size(row["plain_bytes_up"]),
        "client receives beside the model": lambda row: _size(row["client_bytes_down"]),
    }
    environment = results["environment"]
    machine = f"{environment['system']}, {environment['cores']} cores"
    how = f"CPU time of one thread; {machine}; commit `{environment['commit']}`."
    return f"{markdown.table(results['rows'], columns, 'r')}\n{how}\n"


def _size(count: int) -> str:
    return f"{count / 1000:,.0f} kB" if count >= 10_000 else f"{count / 1000:.1f} kB"


if __name__ == "__main__":
    typer.run(main)  # any argument but --help is refused: a run overwrites what was measured
