"""Secure sums through real messages: the strategy, the clients' handlers, and everything that can go wrong between."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import client.secure_sum
from client.node_state.own_ledger import HEAD, LEDGER, own_ledger
from client.secure_sum import HANDLERS, LIST_FILE, identity_file
from client.worker import Worker
from privacy.accountants.calibration import filter_commitment
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import Contribution, Plan, contribute
from privacy.errors import AccountRefused, BudgetExceeded, CorruptRun
from privacy.events import NoiseShares, Poisson
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms
from privacy.ledger.place import At
from privacy.randomness.sampling import CohortSampler
from privacy.secagg import keys
from privacy.secagg.federation import Federation, save_identity
from privacy.secagg.party import Refused
from server.config.load import ConfigError, parse
from server.runs.assembly import agreed_federation
from simulations.engines.inprocess import InProcessGrid
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed
from strategies.controllers.quantile import Quantile
from strategies.dp_fedavg import DpFedAvg
from strategies.messages.client_update import TrainRequest
from strategies.messages.dispatch import RoundFailed
from strategies.messages.records import BadMessage
from strategies.messages.secure_sum import STEPS
from strategies.secure_aggregation import SecureAggregation

N, ROUNDS, MOST = 5, 2, 9
SHARES = NoiseShares(N, 3, 0, 24)
EVERYONE = Poisson(1.0, N)
Tamper = Callable[[str, int, Message], Message]


CONTRIBUTION = client.secure_sum._contribution


def contribution(train: TrainRequest, context: Context) -> Contribution:
    """What training would give: one fixed update for every client."""
    from tests.cases.federation import UPDATES

    return contribute(Units(UPDATES[torch.from_numpy(train.clients)]), train.plan)


class Lab:
    """A federation of five clients in one process, each a node; made by the run, as in a simulation."""

    def __init__(
        self, folder: Path, fed: Any, insecure: bool = True, controller: Any = None, ledger: Commitment | None = None
    ) -> None:
        self.folder, self.fed = folder, fed
        identities = [keys.fresh_identity() for _ in range(N)]
        commitment, z = filter_commitment(4.0, 1e-2, EVERYONE, ROUNDS, adjacency="zero_out", noise_shares=SHARES)
        self.federation = Federation(tuple(map(keys.public_identity, identities)), commitment)
        for number, identity in enumerate(identities):
            save_identity(folder / identity_file(number), identity)
        (folder / LIST_FILE).write_text(self.federation.to_text())
        self.ledger = Ledger.create(folder / "ledger.jsonl", ledger or commitment)
        self.asked: list[tuple[str, int]] = []
        self.charged_when_asked: list[int] = []
        self.replies: list[Message] = []
        self.tamper: Tamper = lambda step, node, reply: reply
        self.grid = InProcessGrid(self.app(), N)
        self.strategy: DpFedAvg = fed.make(
            ledger=self.ledger,
            nodes=N,
            clients_per_node=1,
            sampler=CohortSampler.create(),
            controller=controller or Fixed(fed.BOUND),
            info=RunInfo(MOST, (fed.LAYOUT.blocks(),), EVERYONE, (z,) * MOST, commitment.order),
        )
        self.strategy.secure = SecureAggregation(
            self.federation, self.ledger.run_id, self.ask, source=str(folder), insecure=insecure
        )

    def ask(self, messages: Any) -> Any:
        return self.grid.send_and_receive(messages)

    def app(self) -> ClientApp:
        app = ClientApp()

        def handler(step: str) -> Callable[[Message, Context], Message]:
            def handle(message: Message, context: Context) -> Message:
                self.asked.append((step, context.node_id))
                self.charged_when_asked.append(len(self.ledger.charges))
                reply = self.tamper(step, context.node_id, HANDLERS[step](message, context))
                self.replies.append(reply)
                return reply

            return handle

        for step in STEPS:
            app.train(step)(handler(step))
        return app

    def hold(self) -> Any:
        number = self.strategy.next_release().round
        messages = list(self.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), self.grid))
        self.strategy.aggregate_train(number, self.ask(messages))
        self.strategy.observe(PublicSignals(number, 0.9))
        return self.strategy.release


@pytest.fixture
def lab(tmp_path: Path, fed: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lab]]:
    monkeypatch.setattr(client.secure_sum, "_contribution", contribution)
    made: list[Lab] = []

    def make(**parts: Any) -> Lab:
        made.append(Lab(tmp_path, fed, **parts))
        return made[-1]

    yield make
    for one in made:
        one.ledger.close()


def mean_of(fed: Any, clients: Any) -> torch.Tensor:
    """Sum of clipped updates over everyone, written out."""
    return fed.expected_mean(clients).float() * (fed.RATE * fed.N) / N


def close(update: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for the rounding of five vectors to the grid."""
    return float((update - expected).abs().max()) < N * 2.0**-12


