"""Hostile nodes against the real strategy: each bad reply is refused, by a line that repeats nothing of it."""

import logging
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from simulations.benchmarks.faults.bad_replies import attack
from simulations.benchmarks.faults.malformed import REFUSED
from strategies.messages import client_update, dispatch
from strategies.messages.client_update import code_fingerprint, read_contribution
from strategies.messages.records import BadMessage


def test_hundreds_of_bad_replies_change_nothing() -> None:
    tally = attack(300, seed=1)
    assert tally.total >= 300
    assert set(tally.sent) == {kind.__name__ for kind in REFUSED} | {"mutated", "failed", "unasked"}
    assert tally.refused >= 0.9 * 300


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_more_than_ten_thousand_bad_replies_change_nothing() -> None:
    tally = attack(12_000, seed=2)
    assert tally.total >= 12_000
    assert min(tally.sent.values()) > 500
    assert tally.lies < 400


@pytest.mark.parametrize("hole", ["no bounds", "no round", "twice", "text of errors"])
def test_a_hole_is_found(hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack must be able to fail."""
    match hole:
        case "no bounds":
            monkeypatch.setattr(client_update, "validate", lambda *_: None)
        case "no round":
            real = dispatch.read_contribution
            monkeypatch.setattr(
                dispatch,
                "read_contribution",
                lambda records, plan, round, clients: real(_of(records, round), plan, round, clients),
            )
        case "twice":
            monkeypatch.setattr("strategies.dp_fedavg.sum_replies", _credulous)
        case "text of errors":
            monkeypatch.setattr(dispatch, "error_text", lambda reply: str(reply.error.reason))
    with pytest.raises((AssertionError, ValueError)):  # ValueError: the mechanism's own bounds are the second wall
        attack(300, seed=3)


def _of(records: RecordDict, round: int) -> RecordDict:
    if "config" in records.config_records:
        records.config_records["config"]["round"] = round
    return records


def _credulous(sent, messages, plan, round):
    """Takes every readable reply, asked for or not."""
    total, sound = dispatch.Contribution.zero(plan), 0
    for message in messages:
        try:
            total, sound = total + read_contribution(message.content, plan, round, 1), sound + 1
        except (BadMessage, ValueError):
            logging.getLogger("strategies.messages.dispatch").warning("round %d: reply of node 0 refused: x", round)
    return total, frozenset(range(sound))


def test_a_huge_payload_costs_no_memory_of_ours() -> None:
    """What arrived is there already; nothing is made of it before it is refused."""
    plan = Plan(FlatClip(1.0, 14), 1.0)
    size = 2**25
    for array in (
        Array(np.zeros(size // 8, dtype=np.int64)),
        Array("int64", (14,), "numpy.ndarray", bytes(size)),
        Array("int64", (2**40,), "numpy.ndarray", bytes(64)),
    ):
        config = ConfigRecord({"round": 1, "code": code_fingerprint()})
        records = RecordDict({"arrays": ArrayRecord({"encoded": array}), "config": config})
        tracemalloc.start()
        try:
            with pytest.raises(BadMessage):
                read_contribution(records, plan, 1, 1)
            assert tracemalloc.get_traced_memory()[1] < size / 100
        finally:
            tracemalloc.stop()
