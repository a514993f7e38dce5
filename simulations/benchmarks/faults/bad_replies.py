"""Malformed and hostile replies, through the real strategy.

Run: `python -m simulations.benchmarks faults.bad_replies [--count 12000]`.

Every node of a federation of single clients answers, and just under half of them are hostile: each sends one reply of a
kind below, made at random of an honest one, from a seed, through Flower's own protobuf form, into
``DpFedAvg.aggregate_train``. After every round it is checked that

- nothing crashed, and reading no reply raised anything unforeseen;
- the release is that of the honest nodes alone, to the last bit (no noise is added here);
- replies whose bytes were changed at random, and which may therefore have become honest-looking lies, moved the sum by
  no more than one clipped update each;
- no line of the log repeats a word or a number that a hostile node planted in its reply.
"""

import io
import logging
import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.task_identity import TaskIdentity

from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import GRID, contribute
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from simulations.benchmarks.harness.results import origin, say, write
from strategies.adapter.layout import AdapterLayout, Entry
from strategies.aggregations.factors import Plain
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac
from strategies.dp_fedavg import DpFedAvg
from strategies.messages.client_update import TrainRequest, contribution_records
from strategies.optimizers.fedavg import FedAvg

WORD, NUMBER = "patient-4711-has-", 7654321
"""What a hostile reply holds and no log may repeat."""

Kind = Callable[[random.Random, RecordDict], RecordDict | None]
ROUND = "round"


def _name(records: RecordDict) -> str:
    """The array a kind works on: the update, or the votes where a round has no update."""
    return "encoded" if len(records.array_records["arrays"]["encoded"].data) > 128 else "answer-0"


def _encoded(records: RecordDict) -> Array:
    return records.array_records["arrays"][_name(records)]


def _settings(records: RecordDict) -> Any:
    return records.config_records["config"]


def _with(records: RecordDict, array: Array) -> RecordDict:
    records.array_records["arrays"][_name(records)] = array
    return records


def _npy(array: np.ndarray, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=pickled)
    return buffer.getvalue()


def wrong_shape(rng: random.Random, records: RecordDict) -> RecordDict:
    """Longer, shorter, empty, a matrix, a number, or declared to be what it is not."""
    good = _encoded(records).numpy()
    length = rng.choice([n for n in (0, 1, len(good) - 1, len(good) + 1, rng.randint(0, 99)) if n != len(good)])
    other = np.full(length, NUMBER, dtype=np.int64)
    declared = rng.choice([(length,), (2**62,), (-1,), (len(good), 1), (), (len(good),) * 3, (rng.getrandbits(62),)])
    return _with(
        records,
        rng.choice(
            [
                Array(other),
                Array(good.reshape(1, -1)),
                Array(np.array(NUMBER)),
                Array("int64", declared, "numpy.ndarray", _npy(good)),
                Array("int64", (len(good),), "numpy.ndarray", _npy(other)),
            ]
        ),
    )


def wrong_dtype(rng: random.Random, records: RecordDict) -> RecordDict:
    """Other numbers than 64-bit integers, or bytes of another type than is declared; pickles among them."""
    good = _encoded(records).numpy()
    dtype = rng.choice(["int32", "uint64", "float32", "float64", "complex128", "bool", ">i8", "U8"])
    declared = rng.choice([dtype, "int64", "object", WORD])
    objects = np.array([WORD] * len(good), dtype=object)
    data = rng.choice([_npy(good.astype(dtype)), _npy(objects, pickled=True), pickle.dumps(good), good.tobytes()])
    return _with(records, Array(declared, (len(good),), rng.choice(["numpy.ndarray", "torch.tensor", WORD]), data))


def wrong_names(rng: random.Random, records: RecordDict) -> RecordDict:
    """An array under another name, twice under two names, or not there at all."""
    arrays, name = records.array_records["arrays"], _name(records)
    other = rng.choice([name.upper(), f"{name} ", "answer-99", "", WORD, "../" + name, name * 50])
    array = arrays[name]
    if rng.random() < 0.7:
        del arrays[name]
    elif rng.random() < 0.5:
        del arrays[name]
        return records
    arrays[other] = array
    return records