def test_a_round_releases_the_clipped_mean_and_says_so_in_the_ledger(lab: Callable[..., Lab], fed: Any) -> None:
    this = lab()
    release = this.hold()
    assert close(release.update, mean_of(fed, range(N)))
    assert [step for step, _ in this.asked] == [step for step in STEPS for _ in range(N)]
    (event,) = this.ledger.events
    assert event.noise_shares == SHARES
    assert this.ledger.charges[0].released_at is not None
    assert this.ledger.not_private == "the clients were told to add no noise"
    assert close(this.hold().update, mean_of(fed, range(N)))
    with pytest.raises(BudgetExceeded):
        this.hold()


def test_the_charge_comes_before_any_client_makes_noise_and_behind_keys(lab: Callable[..., Lab]) -> None:
    this = lab()
    this.hold()
    by_step = dict(zip([step for step, _ in this.asked], this.charged_when_asked, strict=True))
    assert by_step == dict(zip(STEPS, (0, 0, 1, 1, 1), strict=True))


def test_noise_of_all_is_in_the_release(lab: Callable[..., Lab], fed: Any) -> None:
    this = lab(insecure=False)
    noise = torch.cat([this.hold().update - mean_of(fed, range(N)) for _ in range(ROUNDS)])
    z = this.ledger.charges[0].noise_multiplier
    std = z * fed.BOUND / N * (N / SHARES.survivors) ** 0.5
    assert this.ledger.not_private is None
    assert 0.4 * std < float(noise.std()) < 2.2 * std  # 28 numbers are not, once in 5 10^6 runs


def test_what_a_client_sends_is_keys_masked_bytes_and_shares_and_nothing_else(lab: Callable[..., Lab]) -> None:
    """By type: no reply holds anything of the update but the one masked vector, all of whose bytes look random."""
    this = lab()
    this.hold()
    for (step, _), reply in zip(this.asked, this.replies, strict=True):
        content = reply.content
        assert set(content) == {"arrays", "config"}
        assert set(content.config_records["config"]) == {"code"}
        names = set(content.array_records["arrays"])
        assert names == ({"masked"} if step == "secagg_masked" else {"parties", "table"})
    masked = [reply.content.array_records["arrays"]["masked"].numpy() for reply in this.replies if _is_masked(reply)]
    assert len(masked) == N
    assert all(len(np.unique(one)) > 1 for one in masked)
    length = sum(part.dim for part in this.ledger.events[0].components)
    assert all(one.dtype == np.uint8 and len(one) == 3 * length for one in masked)


def _is_masked(reply: Message) -> bool:
    return "masked" in reply.content.array_records["arrays"]


