"""DP-FedAvg over a grid in memory: who is asked, what is summed, what is charged, and what is never released.

Nodes answer with what the real mechanism makes of fixed client updates; messages go through Flower's serialisation.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from client.lora import AdapterLayout, Entry
from client.wire import TrainRequest, contribution_records
from privacy.clipping import FlatClip
from privacy.errors import BudgetExceeded
from privacy.events import Poisson
from privacy.ledger import Ledger
from privacy.mechanism import Contribution, InsecureSeededNoise, InsecureZeroNoise, Plan, Release, Units, contribute
from privacy.rng import torch_generator
from privacy.sampling import CohortSampler
from strategies.aggregation.factors import Ffa, Plain
from strategies.controller import PublicSignals, Setting
from strategies.controllers.dp_lac import GRID, DpLac
from strategies.controllers.fixed import Fixed
from strategies.dp_fedavg import DpFedAvg, RoundFailed
from strategies.optimizers.fedavg import FedAvg, FedAvgM

N, RATE, ROUNDS, BOUND = 60, 0.25, 5, 0.5
SAMPLING = Poisson(RATE, N)
LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (2, 3), 0, "A", "q"),
        Entry("q.lora_B.weight", (3, 2), 6, "B", "q"),
        Entry("classifier.bias", (2,), 12, "head", "classifier"),
    )
)
DIM = LAYOUT.dim
UPDATES = torch.randn(N, DIM, generator=torch_generator(0, "updates")) * 0.4
START = torch.linspace(-1, 1, LAYOUT.size)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages ask a class of their process who it is."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@dataclass
class Nodes:
    """What stands where Flower's grid stands: nodes that answer, or fail as told.

    ``tamper`` may change a node's list of replies; ``requests`` remembers what was asked of whom.
    """

    ids: Iterable[int] = (1, 2, 3)
    tamper: Callable[[int, list[Message]], list[Message]] = lambda node, replies: replies
    requests: list[tuple[int, TrainRequest]] = field(default_factory=list)

    def get_node_ids(self) -> list[int]:
        return list(self.ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            request = TrainRequest.from_records(transported(message.content))
            self.requests.append((node, request))
            replies += self.tamper(node, [answer(message, request)])
        return replies

    @property
    def cohort(self) -> list[int]:
        return sorted(int(client) for _, request in self.requests for client in request.clients)


def transported(records: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(records))


def answer(message: Message, request: TrainRequest) -> Message:
    return Message(
        transported(contribution_records(sum_of(request.clients, request.plan), request.round)), reply_to=message
    )


def sum_of(clients: Any, plan: Plan) -> Contribution:
    rows = UPDATES[torch.as_tensor(np.asarray(clients), dtype=torch.int64)]
    return contribute(Units(rows[:, : plan.clip.params or DIM], votes=votes_of(clients)), plan)


def votes_of(clients: Any) -> Tensor:
    """Most clients vote for bin 7."""
    return torch.tensor([7 if int(client) % 3 else 12 for client in clients], dtype=torch.int64)


def error_reply(reply: Message) -> Message:
    """What Flower makes of a node that raised, or of a reply that cannot be fetched (then from the server itself)."""
    failed = Message(RecordDict(), 0, MessageType.TRAIN)
    failed.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return Message(Error(1, "out of memory"), reply_to=failed)


def again(reply: Message, to: str | None = None) -> Message:
    """A second reply of the same content, to the same message or to another one."""
    message = Message(RecordDict(), reply.metadata.src_node_id, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id if to is None else to
    return Message(reply.content, reply_to=message)


Make = Callable[..., DpFedAvg]


@pytest.fixture
def make(ledger_for: Callable[..., Ledger]) -> Make:
    """A strategy that has begun; keyword arguments replace its parts."""

    def strategy(**parts: Any) -> DpFedAvg:
        ledger = parts.pop("ledger", None) or ledger_for(SAMPLING, parts.pop("budget", ROUNDS))
        given: dict[str, Any] = {
            "controller": Fixed(BOUND),
            "optimizer": FedAvg(),
            "aggregation": Plain(),
            "setting": Setting(ROUNDS, LAYOUT.blocks(), SAMPLING, (1.5,) * ROUNDS),
            "layout": LAYOUT,
            "ledger": ledger,
            "sampler": CohortSampler.insecure_from_seed(3),
            "job": "{}",
            "nodes": 3,
            "noise": InsecureZeroNoise(),
            "patience": 0.0,
        } | parts
        made = DpFedAvg(**given)
        made.begin(START, PublicSignals(0, 1.0))
        return made

    return strategy


def hold(strategy: DpFedAvg, nodes: Nodes, shuffle: int | None = None) -> Release:
    """One round, as the server's loop holds it."""
    round, _, _ = strategy.next_plan()
    messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes))  # type: ignore[arg-type]
    replies = nodes.send_and_receive(messages)
    if shuffle is not None:
        random.Random(shuffle).shuffle(replies)
    strategy.aggregate_train(round, replies)
    assert strategy.release is not None
    strategy.observe(PublicSignals(round, 0.9**round))
    return strategy.release