def not_finite(rng: random.Random, records: RecordDict) -> RecordDict:
    """NaN and infinities, as floats or as the integers that have their bits."""
    good = _encoded(records).numpy()
    values = good.astype(np.float64)
    values[rng.randrange(len(values)) :] = rng.choice([np.nan, np.inf, -np.inf])
    bits = values.view(np.int64).copy()
    return _with(records, Array(rng.choice([values, values.astype(np.float32), bits])))


def norm_above_one(rng: random.Random, records: RecordDict) -> RecordDict:
    """More than one client's clipped update, by a little or by all that 64 bits hold."""
    length = len(_encoded(records).numpy())
    values = np.zeros(length, dtype=np.int64)
    far = rng.choice([GRID * (1 + 10.0 ** -rng.randint(0, 6)), GRID * rng.uniform(2, 1e6), 2.0**62])
    values[rng.randrange(length)] = int(far) + 1
    if rng.random() < 0.3:
        values[:] = rng.choice([-(2**63), 2**63 - 1, int(GRID)])
    return _with(records, Array(values))


def wrong_round(rng: random.Random, records: RecordDict) -> RecordDict:
    """Of another round, or a round that is no number."""
    config = _settings(records)
    config[ROUND] = rng.choice(
        [config[ROUND] + rng.choice([-1, 1, 7]), -(2**63), 2**63 - 1, WORD, 1.0, True, b"1", [1]]
    )
    return records


def replayed(rng: random.Random, records: RecordDict) -> RecordDict:
    """An honest reply of the round before; see also the replays of whole messages in :func:`unasked`."""
    config = _settings(records)
    config[ROUND] = config[ROUND] - 1
    return records


def other_code(rng: random.Random, records: RecordDict) -> RecordDict:
    """Of a client that runs other code, or says nothing of it."""
    _settings(records)["code"] = rng.choice(["0" * 64, WORD + "\n\x1b[31mforged line", b"code", 0, ""])
    return records


def absent(rng: random.Random, records: RecordDict) -> RecordDict:
    """A record, a setting or everything is missing."""
    config = _settings(records)
    match rng.randrange(6):
        case 0:
            return RecordDict()
        case 1:
            del records["arrays"]
        case 2:
            del records["config"]
        case 3:
            del config[rng.choice(list(config))]
        case 4:
            records["arrays"] = ArrayRecord()
        case _:
            name = rng.choice(["arrays", "config"])
            del records[name]
            records[name] = MetricRecord({"num-examples": NUMBER})
    return records


def surplus(rng: random.Random, records: RecordDict) -> RecordDict:
    """More than was asked for: metrics of a client, further arrays, records and settings."""
    match rng.randrange(4):
        case 0:
            records["metrics"] = MetricRecord({"loss": float(NUMBER), "num-examples": NUMBER})
        case 1:
            records.config_records["config"][WORD] = WORD
        case 2:
            records[WORD] = ArrayRecord({"x": Array(np.zeros(3))})
        case _:
            records.array_records["arrays"]["num-examples"] = Array(np.array([NUMBER]))
    return records


def huge(rng: random.Random, records: RecordDict) -> RecordDict:
    """Megabytes where there should be some bytes, and thousands of names where there should be one."""
    match rng.randrange(4):
        case 0:
            return _with(records, Array(np.zeros(2**17, dtype=np.int64)))
        case 1:
            records["arrays"] = ArrayRecord({f"{WORD}{i}": Array(np.zeros(1)) for i in range(500)})
        case 2:
            records.config_records["config"]["code"] = WORD * 50_000
        case _:
            good = _encoded(records).numpy()
            return _with(records, Array("int64", (len(good),), "numpy.ndarray", _npy(good) + bytes(2**20)))
    return records


def broken_bytes(rng: random.Random, records: RecordDict) -> RecordDict:
    """The bytes of the array cut off, or its header changed."""
    array, name = _encoded(records), _name(records)
    data = bytearray(array.data)
    if rng.random() < 0.5:
        data = data[: rng.randrange(len(data))]
    else:
        data[rng.randrange(0, 10)] ^= 1 << rng.randrange(8)
    records.array_records["arrays"][name] = Array(array.dtype, array.shape, array.stype, bytes(data))
    return records