def test_a_client_whose_work_raises_hands_in_its_noise_and_nobody_sees_that(
    lab: Callable[..., Lab], fed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is the adversary here, and an answer less would tell it about the client's records."""
    this, message = lab(), Context(0, 0, {}, RecordDict(), {})

    class Faulty:
        def contribution(self, train: TrainRequest) -> Contribution:
            if train.clients.tolist() == [2]:
                raise FloatingPointError("a sentence of the client's")
            return contribution(train, message)

    monkeypatch.setattr(client.secure_sum, "_contribution", CONTRIBUTION)
    monkeypatch.setattr(client.secure_sum, "warm_worker", lambda job: Faulty())
    assert close(this.hold().update, mean_of(fed, (0, 1, 3, 4)))
    assert this.strategy.secure is not None
    assert this.strategy.secure.handed_in == N
    assert "FloatingPointError" in caplog.text
    assert "sentence" not in caplog.text

    def missing(job: str) -> Worker:
        raise FileNotFoundError("the base model")

    monkeypatch.setattr(client.secure_sum, "warm_worker", missing)
    with pytest.raises(RoundFailed):  # nobody's records have to do with it, and training on noise helps nobody
        this.hold()


@pytest.mark.parametrize("step", STEPS)
def test_two_clients_may_drop_out_at_any_step(step: str, lab: Callable[..., Lab], fed: Any) -> None:
    this = lab()

    def fail(asked: str, node: int, reply: Message) -> Message:
        if node in (1, 4) and asked == step:
            raise ConnectionError("gone")
        return reply

    this.tamper = fail
    late = step in ("secagg_confirm", "secagg_reveal")
    assert close(this.hold().update, mean_of(fed, range(N) if late else (1, 2, 4)))
    assert this.strategy.secure is not None
    assert this.strategy.secure.handed_in == (N if late else N - 2)


@pytest.mark.parametrize("step", STEPS)
def test_three_are_too_many_and_what_was_charged_stays_charged(step: str, lab: Callable[..., Lab]) -> None:
    this = lab()

    def fail(asked: str, node: int, reply: Message) -> Message:
        if node in (1, 2, 4) and asked == step:
            raise ConnectionError("gone")
        return reply

    this.tamper = fail
    before = this.strategy.state
    paid = step not in ("secagg_keys", "secagg_shares")
    with pytest.raises(RoundFailed, match="the round is charged" if paid else "nothing was charged"):
        this.hold()
    assert len(this.ledger.charges) == paid
    assert this.strategy.release is None
    assert this.strategy.state is before or this.strategy.state == before
    this.tamper = lambda asked, node, reply: reply
    if paid:  # tried again under another session: what was handed in before is of no use
        this.hold()
        assert len(this.ledger.charges) == 2


def _drop(reply: Message) -> None:
    reply.content = RecordDict()


def _short(reply: Message) -> None:
    arrays = reply.content.array_records["arrays"]
    name = "masked" if "masked" in arrays else "table"
    arrays[name] = Array(arrays[name].numpy()[:-1])


def _flip(reply: Message) -> None:
    """Half the modulus more in every place of a masked vector, so that its sum is long for certain; else a forgery."""
    arrays = reply.content.array_records["arrays"]
    if "masked" in arrays:
        data = arrays["masked"].numpy().copy()
        data[SHARES.modulus_bits // 8 - 1 :: SHARES.modulus_bits // 8] ^= 0x80
        arrays["masked"] = Array(data)
    else:
        data = arrays["table"].numpy().copy()
        data[: len(data) // 2] ^= 0xFF
        arrays["table"] = Array(data)


def _type(reply: Message) -> None:
    arrays = reply.content.array_records["arrays"]
    name = "masked" if "masked" in arrays else "table"
    arrays[name] = Array(arrays[name].numpy().astype(np.float64))


def _strangers(reply: Message) -> None:
    arrays = reply.content.array_records["arrays"]
    if "parties" in arrays:
        arrays["parties"] = Array(arrays["parties"].numpy() + 7)
    else:
        arrays["parties"] = Array(np.arange(3))


def _extra(reply: Message) -> None:
    reply.content["more"] = ConfigRecord({"loss": 0.1})


def _code(reply: Message) -> None:
    reply.content.config_records["config"]["code"] = "0" * 64


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("wrong", [_drop, _short, _type, _strangers, _extra, _code, _flip])
def test_a_hostile_reply_is_refused_and_costs_only_itself(
    step: str, wrong: Callable[[Message], None], lab: Callable[..., Lab], fed: Any
) -> None:
    this = lab()

    def change(asked: str, node: int, reply: Message) -> Message:
        if node == 2 and asked == step:
            wrong(reply)
        return reply

    this.tamper = change
    late = step in ("secagg_confirm", "secagg_reveal")
    forged = wrong is _flip and step in ("secagg_shares", "secagg_masked")
    if not forged:
        assert close(this.hold().update, mean_of(fed, range(N) if late else (0, 2, 3, 4)))
    elif step == "secagg_masked":  # nobody can tell another masked vector, but no sum of clipped ones is so long
        with pytest.raises(RoundFailed, match="no clipped vector"):
            this.hold()
    else:  # half of its boxes cannot be opened: with the others its secret is whole, or the round ends
        this.hold()


def test_a_reply_sent_twice_or_for_somebody_else_counts_once(lab: Callable[..., Lab], fed: Any) -> None:
    this = lab()
    plain = this.grid.send_and_receive
    this.ask = lambda messages: [again for reply in plain(messages) for again in (reply, reply)]  # type: ignore[method-assign]
    this.strategy.secure.ask = this.ask  # type: ignore[union-attr]
    assert close(this.hold().update, mean_of(fed, range(N)))


def test_queries_are_part_of_the_same_vector(lab: Callable[..., Lab], fed: Any) -> None:
    from tests.cases.federation import UPDATES

    this = lab(controller=Quantile(clip_norm=fed.BOUND, bit_noise=2.0))
    release = this.hold()
    below = sum(float(UPDATES[i].norm()) <= fed.BOUND for i in range(N))
    (name,) = [query.name for query in release.plan.queries]
    assert float(release.answer(name)) == below - N / 2
    assert [part.name for part in this.ledger.events[0].components] == ["update", name]


class TestOwnNode:
    """A node with an identity of its own trusts its own list and nothing that the server says of it."""

    @pytest.fixture
    def own(self, lab: Callable[..., Lab]) -> Lab:
        this = lab(insecure=False)
        for node, context in this.grid.contexts.items():
            number = 5 - node  # other numbers than the server would guess
            context.node_config["identity"] = str(this.folder / identity_file(number))
            context.node_config["federation"] = str(this.folder / LIST_FILE)
            context.node_config["secagg-state"] = str(this.folder / "own" / str(node))
        assert this.strategy.secure is not None
        this.strategy.secure.source = ""
        return this

    def test_says_itself_who_it_is(self, own: Lab, fed: Any) -> None:
        own.hold()
        assert own.ledger.charges[0].released_at is not None

    def test_answers_no_request_for_an_unmasked_contribution(self, own: Lab) -> None:
        from client.app import train

        message = Message(RecordDict(), dst_node_id=1, message_type="train")
        with pytest.raises(ValueError, match="secure sums only"):
            train(message, own.grid.contexts[1])

    def test_adds_noise_whatever_it_is_told(self, own: Lab) -> None:
        assert own.strategy.secure is not None
        own.strategy.secure.insecure = True
        with pytest.raises(RoundFailed, match="0 clients handed in"):
            own.hold()

    def test_takes_no_part_with_less_noise_than_agreed(self, own: Lab) -> None:
        strict = replace(own.federation, least_noise_multiplier=50.0)
        (own.folder / LIST_FILE).write_text(strict.to_text())
        assert own.strategy.secure is not None
        own.strategy.secure.federation = strict
        with pytest.raises(RoundFailed, match="0 clients handed in"):
            own.hold()

    def test_meets_nobody_who_has_another_list(self, own: Lab) -> None:
        text = json.loads(own.federation.to_text()) | {"least_noise_multiplier": 0.5}
        (own.folder / LIST_FILE).write_text(json.dumps(text))
        with pytest.raises(RoundFailed, match="0 clients announced"):
            own.hold()

    def test_of_data_without_an_identity_takes_no_part(self, own: Lab) -> None:
        for context in own.grid.contexts.values():
            del context.node_config["identity"]
            context.node_config["data"] = "jsonl:somewhere"
        with pytest.raises(RoundFailed, match="0 clients announced"):
            own.hold()


def test_a_server_that_changes_the_plan_behind_the_keys_gets_nothing(lab: Callable[..., Lab]) -> None:
    """All parties signed for a digest of model and plan; weaker clipping or noise than that is refused by each."""
    this = lab()
    number = this.strategy.next_release().round
    messages = list(this.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), this.grid))
    for message in messages:
        changed = Plan(FlatClip(this.fed.BOUND * 2, this.fed.DIM), 0.5)
        message.content.config_records["config"]["plan"] = json.dumps(changed.to_json())
    with pytest.raises(RoundFailed, match="0 clients handed in"):
        this.strategy.aggregate_train(number, this.ask(messages))


def test_a_server_that_sends_each_client_another_model_gets_nothing(lab: Callable[..., Lab]) -> None:
    this = lab()
    number = this.strategy.next_release().round
    messages = list(this.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), this.grid))
    for i, message in enumerate(messages[:3]):
        arrays = message.content.array_records["arrays"]
        arrays["adapter"] = Array(arrays["adapter"].numpy() + np.float32(i + 1))
    with pytest.raises(RoundFailed, match="2 clients handed in"):
        this.strategy.aggregate_train(number, this.ask(messages))