def expected_mean(clients: Iterable[int], bound: float = BOUND) -> Tensor:
    """sum of clipped updates / (q N), in float64, written out."""
    total = torch.zeros(DIM, dtype=torch.float64)
    for client in clients:
        row = UPDATES[client].double()
        total += row * min(1.0, bound / float(row.norm()))
    return total / (RATE * N)


def state_of(strategy: DpFedAvg) -> Any:
    assert strategy.state is not None
    return strategy.state


# --- what is summed -----------------------------------------------------------------------------------------------


def test_a_round_adds_the_mean_of_clipped_updates_over_the_expected_cohort(make: Make) -> None:
    strategy, nodes = make(), Nodes()
    release = hold(strategy, nodes)
    assert len(nodes.cohort) != RATE * N  # else the divisor would not show
    torch.testing.assert_close(release.update, expected_mean(nodes.cohort).float())
    assert release.expected_units == RATE * N
    torch.testing.assert_close(state_of(strategy).adapter, START + release.update, rtol=0, atol=0)
    assert state_of(strategy).round == 1


def test_the_release_depends_neither_on_order_nor_on_nodes_nor_on_how_clients_are_sent(make: Make) -> None:
    releases = []
    for ids, shuffle, clients_per_node in [
        ((1, 2, 3), None, None),
        ((1, 2, 3), 1, None),
        ((1, 2, 3), 2, None),
        ((8,), None, None),
        (range(1, 40), 3, None),
        ((1, 2, 3), None, 1),
        (range(1, N + 1), 4, 1),
    ]:
        strategy = make(nodes=len(list(ids)), clients_per_node=clients_per_node)
        releases.append(hold(strategy, Nodes(ids), shuffle).update)
    for other in releases[1:]:
        assert torch.equal(releases[0], other)


def test_balancing_by_work_changes_no_sum(make: Make) -> None:
    plain = hold(make(), Nodes()).update
    nodes = Nodes()
    assert torch.equal(plain, hold(make(work=np.arange(N, dtype=float) ** 3), nodes).update)
    assert len({len(request.clients) for _, request in nodes.requests}) > 1


def test_with_one_client_per_message_a_client_is_always_the_same_node(make: Make) -> None:
    nodes = Nodes(range(101, 101 + N))
    strategy = make(nodes=N, clients_per_node=1)
    hold(strategy, nodes)
    hold(strategy, nodes)
    assert all(len(request.clients) == 1 for _, request in nodes.requests)
    assert all(node == 101 + int(request.clients[0]) for node, request in nodes.requests)


def test_requests_carry_the_whole_adapter_the_plan_and_the_factors(make: Make) -> None:
    strategy, nodes = make(job='{"a": 1}'), Nodes()
    hold(strategy, nodes)
    hold(strategy, nodes)
    first, last = nodes.requests[0][1], nodes.requests[-1][1]
    np.testing.assert_array_equal(first.adapter, START.numpy())
    assert not np.array_equal(last.adapter, START.numpy())
    assert (first.plan, first.train, first.round, first.job) == (Plan(FlatClip(BOUND, DIM), 1.5), "both", 1, '{"a": 1}')
    assert last.round == 2


