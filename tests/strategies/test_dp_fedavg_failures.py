"""DP-FedAvg when nodes fail, cohorts are empty or the budget is spent: what is charged, and what is never released."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from privacy.errors import BudgetExceeded
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureSeededNoise
from privacy.randomness.sampling import CohortSampler
from strategies.controllers.controller import PublicSignals
from strategies.messages.dispatch import RoundFailed

FAILURES = [
    "silent",
    "error",
    "error, then an answer",
    "too large",
    "not finite",
    "last round",
    "other code",
    "empty",
]


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_node_contributes_zero_and_the_divisor_stays(how: str, fed) -> None:
    strategy, nodes = fed.make(), fed.Nodes(tamper=fed.failing(2, how=how))
    release = fed.hold(strategy, nodes)
    kept = [int(c) for node, request in nodes.requests if node != 2 for c in request.clients]
    assert len(kept) < len(nodes.cohort)
    torch.testing.assert_close(release.update, fed.expected_mean(kept).float())
    assert release.expected_units == fed.RATE * fed.N


def test_replies_that_were_not_asked_for_are_dropped(fed) -> None:
    def twice(node: int, replies: list[Message]) -> list[Message]:
        (reply,) = replies
        return [fed.again(reply, to="another message"), reply, fed.again(reply), fed.again(reply, to="")]

    honest = fed.hold(fed.make(), fed.Nodes()).update
    assert torch.equal(fed.hold(fed.make(), fed.Nodes(tamper=twice)).update, honest)
    assert torch.equal(fed.hold(fed.make(clients_per_node=1), fed.Nodes(tamper=twice), shuffle=0).update, honest)


@pytest.mark.parametrize("how", FAILURES)
def test_below_half_sound_replies_nothing_is_released_and_the_charge_stands(how: str, fed) -> None:
    strategy = fed.make()
    before = fed.state_of(strategy)
    with pytest.raises(RoundFailed, match="too few messages were answered soundly"):
        fed.hold(strategy, fed.Nodes(tamper=fed.failing(1, 2, how=how)))
    assert strategy.release is None
    assert strategy.state is before
    (charge,) = strategy.ledger.charges
    assert (charge.event.label, charge.event.round, charge.released_at) == ("round", 1, None)
    assert charge.event.components == strategy.next_release().plan.components()


def test_half_of_the_replies_are_enough(fed) -> None:
    release = fed.hold(fed.make(nodes=4), fed.Nodes((1, 2, 3, 4), tamper=fed.failing(1, 4, how="error")))
    assert float(release.update.norm()) > 0


class Nobody(CohortSampler):
    """Draws empty cohorts, as small runs do now and then."""

    __slots__ = ()

    def poisson(self, *_: Any, **__: Any) -> np.ndarray:
        return np.empty(0, dtype=np.int64)


def test_an_empty_cohort_releases_noise_and_is_charged(fed) -> None:
    strategy, nodes = fed.make(sampler=Nobody(bytes(32), insecure=True), noise=InsecureSeededNoise(5)), fed.Nodes()
    release = fed.hold(strategy, nodes)
    assert nodes.requests == []
    std = 1.5 * fed.BOUND / (fed.RATE * fed.N)
    assert float(release.update.norm()) == pytest.approx(std * math.sqrt(fed.DIM), rel=0.6)
    assert bool((release.update != 0).all())
    assert len(strategy.ledger.events) == 1
    torch.testing.assert_close(fed.state_of(strategy).adapter, fed.START + release.update, rtol=0, atol=0)


def test_noise_is_that_of_the_plan_whoever_answers(fed) -> None:
    """The released update is the true mean plus noise of std z C / (q fed.N), for whole and for half cohorts alike."""
    std = 1.5 * fed.BOUND / (fed.RATE * fed.N)
    for tamper in (fed.Nodes().tamper, fed.failing(3, how="silent")):
        residuals = []
        for seed in range(25):
            strategy, nodes = fed.make(noise=InsecureSeededNoise(seed)), fed.Nodes(tamper=tamper)
            release = fed.hold(strategy, nodes)
            answered = [c for n, r in nodes.requests if tamper(n, [Message]) for c in r.clients]  # type: ignore[list-item]
            residuals.append(release.update.double() - fed.expected_mean(answered))
        spread = float(torch.cat(residuals).std())
        assert spread == pytest.approx(std, rel=5 / math.sqrt(2 * 25 * fed.DIM))


def test_a_round_the_ledger_does_not_pay_for_is_refused_before_anyone_is_asked(fed) -> None:
    strategy, nodes = fed.make(budget=1), fed.Nodes()
    fed.hold(strategy, nodes)
    assert "used" in str(strategy.refusal())

    class Drawn(Nobody):
        def draw(self, *_: Any, **__: Any) -> np.ndarray:
            raise AssertionError("a cohort was drawn")

    strategy.sampler = Drawn(bytes(32), insecure=True)
    asked = len(nodes.requests)
    with pytest.raises(BudgetExceeded):
        strategy.configure_train(2, ArrayRecord(), ConfigRecord(), nodes)  # type: ignore[arg-type]
    assert len(nodes.requests) == asked
    assert len(strategy.ledger.events) == 1


def test_less_noise_than_was_committed_is_refused(fed, ledger_for: Callable[..., Ledger]) -> None:
    strategy = fed.make(ledger=ledger_for(fed.SAMPLING, fed.ROUNDS, noise_multiplier=1.6))
    assert "below the committed floor" in str(strategy.refusal())


def test_a_round_that_was_not_charged_is_held_with_the_same_cohort_a_charged_one_with_another(fed) -> None:
    strategy = fed.make()
    first, again, after = fed.Nodes(), fed.Nodes(), fed.Nodes()
    for nodes in (first, again):  # a crash before the charge: configured, never aggregated
        messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), nodes)  # type: ignore[arg-type]
        nodes.send_and_receive(messages)
    assert first.cohort == again.cohort
    with pytest.raises(RoundFailed):
        fed.hold(strategy, fed.Nodes(tamper=fed.failing(1, 2, 3, how="error")))
    fed.hold(strategy, after)
    assert after.cohort != first.cohort
    assert [event.round for event in strategy.ledger.events] == [1, 1]


def test_cohorts_of_rounds_differ_and_repeat_with_the_secret(fed) -> None:
    strategy, nodes = fed.make(), fed.Nodes()
    fed.hold(strategy, nodes)
    one = nodes.cohort
    nodes.requests.clear()
    fed.hold(strategy, nodes)
    assert nodes.cohort != one
    repeated = fed.Nodes()
    fed.hold(fed.make(), repeated)
    assert repeated.cohort == one


def test_a_sampler_that_can_be_foretold_stamps_the_ledger(fed, tmp_path) -> None:
    from privacy.commitment import Commitment, FloorStep

    floor = (FloorStep("round", fed.SAMPLING, 1.5, 2),)
    commitment = Commitment("client", "add_remove", fed.N, 50.0, 1e-5, floor=floor)
    for sampler, noise, stamp in [
        (CohortSampler.create(), None, None),
        (CohortSampler.insecure_from_seed(1), None, "cohorts are drawn from a seed"),
    ]:
        with Ledger.create(tmp_path / f"{stamp}.jsonl", commitment) as ledger:
            strategy = fed.make(ledger=ledger, sampler=sampler, noise=noise)
            fed.hold(strategy, fed.Nodes())
            assert ledger.not_private == stamp
            if stamp is None:
                assert 0 < ledger.epsilon_spent() <= 50.0


def test_calls_out_of_order_are_refused(fed) -> None:
    strategy, nodes = fed.make(), fed.Nodes()
    with pytest.raises(ValueError, match="observe needs a release"):
        strategy.observe(PublicSignals(1, 1.0))
    for round in (0, 2):
        with pytest.raises(ValueError, match="server_round must be 1"):
            strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="server_round must be 1"):
            strategy.aggregate_train(round, [])
    assert strategy.ledger.events == ()
    strategy.state = None
    with pytest.raises(ValueError, match="call begin"):
        strategy.next_release()


def test_too_few_nodes_end_the_wait(fed) -> None:
    strategy = fed.make(nodes=4)
    with pytest.raises(RoundFailed, match="3 of 4 nodes"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), fed.Nodes())  # type: ignore[arg-type]
    assert strategy.ledger.events == ()


def test_clients_are_not_evaluated_and_no_metric_is_returned(fed) -> None:
    strategy, nodes = fed.make(), fed.Nodes()
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), nodes))  # type: ignore[arg-type]
    arrays, metrics = strategy.aggregate_train(1, nodes.send_and_receive(messages))
    assert metrics is None
    assert arrays is not None
    np.testing.assert_array_equal(arrays["adapter"].numpy(), fed.state_of(strategy).served.numpy())
    assert strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), nodes) == []  # type: ignore[arg-type]
    assert strategy.aggregate_evaluate(1, []) is None


def test_a_state_can_be_put_back(fed) -> None:
    """What resuming does: another strategy goes on from the state as if it had been there."""
    one, other, nodes = fed.make(), fed.make(), fed.Nodes()
    fed.hold(one, nodes)
    other.state = replace(fed.state_of(one))
    nodes.requests.clear()
    again = fed.Nodes()
    assert torch.equal(fed.hold(one, nodes).update, fed.hold(other, again).update)
    assert nodes.cohort == again.cohort
    assert torch.equal(fed.state_of(one).adapter, fed.state_of(other).adapter)


def stepping(fed, nodes, /, **parts: Any) -> Any:
    strategy = fed.make(**parts)
    strategy.grid, strategy.exchange = nodes, nodes.send_and_receive
    return strategy


@pytest.mark.parametrize("how", FAILURES)
def test_a_client_that_takes_its_worker_along_is_alone_missing(how: str, fed, monkeypatch) -> None:
    """Whichever worker it is given to dies, or is never heard of: the sum moves by this one client."""
    monkeypatch.setattr("strategies.messages.dispatch.ALONE_AT_ONCE", 3)
    nodes = fed.Nodes()
    strategy = stepping(fed, nodes)
    cohort = strategy.cohort(strategy.next_release()).ids.tolist()
    fatal = cohort[1]

    def tamper(node: int, replies: list[Message]) -> list[Message]:
        asked = nodes.requests[-1][1].clients
        return fed.failing(node, how=how)(node, replies) if fatal in asked else replies

    nodes.tamper = tamper
    update = strategy.step().update
    torch.testing.assert_close(update, fed.expected_mean([one for one in cohort if one != fatal]).float())
    alone = [int(request.clients[0]) for _, request in nodes.requests if len(request.clients) == 1]
    assert fatal in alone
    assert len(nodes.requests) == 3 + len(alone)  # the other two shards were asked once
    assert len(strategy.ledger.events) == 1


def test_shards_of_which_nobody_answers_alone_either_end_the_round(fed) -> None:
    nodes = fed.Nodes(tamper=fed.failing(1, 2, 3, how="error"))
    strategy = stepping(fed, nodes)
    with pytest.raises(RoundFailed, match="too few messages were answered soundly"):
        strategy.step()
    assert len(strategy.ledger.events) == 1
    assert len([request for _, request in nodes.requests if len(request.clients) == 1]) == len(set(nodes.cohort))


def test_a_client_that_was_sent_alone_is_not_asked_again(fed) -> None:
    nodes = fed.Nodes(tamper=fed.failing(2, how="error"))
    strategy = stepping(fed, nodes, clients_per_node=1)
    strategy.step()
    assert len(nodes.cohort) == len(set(nodes.cohort))


DEPLOYED = {"nodes": (1, 2, 3, 4), "clients_per_node": 1}
"""Every client has a node, which is asked for nobody else."""


def asked_how_often(nodes: Any) -> Counter[int]:
    return Counter(int(client) for _, request in nodes.requests for client in request.clients)


@pytest.mark.parametrize("times", [1, 2])
def test_a_deployed_round_that_would_be_lost_asks_again_and_counts_everybody_once(fed, monkeypatch, times) -> None:
    pauses = list[float]()
    monkeypatch.setattr("strategies.dp_fedavg.time.sleep", pauses.append)
    nodes, fails = fed.Nodes((1, 2, 3, 4)), fed.failing(2, 3, 4, how="error")

    def lost_at_first(node: int, replies: list[Message]) -> list[Message]:
        (client,) = nodes.requests[-1][1].clients
        return fails(node, replies) if asked_how_often(nodes)[int(client)] <= times else replies

    nodes.tamper = lost_at_first
    strategy = stepping(fed, nodes, **DEPLOYED)
    update = strategy.step().update
    torch.testing.assert_close(update, fed.expected_mean(sorted(set(nodes.cohort))).float())
    assert len(strategy.ledger.events) == 1
    assert pauses == [10.0, 60.0][:times]
    per_client = dict[int, list[tuple[int, Any]]]()
    for node, request in nodes.requests:
        per_client.setdefault(int(request.clients[0]), []).append((node, request))
    for (first_node, first), *others in per_client.values():
        assert len(others) == (0 if first_node == 1 else times)
        for node, request in others:
            assert node == first_node
            assert np.array_equal(request.adapter, first.adapter)


def test_a_deployed_round_that_is_lost_three_times_is_charged_once_and_fails(fed, monkeypatch) -> None:
    monkeypatch.setattr("strategies.dp_fedavg.time.sleep", lambda seconds: None)
    nodes = fed.Nodes((1, 2, 3, 4), tamper=fed.failing(2, 3, 4, how="silent"))
    strategy = stepping(fed, nodes, **DEPLOYED)
    with pytest.raises(RoundFailed, match="too few messages were answered soundly"):
        strategy.step()
    assert len(strategy.ledger.events) == 1
    assert max(asked_how_often(nodes).values()) == 3


def test_a_deployed_round_that_is_not_lost_asks_nobody_twice(fed) -> None:
    nodes = fed.Nodes((1, 2, 3, 4), tamper=fed.failing(3, how="error"))
    stepping(fed, nodes, **DEPLOYED).step()
    assert set(asked_how_often(nodes).values()) == {1}
