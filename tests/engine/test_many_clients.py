"""A node with many clients: it draws them itself, by a secret of its own, and sends what their worker would."""

import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from client.app import app
from client.data.local import open_own
from client.node import Node, NodeFailed, own_worker
from client.node_state.joined import Joined
from client.worker import Worker
from privacy.clipping.norms import FlatClip
from privacy.contribution import Contribution, Plan
from privacy.errors import CorruptRun
from privacy.events import CyclicPoisson, Poisson
from server.config.load import parse
from server.runs.assembly import Assembly, assemble_client_level
from strategies.aggregations.aggregation import Adapters
from strategies.messages.client_update import TrainRequest, code_fingerprint, read_contribution
from strategies.messages.own_clients import JOIN, Draw, JoinRequest, PlannedDraws, read_join_reply
from strategies.messages.records import BadMessage
from tests.cases.many_clients import deployed, of_clients, write
from tests.cases.node import context, message

CLIENTS, NUMBER, RATE = 6, 8, 0.4
POPULATION = 3 * NUMBER
PLAN = {label: PlannedDraws((Poisson(RATE, POPULATION),), 600) for label in ("round", "other")}


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    text = deployed(tmp_path_factory.mktemp("server"), [NUMBER] * 3, RATE)
    return assemble_client_level(parse(tomllib.loads(text)))


@pytest.fixture(autouse=True)
def no_worker_of_before() -> None:
    own_worker.cache_clear()


def settings(folder: Path, **changes: str) -> dict[str, str]:
    data = write(folder / "records.jsonl", of_clients("a", CLIENTS))
    said = {
        "data": data,
        "cache": str(folder / "cache"),
        "clients": str(NUMBER),
        "clients-state": str(folder / "state"),
    }
    return {name: value for name, value in {**said, **changes}.items() if value}


def request(assembly: Assembly, round: int = 1, **draw: Any) -> TrainRequest:
    part = assembly.methods.aggregation.part(Adapters(2, POPULATION, 0), 1)
    plan = Plan(FlatClip(0.05, part.layout(assembly.layout).dim), 1.0)
    said: dict[str, Any] = {"run": "one", "label": "round", "attempt": 0, "sampling": Poisson(RATE, POPULATION)}
    asked = Draw(**{**said, "clients": NUMBER, **draw})
    nobody = np.empty(0, dtype=np.int64)
    return TrainRequest(round, assembly.start.numpy(), plan, part, nobody, assembly.job.to_json(), own_draw=asked)


def join(assembly: Assembly, own: dict[str, str], run: str = "one", plan: dict[str, PlannedDraws] | None = None) -> int:
    asked = JoinRequest(run, assembly.job.to_json(), PLAN if plan is None else plan).to_records()
    reply = app(message=message(asked, f"query.{JOIN}"), context=context(**own))
    return read_join_reply(reply.content, code_fingerprint())


def send(asked: TrainRequest, own: dict[str, str]) -> Contribution:
    reply = app(message=message(asked.to_records(), "train"), context=context(**own))
    return read_contribution(reply.content, asked.plan, asked.round, NUMBER)


