"""The server's side of nodes with many clients: it names nobody, and believes no more than a node can have drawn."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

from privacy.contribution import GRID
from privacy.randomness.sampling import RemoteSampler, most_drawn
from strategies.messages.dispatch import RoundFailed

HELD = (20, 30, 10)


def in_steps(node: int, units: int) -> Callable[[int, list[Message]], list[Message]]:
    """A node whose sum is as long as that of so many clipped updates."""

    def tamper(who: int, replies: list[Message]) -> list[Message]:
        for reply in replies if who == node else []:
            encoded = np.zeros_like(reply.content.array_records["arrays"]["encoded"].numpy())
            encoded[0] = units * int(GRID)
            reply.content.array_records["arrays"]["encoded"] = Array(encoded)
        return replies

    return tamper


def many(fed, **parts):
    return fed.make(sampler=RemoteSampler(HELD), nodes=(1, 2, 3), clients_per_node=1, **parts)


def test_nodes_are_told_how_to_draw_and_no_client(fed) -> None:
    strategy, nodes = many(fed), fed.Nodes()
    fed.hold(strategy, nodes)
    assert [node for node, _ in nodes.requests] == [1, 2, 3]
    assert nodes.cohort == []
    draws = [request.own_draw for _, request in nodes.requests]
    assert [draw.clients for draw in draws] == list(HELD)
    assert {(draw.run, draw.label, draw.attempt, draw.sampling) for draw in draws} == {
        (strategy.ledger.run_id, "round", 0, fed.SAMPLING)
    }
    assert strategy.ledger.events[0].sampling == fed.SAMPLING


@pytest.mark.parametrize("node", [1, 2, 3])
def test_a_sum_is_as_long_as_what_the_node_can_have_drawn_at_most(node: int, fed) -> None:
    most = most_drawn(HELD[node - 1], fed.RATE)
    release = fed.hold(many(fed), fed.Nodes(tamper=in_steps(node, most)))
    assert float(release.update[0]) == pytest.approx(most * fed.BOUND / (fed.RATE * fed.N), rel=1e-6)
    refused = fed.hold(many(fed), fed.Nodes(tamper=in_steps(node, most + 1)))
    assert not refused.update.any()


@pytest.mark.parametrize("how", ["too large", "not finite", "other code", "last round", "empty", "error", "silent"])
def test_a_node_that_sends_what_cannot_be_adds_nothing_and_is_asked_for_nobody_apart(how: str, fed) -> None:
    def both(who: int, replies: list[Message]) -> list[Message]:
        return in_steps(1, 3)(who, fed.failing(2, how=how)(who, replies))

    nodes, strategy = fed.Nodes(tamper=both), many(fed)
    strategy.exchange = nodes.send_and_receive
    release = fed.hold(strategy, nodes)
    expected = torch.zeros(fed.DIM)
    expected[0] = 3 * fed.BOUND / (fed.RATE * fed.N)
    torch.testing.assert_close(release.update, expected)
    assert release.expected_units == fed.RATE * fed.N
    assert len(nodes.requests) == 3


def test_a_charged_round_is_drawn_anew_and_an_uncharged_one_is_not(fed) -> None:
    strategy = many(fed)
    nodes = fed.Nodes(tamper=fed.failing(1, 2, how="silent"))
    list(strategy.configure_train(1, None, None, fed.Nodes()))  # asked, and not charged
    with pytest.raises(RoundFailed, match="too few messages"):
        fed.hold(strategy, nodes)
    again = fed.Nodes()
    fed.hold(strategy, again)
    assert [request.own_draw.attempt for _, request in nodes.requests + again.requests] == [0] * 3 + [1] * 3