def mutated(rng: random.Random, records: RecordDict) -> RecordDict | None:
    """Random bytes of the whole protobuf changed, cut out or put in; None if what is left can never be parsed."""
    whole = recorddict_to_proto(records).SerializeToString()
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    del data[place : place + rng.choice([1, 1, 8, 64])]
                case 1:
                    data[place:place] = rng.randbytes(rng.choice([1, 1, 8, 64]))
                case _:
                    data[place] = rng.randrange(256)
            data = data or bytearray(1)
        try:
            return recorddict_from_proto(ProtoRecordDict.FromString(bytes(data)))
        except Exception:
            continue  # Flower cannot read it, and raises whatever it stumbles over: server/network/grid.py drops it
    return None


REFUSED: tuple[Kind, ...] = (
    wrong_shape, wrong_dtype, wrong_names, not_finite, norm_above_one, wrong_round, replayed, other_code, absent,
    surplus, huge, broken_bytes,
)  # fmt: skip
"""Kinds of replies none of which may count."""


def failed(rng: random.Random, reply: Message) -> Message:
    """An error reply, whose text quotes a client's data."""
    return Message(Error(rng.choice([0, 1, 2, 5, 99, -1]), WORD + str(NUMBER)), reply_to=_request_of(reply))


def unasked(rng: random.Random, reply: Message, old: list[Message]) -> list[Message]:
    """Honest content that must count once or not at all: sent twice, in another node's name, to a message of before."""
    match rng.randrange(3):
        case 0:
            return [reply, Message(reply.content, reply_to=_request_of(reply))]
        case 1:
            request = _request_of(reply)
            request.metadata.__dict__["_dst_node_id"] = reply.metadata.src_node_id + 1
            return [reply, Message(reply.content, reply_to=request)]
        case _:
            return [reply, rng.choice(old) if old else reply]


def _request_of(reply: Message) -> Message:
    request = Message(RecordDict(), reply.metadata.src_node_id, MessageType.TRAIN)
    request.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return request


def transported(records: RecordDict) -> RecordDict:
    """What arrives of a reply after Flower's protobuf, or, where that has no form for it, after the pickle of Ray."""
    try:
        return recorddict_from_proto(recorddict_to_proto(records))
    except (ValueError, TypeError):
        arrived: RecordDict = pickle.loads(pickle.dumps(records))
        return arrived


CLIENTS, HOSTILE = 120, 55
LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (2, 3), 0, "A", "q"),
        Entry("q.lora_B.weight", (3, 2), 6, "B", "q"),
        Entry("classifier.bias", (2,), 12, "head", "classifier"),
    )
)


