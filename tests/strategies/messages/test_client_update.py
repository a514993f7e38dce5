"""Messages come through Flower's own serialisation unchanged, and nothing that is wrong gets past the reader."""

import functools
import io
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.queries import NormBit, OneHotVote
from privacy.randomness.rng import torch_generator
from strategies.adapter.trainable import TrainedSubset
from strategies.messages import client_update
from strategies.messages.client_update import (
    EvaluateRequest,
    ShardMetrics,
    TrainRequest,
    code_fingerprint,
    contribution_records,
    read_contribution,
)
from strategies.messages.records import BadMessage

PART = TrainedSubset("b", 2, scale_b=0.5)
ROUND, CLIENTS, GRID = 4, 3, 2**40
PLAN = Plan(FlatClip(0.5, 6), 1.5, (NormBit(0.5, 5.0),))
VOTES = Plan(NoUpdate(), 1.0, (OneHotVote((0.5, 1.0, 2.0), 2.0, simulated_noise_std_per_bound=0.1),))


def transported(records: RecordDict) -> RecordDict:
    """What arrives after Flower's protobuf, and after the pickle of its Ray engine."""
    return pickle.loads(pickle.dumps(recorddict_from_proto(recorddict_to_proto(records))))


@functools.cache
def contribution_of(plan: Plan) -> Contribution:
    rows = torch.randn(CLIENTS, 6, generator=torch_generator(0, "rows"))
    return contribute(Units(rows, votes=torch.tensor([0, 2, -1])), plan)


def reply(**changes: Any) -> RecordDict:
    """A sound reply, with arrays (by name) or settings replaced; None removes one."""
    contribution = contribution_of(PLAN)
    arrays: dict[str, Any] = {
        "encoded": Array(contribution.encoded.numpy()),
        "answer-0": Array(contribution.answers[0].numpy()),
    }
    config: dict[str, Any] = {"round": ROUND, "code": code_fingerprint()}
    for name, value in changes.items():
        place = config if name in config else arrays
        place[name.replace("_", "-")] = value
    return RecordDict(
        {
            "arrays": ArrayRecord({name: array for name, array in arrays.items() if array is not None}),
            "config": ConfigRecord({name: value for name, value in config.items() if value is not None}),
        }
    )


@pytest.mark.parametrize("plan", [PLAN, VOTES], ids=["update and bit", "votes only"])
def test_a_contribution_arrives_as_it_was_sent(plan: Plan) -> None:
    sent = contribution_of(plan)
    got = read_contribution(transported(contribution_records(sent, ROUND)), plan, ROUND, CLIENTS)
    assert torch.equal(got.encoded, sent.encoded)
    assert got.encoded.dtype == torch.int64
    assert len(got.answers) == len(plan.queries)
    for mine, theirs in zip(got.answers, sent.answers, strict=True):
        assert torch.equal(mine, theirs)
    got.encoded.add_(1)  # an own, writable copy: torch warns of read-only ones


def test_the_reply_of_this_file_is_sound() -> None:
    read_contribution(reply(), PLAN, ROUND, CLIENTS)


@pytest.mark.parametrize("plan", [PLAN, VOTES], ids=["update and bit", "votes only"])
def test_a_train_request_arrives_as_it_was_sent(plan: Plan) -> None:
    adapter = np.linspace(-1, 1, 9, dtype=np.float32)
    sent = TrainRequest(ROUND, adapter, plan, PART, np.array([1, 5, 900]), '{"job": "x"}', ranks=np.array([1, 2, 2]))
    got = TrainRequest.from_records(transported(sent.to_records()))
    np.testing.assert_array_equal(got.adapter, adapter)
    np.testing.assert_array_equal(got.clients, sent.clients)
    assert (got.adapter.dtype, got.clients.dtype) == (np.float32, np.int64)
    assert (got.round, got.plan, got.part, got.job) == (ROUND, plan, PART, '{"job": "x"}')
    assert got.ranks is not None
    assert got.ranks.tolist() == [1, 2, 2]