def test_a_session_gets_one_vector_of_a_client(lab: Callable[..., Lab]) -> None:
    """The round is begun again under the same name, as by a server that wants a second draw of the noise."""
    this = lab()
    number = this.strategy.next_release().round
    messages = list(this.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), this.grid))
    this.ask(messages)
    secure = this.strategy.secure
    assert secure is not None
    planned = this.strategy.next_release()
    requests = [(m.metadata.dst_node_id, TrainRequest.from_records(m.content)) for m in messages]
    with pytest.raises(RoundFailed, match="0 clients announced"):
        secure.begin(planned, CohortSampler.create().draw(planned.sampling, number), requests, this.ledger)


def patient() -> Commitment:
    """Of a server that pays for more rounds than the clients agreed on."""
    return filter_commitment(100.0, 1e-2, EVERYONE, 1, adjacency="zero_out", noise_shares=SHARES)[0]


def restarted(this: Lab) -> None:
    """Nothing is left of what Flower keeps for a node: another run, another process."""
    for context in this.grid.contexts.values():
        context.state = RecordDict()


class TestOwnLedger:
    """Nobody but the server counted rounds; now every client counts what it hands in."""

    def test_clients_end_where_their_list_does_whatever_the_server_pays_for(self, lab: Callable[..., Lab]) -> None:
        this = lab(ledger=patient())
        for round in range(ROUNDS):
            restarted(this)
            assert this.strategy.secure is not None
            this.strategy.secure.run = f"run {round}"
            this.hold()
        for _ in range(3):
            with pytest.raises(RoundFailed, match="0 clients handed in"):
                this.hold()
        assert sum(charge.released_at is not None for charge in this.ledger.charges) == ROUNDS
        for number in range(N):
            with Ledger.open(this.folder / f"party-{number}" / LEDGER, read_only=True) as own:
                assert own.commitment == this.federation.commitment
                assert [event.round for event in own.events] == [1, 2]
                assert own.rho_spent == pytest.approx(own.commitment.rho, rel=1e-3)

    def test_a_named_round_gets_one_vector_across_restarts(self, lab: Callable[..., Lab]) -> None:
        this = lab(ledger=patient())
        number = this.strategy.next_release().round
        messages = list(this.strategy.configure_train(number, ArrayRecord(), ConfigRecord(), this.grid))
        this.ask(messages)
        restarted(this)
        secure, planned = this.strategy.secure, this.strategy.next_release()
        assert secure is not None
        requests = [(m.metadata.dst_node_id, TrainRequest.from_records(m.content)) for m in messages]
        with pytest.raises(RoundFailed, match="0 clients announced"):
            secure.begin(planned, CohortSampler.create().draw(planned.sampling, number), requests, this.ledger)
        cohort = CohortSampler.create().draw(planned.sampling, number, 1)
        secure.begin(planned, cohort, requests, this.ledger)  # another attempt is another name, and is paid for

    def test_the_charge_is_on_the_disk_before_noise_is_drawn(self, lab: Callable[..., Lab], monkeypatch: Any) -> None:
        this, charged = lab(insecure=False), []
        share = client.secure_sum.noisy_share

        def spied(*arguments: Any) -> Any:
            files = sorted(this.folder.glob(f"party-*/{LEDGER}"))
            charged.append(sum('"kind":"charge"' in file.read_text() for file in files))
            return share(*arguments)

        monkeypatch.setattr(client.secure_sum, "noisy_share", spied)
        this.hold()
        assert charged == [1, 2, 3, 4, 5]

    def test_a_ledger_that_is_gone_or_older_or_of_another_list_is_refused(self, lab: Callable[..., Lab]) -> None:
        this = lab(ledger=patient())
        folder = this.folder / "party-0"
        this.hold()
        shutil.copy(folder / LEDGER, this.folder / "older")
        this.hold()
        shutil.copy(this.folder / "older", folder / LEDGER)
        with pytest.raises(CorruptRun, match="rolled back or truncated"), own_ledger(folder, this.federation):
            pass
        (folder / LEDGER).unlink()
        with pytest.raises(CorruptRun, match=r"is gone: .*Restore it"), own_ledger(folder, this.federation):
            pass
        (folder / HEAD).write_text("three:lines\n")
        with pytest.raises(CorruptRun, match="must hold LINES:HASH"), own_ledger(folder, this.federation):
            pass
        other = replace(this.federation, least_noise_multiplier=0.5)
        with pytest.raises(Refused, match="of another list"), own_ledger(this.folder / "party-1", other):
            pass

    def test_the_account_of_a_party_pays_for_its_list_once(self, lab: Callable[..., Lab], tmp_path: Path) -> None:
        this, at = lab(), At(tmp_path / "account.jsonl", tmp_path / "place")
        listed = this.federation.commitment
        lifetime = Terms("records", listed.unit, 1.5 * listed.epsilon, 0.1, "zero_out", "sum")
        Account.create(at.file, lifetime, at.place).close()
        for _ in range(2):
            with own_ledger(tmp_path / "party", this.federation, at):
                pass
        with Account.open(*at) as account:
            assert list(account.debits) == [this.federation.digest.hex()]
        other = replace(this.federation, least_noise_multiplier=0.5)
        with pytest.raises(AccountRefused, match="is left of"), own_ledger(tmp_path / "another", other, at):
            pass
        assert not (tmp_path / "another" / LEDGER).exists()

    def test_a_node_needs_a_folder_for_it(self, lab: Callable[..., Lab]) -> None:
        this = lab()
        config = {"identity": str(this.folder / identity_file(0)), "federation": str(this.folder / LIST_FILE)}
        with pytest.raises(BadMessage, match=r"needs a folder for its ledger .*\(secagg-state\)"):
            client.secure_sum.Member.of(config, "", 0)

    def test_a_run_that_the_list_does_not_pay_for_is_refused(self, lab: Callable[..., Lab]) -> None:
        this = lab()
        privacy = {"delta": 1e-2, "trust": "secagg", "mode": "filter", "noise": "discrete"}
        privacy["secagg"] = {"min-survivors": 3, "modulus-bits": 24}  # type: ignore[assignment]
        table = {"clients": N, "sampling-rate": 1.0, "privacy": privacy, "simulation": {"clients-per-node": 1}}
        config = parse(table)
        commitment = this.federation.commitment
        assert agreed_federation(config, this.folder / LIST_FILE, commitment) == this.federation
        assert commitment.rho is not None
        with pytest.raises(ConfigError, match=r"commits to epsilon 4 at delta 0\.01, which does not pay for this run"):
            agreed_federation(config, this.folder / LIST_FILE, replace(commitment, rho=1.01 * commitment.rho))