def test_ffa_releases_and_moves_b_and_the_head_only(make: Make) -> None:
    layout = LAYOUT.training("b")
    setting = Setting(ROUNDS, layout.blocks(), SAMPLING, (1.5,) * ROUNDS)
    strategy, nodes = make(aggregation=Ffa(), layout=layout, setting=setting, optimizer=FedAvgM()), Nodes()
    release = hold(strategy, nodes)
    assert {request.train for _, request in nodes.requests} == {"b"}
    assert len(release.update) == 8
    adapter = state_of(strategy).adapter
    assert torch.equal(adapter[:6], START[:6])
    torch.testing.assert_close(adapter[6:], START[6:] + release.update, rtol=0, atol=0)


def test_the_optimizer_sees_the_round_and_keeps_its_state(make: Make) -> None:
    strategy, nodes = make(optimizer=FedAvgM(learning_rate=2.0, decay=0.5, momentum=0.5)), Nodes()
    first, second = hold(strategy, nodes).update, hold(strategy, nodes).update
    expected = START + 2.0 * first + 1.0 * (0.5 * first + second)
    torch.testing.assert_close(state_of(strategy).adapter, expected)
    torch.testing.assert_close(state_of(strategy).optimizer["momentum"], 0.5 * first + second)


def test_the_served_adapter_is_the_debiased_average(make: Make) -> None:
    beta, adapters = 0.8, []
    strategy, nodes = make(served_average=beta), Nodes()
    for _ in range(4):
        hold(strategy, nodes)
        adapters.append(state_of(strategy).adapter)
        weights = [beta ** (len(adapters) - 1 - i) for i in range(len(adapters))]
        expected = sum(w * x for w, x in zip(weights, adapters, strict=True)) / sum(weights)
        torch.testing.assert_close(state_of(strategy).served, expected)
    without = make()
    hold(without, Nodes())
    assert torch.equal(state_of(without).served, state_of(without).adapter)


# --- the initial release ------------------------------------------------------------------------------------------


def test_dp_lac_begins_with_a_histogram_that_moves_no_adapter(make: Make) -> None:
    strategy, nodes = make(controller=DpLac(histogram_rate=1.0)), Nodes()
    assert state_of(strategy).round == -1
    release = hold(strategy, nodes)
    assert nodes.cohort == list(range(N))
    assert (state_of(strategy).round, torch.equal(state_of(strategy).adapter, START)) == (0, True)
    assert release.answers[0][7] == 40.0
    assert strategy.next_plan()[1].clip == FlatClip(GRID[7], DIM)
    assert [(event.label, event.round) for event in strategy.ledger.events] == [("histogram", 0)]
    hold(strategy, nodes)
    hold(strategy, nodes)
    bounds = [request.plan.clip.bound for _, request in nodes.requests if request.round]
    assert bounds[0] == GRID[7]
    assert bounds[-1] == pytest.approx(0.9 * GRID[7])
    assert [(event.label, event.round) for event in strategy.ledger.events[1:]] == [("round", 1), ("round", 2)]


@dataclass(frozen=True)
class Restless:
    """A controller that never plans the same twice, as one does that samples its action."""

    reads_validation = False
    counter: list[float] = field(default_factory=lambda: [1.0])

    def initial(self, sampling: Poisson) -> None:
        return None

    def profile(self, rounds: int) -> tuple[float, ...]:
        return (1.0,) * rounds

    def init(self, setting: Setting, public: PublicSignals) -> None:
        return None

    def plan(self, state: None, round: int) -> Plan:
        self.counter[0] *= 2
        return Plan(FlatClip(self.counter[0], DIM), 1.5)

    def update(self, state: None, released: Release, public: PublicSignals) -> None:
        return None

    def released_values(self, state: None) -> dict[str, float]:
        return {}


def test_the_plan_that_clipped_is_the_plan_that_noises(make: Make) -> None:
    strategy, nodes = make(controller=Restless()), Nodes()
    for _ in range(3):
        assert strategy.refusal() is None
        release = hold(strategy, nodes)
        assert nodes.requests[-1][1].plan == release.plan
    assert len({request.plan for _, request in nodes.requests}) == 3


# --- failures -----------------------------------------------------------------------------------------------------