@dataclass
class Tally:
    """What was sent, by kind, and what became of it."""

    sent: Counter[str] = field(default_factory=Counter)
    unparsable: int = 0
    refused: int = 0
    lies: int = 0
    rounds: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class _Listener(logging.Handler):
    """Every line that reading replies logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attack(count: int, seed: int = 0) -> Tally:
    """Send at least ``count`` bad replies; AssertionError if one of them does more than a refused reply may."""
    tally, rng, listener = Tally(), random.Random(seed), _Listener()
    logger = logging.getLogger("strategies.dispatch")
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(TaskIdentity, _run_id=1, _node_id=1, _task_id=1),
        patch.multiple(logger, handlers=[listener], propagate=False, isEnabledFor=lambda level: True),
    ):
        _hold_rounds(Path(folder), count, rng, tally, listener)
    return tally


def _hold_rounds(folder: Path, count: int, rng: random.Random, tally: Tally, listener: _Listener) -> None:
    updates = torch.randn(CLIENTS, LAYOUT.dim, generator=torch_generator(0, "updates"))
    sampling, rounds = Poisson(1.0, CLIENTS), 1 + count // HOSTILE * 2
    steps = (FloorStep("histogram", sampling, 0.0), FloorStep("round", sampling, 0.0, rounds))
    commitment = Commitment("client", "add_remove", CLIENTS, 1.0, 1e-5, floor=steps, not_private="bad replies")
    old: list[Message] = []
    with Ledger.create(folder / "ledger.jsonl", commitment) as ledger:
        strategy = DpFedAvg(
            controller=DpLac(), optimizer=FedAvg(), aggregation=Plain(), ledger=ledger, layout=LAYOUT, job="{}",
            info=RunInfo(rounds, (LAYOUT.blocks(),), sampling, (1.5,) * rounds), nodes=CLIENTS, clients_per_node=1,
            sampler=CohortSampler.insecure_from_seed(0), noise=InsecureZeroNoise(),
        )  # fmt: skip
        strategy.begin(torch.zeros(LAYOUT.size), PublicSignals(0, 1.0))
        while tally.total < count:
            old = _round(strategy, updates, rng, tally, listener, old)
            strategy.observe(PublicSignals(tally.rounds, 1.0))
            tally.rounds += 1


def _round(
    strategy: DpFedAvg,
    updates: torch.Tensor,
    rng: random.Random,
    tally: Tally,
    listener: _Listener,
    old: list[Message],
) -> list[Message]:
    """One round with hostile nodes, and everything checked; its honest replies."""
    listener.lines.clear()
    planned = strategy.next_release()
    round, plan, sampling = planned.round, planned.plan, planned.sampling
    hostile = set(rng.sample(range(1, CLIENTS + 1), HOSTILE))
    replies: list[Message] = []
    honest: list[Message] = []
    expected = contribute(Units(updates[:0, : plan.clip.params], votes=torch.zeros(0, dtype=torch.int64)), plan)
    refused = lies = foreign = 0
    nodes: Any = _Nodes()
    for message in strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes):
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = f"{round}-{node}"
        request = TrainRequest.from_records(message.content)
        rows = updates[torch.from_numpy(request.clients)][:, : plan.clip.params]
        mine = contribute(Units(rows, votes=torch.tensor([node % 25])), plan)
        reply = Message(transported(contribution_records(mine, round)), reply_to=message)
        if node not in hostile:
            expected = expected + mine
            honest.append(reply)
            replies.append(reply)
            continue
        kind: Any = rng.choice([*REFUSED, mutated, failed, unasked])
        tally.sent[kind.__name__] += 1
        if kind is failed:
            refused += 1
            replies.append(failed(rng, reply))
        elif kind is unasked:
            expected = expected + mine
            foreign += 1
            replies += unasked(rng, reply, old)
        else:
            bad = kind(rng, reply.content)
            if bad is None:
                tally.unparsable += 1
                continue
            refused += kind is not mutated
            lies += kind is mutated
            replies.append(Message(transported(bad) if kind is not mutated else bad, reply_to=message))
    rng.shuffle(replies)
    strategy.aggregate_train(round, replies)
    accepted = _check(strategy, expected, plan, sampling.expected_units, lies)
    text = "\n".join(listener.lines)
    assert "reading it raised" not in text, text
    assert WORD not in text, "a log line repeats a word of a hostile reply"
    assert str(NUMBER) not in text, "a log line repeats a number of a hostile reply"
    assert "\x1b" not in text
    turned_away = sum(" refused: " in line or " failed: " in line for line in listener.lines)
    assert refused <= turned_away <= refused + lies, (refused, turned_away, lies)
    assert accepted <= refused + lies - turned_away
    tally.refused += turned_away + foreign
    tally.lies += refused + lies - turned_away
    return honest


def _check(strategy: DpFedAvg, expected: Any, plan: Any, units: float, lies: int) -> float:
    """How many clipped updates the sum is away from that of the honest; 0 unless there were lies."""
    release = strategy.release
    assert release is not None
    if plan.clip.dim:
        right = plan.clip.decode(expected.encoded.double() / GRID, units).float()
        away = float((release.update - right).double().norm()) * units / float(plan.clip.bound)
    else:
        right = expected.answers[0].double() / GRID * plan.queries[0].sensitivity
        away = float((release.answers[0] - right).norm())
    assert torch.isfinite(release.update).all()
    if not lies:
        assert away == 0.0
    return max(0.0, away - 1e-6)


class _Nodes:
    """As much of a grid as choosing nodes needs."""

    def get_node_ids(self) -> Iterator[int]:
        yield from range(1, CLIENTS + 1)


def main(count: Annotated[int, typer.Option(help="bad replies, at least")] = 12_000) -> None:
    """Attack, and write the result."""
    tally = attack(count)
    result = {
        "replies": tally.total,
        "kinds": dict(sorted(tally.sent.items())),
        "rounds": tally.rounds,
        "refused": tally.refused,
        "unparsable": tally.unparsable,
        "honest_looking": tally.lies,
        "crashes": 0,
        "seed": 0,
        **origin(),
    }
    say(result)
    write("bad-replies", result)


if __name__ == "__main__":
    typer.run(main)