def kept(own: dict[str, str]) -> Joined:
    (folder,) = Path(own["clients-state"]).iterdir()
    return Joined.load(folder)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Whom nodes train, in place of training them."""
    asked: list[list[int]] = []

    def remember(self: Worker, request: TrainRequest) -> Contribution:
        asked.append(request.clients.tolist())
        return Contribution.zero(request.plan)

    monkeypatch.setattr(Worker, "contribution", remember)
    return asked


def test_a_node_sends_the_workers_sum_over_the_clients_it_draws(assembly: Assembly, tmp_path: Path) -> None:
    own = settings(tmp_path)
    assert join(assembly, own) == NUMBER  # the public number, not that of clients with records
    joined, sizes = kept(own), set[int]()
    assert assembly.job.reading is not None
    data = open_own(own["data"], assembly.job.reading, assembly.job.model, tmp_path / "cache")
    worker = Worker(assembly.job.replace(seed=joined.seed), data)
    for round in range(1, 4):
        places = joined.sampler.draw(Poisson(RATE, NUMBER), round).ids
        there = places[places < CLIENTS]
        sizes.add(len(there))
        asked = request(assembly, round)
        expected = worker.contribution(replace(asked, clients=there)) if len(there) else Contribution.zero(asked.plan)
        assert torch.equal(send(asked, own).encoded, expected.encoded)
    assert max(sizes) > 0


def test_a_node_needs_nothing_that_its_image_leaves_out(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = runpy.run_path(str(Path(__file__).parents[2] / "docker" / "requirements.py"))["LEFT_OUT"]
    for name in left_out:
        monkeypatch.setitem(sys.modules, name, None)
    assert "datasets" in left_out
    assert join(assembly, settings(tmp_path)) == NUMBER


def test_clients_are_those_of_the_column_with_their_records(assembly: Assembly, tmp_path: Path) -> None:
    rows = of_clients("a", CLIENTS)
    mixed = write(tmp_path / "mixed.jsonl", rows[::2] + rows[1::2])
    assert assembly.job.reading is not None
    found = []
    for source in (mixed, settings(tmp_path)["data"]):
        data = open_own(source, assembly.job.reading, assembly.job.model, tmp_path / "cache")
        clients = [data.client(number) for number in range(data.clients)]
        assert [len(records) for records in clients] == [1 + user % 3 for user in range(CLIENTS)]
        found.append([sorted(one.select([i]).tokens.tolist() for i in range(len(one))) for one in clients])
    assert found[0] == found[1]


def test_every_client_is_drawn_by_poisson_with_the_nodes_own_secret(
    assembly: Assembly, tmp_path: Path, drawn: list[list[int]]
) -> None:
    rounds, found = 600, []
    for place in ("a", "b"):
        own, start = settings(tmp_path / place), len(drawn)
        join(assembly, own)
        node = Node.of(own)
        assert node is not None
        sums = [node.contribution(request(assembly, round)) for round in range(1, rounds + 1)]
        assert len(sums) == rounds
        joined = kept(own)
        there = np.zeros((rounds, CLIENTS))
        for round in range(rounds):
            ids = joined.sampler.draw(Poisson(RATE, NUMBER), round + 1).ids
            there[round, ids[ids < CLIENTS]] = 1
        assert drawn[start:] == [np.flatnonzero(row).tolist() for row in there if row.any()]
        found.append(there)
    both = np.hstack(found)  # the same requests, two nodes: 12 independent coins of weight RATE
    assert np.abs(both.mean(axis=0) - RATE).max() < 5 * (RATE * (1 - RATE) / rounds) ** 0.5
    assert np.abs(np.corrcoef(both.T) - np.eye(2 * CLIENTS)).max() < 5 / rounds**0.5


def test_a_release_is_drawn_once_and_another_one_anew(
    assembly: Assembly, tmp_path: Path, drawn: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that is held again before its charge has the same cohort, after it another one."""
    many = settings(tmp_path, data=write(tmp_path / "many.jsonl", of_clients("a", 60, 1)), clients="60")
    assert join(assembly, many) == join(assembly, many, "two") == 60
    asked = request(assembly, clients=60)

    def whom(request: TrainRequest) -> list[int]:
        own_worker.cache_clear()  # as after a restart
        send(request, many)
        return drawn[-1]

    first = whom(asked)
    assert whom(asked) == first
    others = [
        request(assembly, clients=60, **change) for change in ({"attempt": 1}, {"run": "two"}, {"label": "other"})
    ]
    others.append(request(assembly, 2, clients=60))
    assert [whom(other) == first for other in others] == [False, False, False, False]