def failing(*bad: int, how: str) -> Callable[[int, list[Message]], list[Message]]:
    def tamper(node: int, replies: list[Message]) -> list[Message]:
        if node not in bad:
            return replies
        (reply,) = replies
        match how:
            case "silent":
                return []
            case "error":
                return [error_reply(reply)]
            case "error, then an answer":
                return [error_reply(reply), reply]
            case "too large":
                encoded = np.full(DIM, 2**59, dtype=np.int64)
                reply.content.array_records["arrays"]["encoded"] = Array(encoded)
            case "not finite":
                reply.content.array_records["arrays"]["encoded"] = Array(np.full(DIM, np.nan))
            case "last round":
                reply.content.config_records["config"]["round"] = 0
            case "other code":
                reply.content.config_records["config"]["code"] = "0" * 64
            case "empty":
                reply.content = RecordDict()
        return [reply]

    return tamper


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
def test_a_failed_node_contributes_zero_and_the_divisor_stays(how: str, make: Make) -> None:
    strategy, nodes = make(), Nodes(tamper=failing(2, how=how))
    release = hold(strategy, nodes)
    kept = [int(c) for node, request in nodes.requests if node != 2 for c in request.clients]
    assert len(kept) < len(nodes.cohort)
    torch.testing.assert_close(release.update, expected_mean(kept).float())
    assert release.expected_units == RATE * N


def test_replies_that_were_not_asked_for_are_dropped(make: Make) -> None:
    def twice(node: int, replies: list[Message]) -> list[Message]:
        (reply,) = replies
        return [again(reply, to="another message"), reply, again(reply), again(reply, to="")]

    honest = hold(make(), Nodes()).update
    assert torch.equal(hold(make(), Nodes(tamper=twice)).update, honest)
    assert torch.equal(hold(make(clients_per_node=1), Nodes(tamper=twice), shuffle=0).update, honest)


@pytest.mark.parametrize("how", FAILURES)
def test_below_half_sound_replies_nothing_is_released_and_the_charge_stands(how: str, make: Make) -> None:
    strategy = make()
    before = state_of(strategy)
    with pytest.raises(RoundFailed, match="1 of 3 messages were answered soundly"):
        hold(strategy, Nodes(tamper=failing(1, 2, how=how)))
    assert strategy.release is None
    assert strategy.state is before
    (charge,) = strategy.ledger.charges
    assert (charge.event.label, charge.event.round, charge.released_at) == ("round", 1, None)
    assert charge.event.components == strategy.next_plan()[1].components()


def test_half_of_the_replies_are_enough(make: Make) -> None:
    release = hold(make(nodes=4), Nodes((1, 2, 3, 4), tamper=failing(1, 4, how="error")))
    assert float(release.update.norm()) > 0


# --- sampling and budget ------------------------------------------------------------------------------------------


class Nobody(CohortSampler):
    """Draws empty cohorts, as small runs do now and then."""

    __slots__ = ()

    def draw(self, *_: Any, **__: Any) -> np.ndarray:
        return np.empty(0, dtype=np.int64)


def test_an_empty_cohort_releases_noise_and_is_charged(make: Make) -> None:
    strategy, nodes = make(sampler=Nobody(bytes(32), insecure=True), noise=InsecureSeededNoise(5)), Nodes()
    release = hold(strategy, nodes)
    assert nodes.requests == []
    std = 1.5 * BOUND / (RATE * N)
    assert float(release.update.norm()) == pytest.approx(std * math.sqrt(DIM), rel=0.6)
    assert bool((release.update != 0).all())
    assert len(strategy.ledger.events) == 1
    torch.testing.assert_close(state_of(strategy).adapter, START + release.update, rtol=0, atol=0)


def test_noise_is_that_of_the_plan_whoever_answers(make: Make) -> None:
    """The released update is the true mean plus noise of std z C / (q N), for whole and for half cohorts alike."""
    std = 1.5 * BOUND / (RATE * N)
    for tamper in (Nodes().tamper, failing(3, how="silent")):
        residuals = []
        for seed in range(40):
            strategy, nodes = make(noise=InsecureSeededNoise(seed)), Nodes(tamper=tamper)
            release = hold(strategy, nodes)
            answered = [c for n, r in nodes.requests if tamper(n, [Message]) for c in r.clients]  # type: ignore[list-item]
            residuals.append(release.update.double() - expected_mean(answered))
        spread = float(torch.cat(residuals).std())
        assert spread == pytest.approx(std, rel=5 / math.sqrt(2 * 40 * DIM))


def test_a_round_the_ledger_does_not_pay_for_is_refused_before_anyone_is_asked(make: Make) -> None:
    strategy, nodes = make(budget=1), Nodes()
    hold(strategy, nodes)
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


