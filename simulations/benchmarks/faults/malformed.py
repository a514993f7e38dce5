"""Malformed and hostile replies, made at random of honest ones."""

import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from privacy.contribution import GRID

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