def test_a_train_request_without_clients_is_one() -> None:
    sent = TrainRequest(0, np.zeros(2), PLAN, TrainedSubset(), np.empty(0, dtype=np.int64), "{}")
    got = TrainRequest.from_records(transported(sent.to_records()))
    assert got.clients.shape == (0,)
    assert got.adapter.dtype == np.float32


def test_an_evaluation_request_and_its_answer_arrive_as_they_were_sent() -> None:
    sent = EvaluateRequest(np.ones(3, dtype=np.float32), "validation", 2, 9, "{}")
    got = EvaluateRequest.from_records(transported(sent.to_records()))
    np.testing.assert_array_equal(got.adapter, sent.adapter)
    assert (got.split, got.start, got.stop, got.job) == ("validation", 2, 9, "{}")
    assert ShardMetrics.from_records(transported(ShardMetrics(0.25, 0.75, 7).to_records())) == ShardMetrics(
        0.25, 0.75, 7
    )
    counted = ShardMetrics(0.25, 0.75, 7, np.array([[3, 1], [1, 2]])).to_records()
    assert ShardMetrics.from_records(transported(counted)).confusion.tolist() == [[3, 1], [1, 2]]


# --- what is wrong -----------------------------------------------------------------------------------------------


def npy(array: np.ndarray, **keywords: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **keywords)
    return stream.getvalue()


def raw(data: bytes, shape: tuple[int, ...] = (6,), dtype: str = "int64", stype: str = "numpy.ndarray") -> Array:
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


def header(text: str) -> bytes:
    """The head of an .npy file that says ``text``."""
    body = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


class Harmful:
    """Unpickling this would be noticed."""

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        return pytest.fail, ("a payload was unpickled",)