def test_less_noise_than_was_committed_is_refused(make: Make, ledger_for: Callable[..., Ledger]) -> None:
    strategy = make(ledger=ledger_for(SAMPLING, ROUNDS, noise_multiplier=1.6))
    assert "below the committed floor" in str(strategy.refusal())


def test_a_round_that_was_not_charged_is_held_with_the_same_cohort_a_charged_one_with_another(make: Make) -> None:
    strategy = make()
    first, again, after = Nodes(), Nodes(), Nodes()
    for nodes in (first, again):  # a crash before the charge: configured, never aggregated
        messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), nodes)  # type: ignore[arg-type]
        nodes.send_and_receive(messages)
    assert first.cohort == again.cohort
    with pytest.raises(RoundFailed):
        hold(strategy, Nodes(tamper=failing(1, 2, 3, how="error")))
    hold(strategy, after)
    assert after.cohort != first.cohort
    assert [event.round for event in strategy.ledger.events] == [1, 1]


def test_cohorts_of_rounds_differ_and_repeat_with_the_secret(make: Make) -> None:
    strategy, nodes = make(), Nodes()
    hold(strategy, nodes)
    one = nodes.cohort
    nodes.requests.clear()
    hold(strategy, nodes)
    assert nodes.cohort != one
    repeated = Nodes()
    hold(make(), repeated)
    assert repeated.cohort == one


def test_a_sampler_that_can_be_foretold_stamps_the_ledger(make: Make, tmp_path) -> None:
    from privacy.commitment import Commitment, FloorStep

    floor = (FloorStep("round", SAMPLING, 1.5, 2),)
    commitment = Commitment("client", "add_remove", N, 50.0, 1e-5, floor=floor)
    for sampler, noise, stamp in [
        (CohortSampler.fresh(), None, None),
        (CohortSampler.insecure_from_seed(1), None, "cohorts are drawn from a seed"),
    ]:
        with Ledger.create(tmp_path / f"{stamp}.jsonl", commitment) as ledger:
            strategy = make(ledger=ledger, sampler=sampler, noise=noise)
            hold(strategy, Nodes())
            assert ledger.not_private == stamp
            if stamp is None:
                assert 0 < ledger.spent() <= 50.0


# --- order of calls -----------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_refused(make: Make) -> None:
    strategy, nodes = make(), Nodes()
    with pytest.raises(ValueError, match="observe needs a release"):
        strategy.observe(PublicSignals(1, 1.0))
    for round in (0, 2):
        with pytest.raises(ValueError, match="server_round must be 1"):
            strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="server_round must be 1"):
            strategy.aggregate_train(round, [])
    assert strategy.ledger.events == ()
    fresh = DpFedAvg.__new__(DpFedAvg)
    fresh.state = None
    with pytest.raises(ValueError, match="call begin"):
        fresh.next_plan()


def test_too_few_nodes_end_the_wait(make: Make) -> None:
    strategy = make(nodes=4)
    with pytest.raises(RoundFailed, match="3 of 4 nodes connected within 0 s"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), Nodes())  # type: ignore[arg-type]
    assert strategy.ledger.events == ()


def test_clients_are_not_evaluated_and_no_metric_is_returned(make: Make) -> None:
    strategy, nodes = make(), Nodes()
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), nodes))  # type: ignore[arg-type]
    arrays, metrics = strategy.aggregate_train(1, nodes.send_and_receive(messages))
    assert metrics is None
    assert arrays is not None
    np.testing.assert_array_equal(arrays["adapter"].numpy(), state_of(strategy).served.numpy())
    assert strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), nodes) == []  # type: ignore[arg-type]
    assert strategy.aggregate_evaluate(1, []) is None


def test_a_state_can_be_put_back(make: Make) -> None:
    """What resuming does: another strategy goes on from the state as if it had been there."""
    one, other, nodes = make(), make(), Nodes()
    hold(one, nodes)
    other.state = replace(state_of(one))
    nodes.requests.clear()
    again = Nodes()
    assert torch.equal(hold(one, nodes).update, hold(other, again).update)
    assert nodes.cohort == again.cohort
    assert torch.equal(state_of(one).adapter, state_of(other).adapter)