def test_with_correlated_noise_a_client_keeps_its_turn(
    assembly: Assembly, tmp_path: Path, drawn: list[list[int]]
) -> None:
    own = settings(tmp_path, data=write(tmp_path / "many.jsonl", of_clients("a", 40, 1)), clients="40")
    plan = {"round": PlannedDraws((CyclicPoisson(1.0, 120, "client", 4),), 8)}
    join(assembly, own, plan=plan)
    turns = [CyclicPoisson(1.0, 120, "client", 4, turn) for turn in range(8)]
    for turn, sampling in enumerate(turns):
        send(request(assembly, turn + 1, clients=40, sampling=sampling), own)
    assert drawn[:4] == drawn[4:]
    assert sorted(client for group in drawn[:4] for client in group) == list(range(40))


def test_a_node_that_draws_nobody_sends_zeros(assembly: Assembly, tmp_path: Path, drawn: list[list[int]]) -> None:
    own = settings(tmp_path)
    never = Poisson(1e-9, POPULATION)
    join(assembly, own, plan={"round": PlannedDraws((never,), 1)})
    sent = send(request(assembly, sampling=never), own)
    assert not sent.encoded.any()
    assert drawn == []


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("not joined", "BadMessage", "has not joined the run, or"),
        ("other records", "BadMessage", "joined the run with other clients or records"),
        ("other number", "BadMessage", "joined the run with other clients or records"),
        ("roster", "BadMessage", "the roster of the run has another number"),
        ("no secret", "CorruptRun", "is not what this node kept of the run"),
        ("secret for all", "CorruptRun", "must give no right to group or others"),
        ("one client", "BadMessage", "this node answers requests for sums over clients that it draws itself only"),
        ("no number", "BadMessage", "clients must be a number >= 1"),
        ("no folder", "BadMessage", "needs a folder for the secrets"),
    ],
)
def test_a_node_that_is_not_as_it_joined_sends_nothing(
    what: str, kind: str, says: str, assembly: Assembly, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, asked = settings(tmp_path), request(assembly)
    if what != "not joined":
        join(assembly, own)
        own_worker.cache_clear()
    match what:
        case "other records":  # a client has left
            write(tmp_path / "records.jsonl", of_clients("a", CLIENTS - 1))
        case "other number":
            own["clients"] = str(NUMBER + 1)
        case "roster":
            asked = request(assembly, clients=NUMBER + 1)
        case "no secret":
            next((tmp_path / "state").rglob("sampling.key")).unlink()
        case "secret for all":
            next((tmp_path / "state").rglob("sampling.key")).chmod(0o644)
        case "one client":
            asked = replace(asked, own_draw=None, clients=np.array([1]))
        case "no number":
            del own["clients"]
        case "no folder":
            del own["clients-state"]
    with pytest.raises(NodeFailed, match=f"^{kind}$"):
        app(message=message(asked.to_records(), "train"), context=context(**own))
    assert says in caplog.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clients": str(CLIENTS - 1)}, f"but its records are of {CLIENTS}"),
        ({"clients": "many"}, "clients must be a number >= 1"),
        ({"clients-state": ""}, "needs a folder for the secrets"),
        ({"identity": "x"}, "this node answers requests for secure sums only"),
        ({"epsilon-limit": "2.0"}, "this node answers requests for what it protects by itself only"),
    ],
)
def test_a_node_that_cannot_take_part_joins_no_run(
    change: dict[str, str], says: str, assembly: Assembly, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NodeFailed):
        join(assembly, settings(tmp_path, **change))
    assert says in caplog.text
    assert not (tmp_path / "state").exists()


def test_clients_leave_and_come_between_runs(assembly: Assembly, tmp_path: Path, drawn: list[list[int]]) -> None:
    own = settings(tmp_path)
    join(assembly, own)
    write(tmp_path / "records.jsonl", of_clients("a", CLIENTS + 1))
    own_worker.cache_clear()  # Flower starts a process for every message
    with pytest.raises(NodeFailed):
        join(assembly, own)  # the same run
    everybody = Poisson(1.0, POPULATION)
    assert join(assembly, own, "two", {"round": PlannedDraws((everybody,), 1)}) == NUMBER
    send(request(assembly, run="two", sampling=everybody), own)
    assert drawn == [list(range(CLIENTS + 1))]