GOOD = np.arange(6, dtype=np.int64)
SIX = "{'descr': '<i8', 'fortran_order': False, 'shape': (6,), }"
BAD_ARRAYS: dict[str, Array] = {
    "float32": Array(np.zeros(6, dtype=np.float32)),
    "float64": Array(np.zeros(6)),
    "nan": Array(np.full(6, np.nan)),
    "int32": Array(np.zeros(6, dtype=np.int32)),
    "uint64": Array(np.zeros(6, dtype=np.uint64)),
    "bool": Array(np.zeros(6, dtype=np.bool_)),
    "big-endian": raw(npy(GOOD.astype(">i8"))),
    "object array": raw(npy(np.array([Harmful()] * 6, dtype=object), allow_pickle=True)),
    "bare pickle": raw(pickle.dumps(Harmful())),
    "too short": Array(np.zeros(5, dtype=np.int64)),
    "too long": Array(np.zeros(7, dtype=np.int64)),
    "empty": Array(np.zeros(0, dtype=np.int64)),
    "matrix": Array(np.zeros((2, 3), dtype=np.int64)),
    "scalar": Array(np.array(3)),
    "another serialisation": raw(npy(GOOD), stype="torch.tensor"),
    "declares float, holds int": raw(npy(GOOD), dtype="float32"),
    "declares int, holds float": raw(npy(np.ones(6)), dtype="int64"),
    "declares 6, holds 5": raw(npy(GOOD[:5])),
    "declares 5, holds 6": raw(npy(GOOD), shape=(5,)),
    "declares -1": raw(npy(GOOD), shape=(-1,)),
    "declares 2**62": raw(npy(GOOD), shape=(2**62,)),
    "declares 2**70": raw(npy(GOOD), shape=(2**70,)),
    "no bytes": raw(b""),
    "no header": raw(GOOD.tobytes()),
    "header only": raw(npy(GOOD)[:128]),
    "truncated": raw(npy(GOOD)[:-1]),
    "bytes behind": raw(npy(GOOD) + b"\0"),
    "zip archive": raw(b"PK\x03\x04" + npy(GOOD)),
    "giant in the header": raw(header(SIX.replace("(6,)", "(1000000000000,)")) + GOOD.tobytes()),
    "header that is no dictionary": raw(header("(" * 110) + GOOD.tobytes()),
    "header with code": raw(header("__import__('os').system('true')") + GOOD.tobytes()),
    "header with a list as key": raw(header("{[]: 1}") + GOOD.tobytes()),
    "header of a matrix": raw(header(SIX.replace("(6,)", "(2, 3)")) + GOOD.tobytes()),
    "fortran order": raw(header(SIX.replace("False", "True")) + GOOD.tobytes()),
    "format 2.0": raw(npy(GOOD).replace(b"NUMPY\x01\x00v\x00", b"NUMPY\x02\x00v\x00\x00\x00")),
    "norm above three clients": Array(np.array([3 * GRID + 2**20, 0, 0, 0, 0, 0])),
    "norm above three clients, no coordinate is": Array(np.full(6, 2 * GRID)),
    "the least integer": Array(np.full(6, -(2**63))),
    "the largest integer": Array(np.full(6, 2**63 - 1)),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_an_array_that_cannot_be_the_sum_is_refused(kind: str) -> None:
    with pytest.raises(BadMessage):
        read_contribution(reply(encoded=BAD_ARRAYS[kind]), PLAN, ROUND, CLIENTS)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([GRID // 3], "norm-bit"),  # three bits of +-1/2 (of sensitivity 1/2) make odd multiples of one
        ([4 * GRID], "norm-bit"),
        ([0, 0], "shape"),
    ],
)
def test_an_answer_that_cannot_be_a_sum_of_answers_is_refused(answer: list[int], words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        read_contribution(reply(answer_0=Array(np.array(answer))), PLAN, ROUND, CLIENTS)


@pytest.mark.parametrize("counts", [[-GRID, 0, 0], [GRID // 2, 0, 0], [2 * GRID, 2 * GRID, 0]])
def test_votes_that_nobody_can_have_cast_are_refused(counts: list[int]) -> None:
    records = RecordDict(
        {
            "arrays": ArrayRecord({"encoded": Array(np.empty(0, np.int64)), "answer-0": Array(np.array(counts))}),
            "config": ConfigRecord({"round": 0, "code": code_fingerprint()}),
        }
    )
    with pytest.raises(BadMessage, match="vote"):
        read_contribution(records, VOTES, 0, CLIENTS)


def test_a_sum_of_more_clients_than_were_asked_is_refused() -> None:
    whole = Contribution(torch.tensor([2 * GRID, 0, 0, 0, 0, 0]), (torch.zeros(1, dtype=torch.int64),))
    records = contribution_records(whole, ROUND)
    read_contribution(records, PLAN, ROUND, 2)
    with pytest.raises(BadMessage, match="encoded"):
        read_contribution(records, PLAN, ROUND, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": 5}, "reply is for another round, this is round 4"),
        ({"round": None}, "round must be a int"),
        ({"round": True}, "round must be a int, got bool"),
        ({"round": 4.0}, "round must be a int, got float"),
        ({"round": "4"}, "round must be a int, got str"),
        ({"code": "0" * 64}, "client runs other code"),
        ({"code": None}, "code must be a str"),
        ({"code": b"x"}, "code must be a str"),
        ({"encoded": None}, "arrays"),
        ({"answer_0": None}, "arrays"),
        ({"answer_1": Array(GOOD)}, "no others"),
        ({"num_examples": Array(np.array([900]))}, "no others"),
    ],
)
def test_a_reply_with_other_parts_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        read_contribution(reply(**changes), PLAN, ROUND, CLIENTS)


@pytest.mark.parametrize("missing", ["arrays", "config"])
def test_a_reply_without_a_record_is_refused(missing: str) -> None:
    records = reply()
    del records[missing]
    with pytest.raises(BadMessage, match=missing):
        read_contribution(records, PLAN, ROUND, CLIENTS)
    records[missing] = MetricRecord({"a": 1})  # of another kind under the same name
    with pytest.raises(BadMessage, match=missing):
        read_contribution(records, PLAN, ROUND, CLIENTS)


def test_what_is_refused_is_not_repeated() -> None:
    secret = 7654321 * GRID
    with pytest.raises(BadMessage) as error:
        read_contribution(reply(encoded=Array(np.array([secret, 0, 0, 0, 0, 0]))), PLAN, ROUND, CLIENTS)
    assert "7654321" not in str(error.value)
    assert error.value.__cause__ is None


mutations = st.one_of(
    st.tuples(st.just("data"), st.integers(0, 175), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, 175), st.just(0)),
    st.tuples(st.just("append"), st.integers(1, 300), st.integers(0, 255)),
    st.tuples(st.just("shape"), st.integers(-(2**65), 2**65), st.integers(1, 3)),
    st.tuples(st.just("values"), st.integers(-(2**63), 2**63 - 1), st.integers(0, 5)),
    st.tuples(st.just("dtype"), st.sampled_from(["int64", "float64", "object", "", "int32", "V8"]), st.just(0)),
    st.tuples(st.just("round"), st.one_of(st.integers(-(2**63), 2**63), st.floats(), st.text(), st.none()), st.just(0)),
    st.tuples(st.just("name"), st.text(max_size=12).filter(lambda name: name not in ("round", "code")), st.just(0)),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(changes=st.lists(mutations, min_size=1, max_size=3))
def test_a_mutated_reply_is_read_as_a_possible_sum_or_refused(changes: list[tuple[str, Any, int]]) -> None:
    array, name, round = Array(contribution_of(PLAN).encoded.numpy()), "encoded", ROUND
    for kind, what, more in changes:
        data, shape, dtype = array.data, array.shape, array.dtype
        match kind:
            case "data" if what < len(data):
                data = data[:what] + bytes([more]) + data[what + 1 :]
            case "cut":
                data = data[:what]
            case "append":
                data += bytes([more]) * what
            case "shape":
                shape = (what,) * more
            case "values":
                values = GOOD.copy()
                values[more] = what
                data = npy(values)
            case "dtype":
                dtype = what
            case "round":
                round = what
            case "name":
                name = what
        array = Array(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)
    changed = {"encoded": None, name: array}
    try:
        got = read_contribution(reply(**changed, round=round), PLAN, ROUND, CLIENTS)
    except BadMessage:
        return
    assert got.encoded.shape == (6,)
    assert float(got.encoded.double().norm()) <= CLIENTS * GRID * (1 + 1e-9)


# --- requests and totals -----------------------------------------------------------------------------------------

REQUEST = TrainRequest(ROUND, np.zeros(4), PLAN, TrainedSubset(), np.array([2, 3]), "{}")


@pytest.mark.parametrize(
    ("clients", "sound"), [([2, 3], True), ([], True), ([3, 3], False), ([3, 2], False), ([1, 2, 2], False)]
)
def test_a_client_is_asked_once(clients: list[int], sound: bool) -> None:
    records = replace(REQUEST, clients=np.array(clients, dtype=np.int64)).to_records()
    if sound:
        assert TrainRequest.from_records(records).clients.tolist() == clients
    else:
        with pytest.raises(BadMessage, match="once each"):
            TrainRequest.from_records(records)


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "[]",
        "3",
        "{}",
        json.dumps({**PLAN.to_json(), "clip": {"kind": "no such clip"}}),
        json.dumps({**PLAN.to_json(), "clip": {"kind": "flat", "bound": -1, "params": 6}}),
        json.dumps({**PLAN.to_json(), "noise_multiplier": 0}),
        json.dumps({**PLAN.to_json(), "queries": [{}]}),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(plan: str) -> None:
    records = REQUEST.to_records()
    records.config_records["config"]["plan"] = plan
    with pytest.raises(BadMessage, match="plan cannot be read"):
        TrainRequest.from_records(records)


@pytest.mark.parametrize(
    "part",
    [
        "",
        "3",
        '{"factors": "c"}',
        '{"factors": "b", "ranks": 0}',
        '{"scale_a": 0}',
        '{"scale_b": NaN}',
        '{"other": 1}',
    ],
)
def test_a_part_that_cannot_be_read_is_refused(part: str) -> None:
    records = REQUEST.to_records()
    records.config_records["config"]["part"] = part
    with pytest.raises(BadMessage, match="part cannot be read"):
        TrainRequest.from_records(records)


@pytest.mark.parametrize("ranks", [[1], [1, 0], [1, -3], [1, 2, 3]])
def test_ranks_are_one_per_client_and_at_least_one(ranks: list[int]) -> None:
    records = replace(REQUEST, ranks=np.array(ranks)).to_records()
    with pytest.raises(BadMessage, match="ranks"):
        TrainRequest.from_records(records)


@pytest.mark.parametrize("name", ["round", "plan", "part", "job"])
def test_a_request_without_a_setting_is_refused(name: str) -> None:
    records = REQUEST.to_records()
    del records.config_records["config"][name]
    with pytest.raises(BadMessage, match=f"{name} must be"):
        TrainRequest.from_records(records)


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": 0.5, "accuracy": 0.5},
        {"loss": 1, "accuracy": 0.5, "count": 3},
        {"loss": 0.5, "accuracy": 0.5, "count": 3.0},
        {"loss": [0.5], "accuracy": 0.5, "count": 3},
        {"loss": 0.5, "accuracy": 0.5, "count": 0},
        {"loss": 0.5, "accuracy": 1.5, "count": 3},
        {"loss": 0.5, "accuracy": float("nan"), "count": 3},
        {"loss": 0.5, "accuracy": 0.5, "count": 3, "num-examples": 900},
    ],
)
def test_totals_that_are_none_are_refused(metrics: dict[str, Any]) -> None:
    with pytest.raises(BadMessage, match="evaluation reply"):
        ShardMetrics.from_records(RecordDict({"metrics": MetricRecord(metrics)}))
    with pytest.raises(BadMessage, match="evaluation reply"):
        ShardMetrics.from_records(RecordDict())


@pytest.mark.parametrize("pairs", [[3, 1, 1], [3, 1, 1, 1], [8, -1, 0, 0]])
def test_confusions_that_are_none_are_refused(pairs: list[int]) -> None:
    records = ShardMetrics(0.25, 0.75, 7).to_records()
    records["arrays"] = ArrayRecord({"confusion": Array(np.array(pairs))})
    with pytest.raises(BadMessage, match="confusion must be a square of counts that add up"):
        ShardMetrics.from_records(records)


def test_the_fingerprint_is_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch("[0-9a-f]{64}", code_fingerprint())
    for room in ("client", "strategies", "privacy"):
        (tmp_path / room / "deep").mkdir(parents=True)
        (tmp_path / room / "__init__.py").write_text("one")
    monkeypatch.setattr(client_update, "__file__", str(tmp_path / "strategies" / "messages" / "client_update.py"))
    fingerprint = code_fingerprint.__wrapped__
    seen = [fingerprint()]
    for change in (
        lambda: (tmp_path / "privacy" / "__init__.py").write_text("two"),
        lambda: (tmp_path / "client" / "deep" / "new.py").write_text(""),
        lambda: (tmp_path / "client" / "deep" / "new.py").rename(tmp_path / "client" / "new.py"),
        lambda: (tmp_path / "client" / "new.py").rename(tmp_path / "privacy" / "new.py"),
    ):
        change()
        seen.append(fingerprint())
    assert len(set(seen)) == 5
    (tmp_path / "client" / "README.md").write_text("words")
    assert fingerprint() == seen[-1]