Asked = Callable[[Assembly], TrainRequest]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda run: request(run, 2, sampling=Poisson(1.0, POPULATION)), "rate=1.0, .* for 'round' is none of them"),
        (lambda run: request(run, 2, label="votes"), "for 'votes' is none of them"),
        (lambda run: request(run, 2, sampling=CyclicPoisson(RATE, POPULATION, "client", 1, 0)), "is none of them"),
        (
            lambda run: replace(request(run, attempt=1), adapter=run.start.numpy() + 1),
            "round 1, attempt 1, was answered for",
        ),
        (lambda run: request(run, attempt=0), "round 1, attempt 0, comes after a later one was answered"),
        (lambda run: request(run, 3), "a plan of 2 draws for 'round', all answered"),
    ],
    ids=["a higher rate", "another label", "turns", "asked again with another model", "an earlier attempt", "too many"],
)
def test_a_node_answers_the_draws_of_the_plan_it_joined_with(
    asked: Asked,
    says: str,
    assembly: Assembly,
    tmp_path: Path,
    drawn: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = settings(tmp_path)
    join(assembly, own, plan={"round": PlannedDraws((Poisson(RATE, POPULATION),), 2)})
    first = replace(request(assembly, attempt=1), adapter=assembly.start.numpy())
    send(first, own)
    send(first, own)  # as a server that was resumed before it charged the round
    send(request(assembly, 2), own)
    answered = len(drawn)
    with pytest.raises(NodeFailed):
        send(asked(assembly), own)
    assert re.search(says, caplog.text)
    assert len(drawn) == answered


def test_clients_take_turns_in_order(assembly: Assembly, tmp_path: Path, drawn: list[list[int]]) -> None:
    """A server that named a turn again, or one beyond the plan, would ask the same clients too often."""
    own = settings(tmp_path)
    turns = [CyclicPoisson(1.0, POPULATION, "client", 2, turn) for turn in range(5)]
    join(assembly, own, plan={"round": PlannedDraws((CyclicPoisson(1.0, POPULATION, "client", 2),), 4)})
    send(request(assembly, 1, sampling=turns[1]), own)
    for wrong in (turns[1], turns[0], turns[4]):
        with pytest.raises(NodeFailed):
            send(request(assembly, 2, sampling=wrong), own)
    send(request(assembly, 2, sampling=turns[2]), own)


def test_a_plan_that_a_node_joined_with_stands(assembly: Assembly, tmp_path: Path) -> None:
    own = settings(tmp_path)
    join(assembly, own)
    assert join(assembly, own) == NUMBER
    with pytest.raises(NodeFailed):
        join(assembly, own, plan={"round": PlannedDraws((Poisson(1.0, POPULATION),), 600)})


def test_a_damaged_list_of_answered_draws_is_named(assembly: Assembly, tmp_path: Path, drawn: list[list[int]]) -> None:
    own = settings(tmp_path)
    join(assembly, own)
    send(request(assembly), own)
    (file,) = (tmp_path / "state").rglob("drawn.jsonl")
    file.write_text("{}\n")
    node = Node.of(own)
    assert node is not None
    with pytest.raises(CorruptRun, match=re.escape(f"{file} line 1")):
        node.contribution(request(assembly, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clients": 0}, "draw must hold"),
        ({"attempt": -1}, "draw must hold"),
        ({"attempt": True}, "draw must hold"),
        ({"run": 3}, "draw must hold"),
    ],
)
def test_a_draw_of_another_form_is_no_request(change: dict[str, Any], says: str, assembly: Assembly) -> None:
    with pytest.raises(BadMessage, match=says):
        TrainRequest.from_records(request(assembly, **change).to_records())
    named = replace(request(assembly), clients=np.array([1, 2]))
    with pytest.raises(BadMessage, match="must not name any"):
        TrainRequest.from_records(named.to_records())
