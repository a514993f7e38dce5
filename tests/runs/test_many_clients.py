"""Whole runs over nodes with many clients each, in one process: the simulation's sums, no list of clients anywhere."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from client.node import own_worker
from client.node_state.joined import Joined
from client.worker import Worker
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, load, parse
from server.run_folder.round_record import Presence
from server.run_folder.telemetry import read_metrics
from server.runs.assembly import assemble_client_level
from strategies.messages.client_update import TrainRequest
from strategies.messages.dispatch import RoundFailed
from tests.cases import many_clients
from tests.cases.cohorts import threads
from tests.cases.many_clients import Federation, adapter, charges, deployed, drawn, kept, of_clients, roster_of

pytestmark = pytest.mark.usefixtures("signing")

NUMBERS = [7, 5, 9]


class Killed(BaseException):
    """The server's process ends here."""


@pytest.mark.parametrize(
    ("numbers", "rate", "chat"),
    [
        pytest.param(NUMBERS, 0.5, False, id="notes"),
        pytest.param(NUMBERS, 0.5, True, id="conversations"),
        pytest.param([3000, 3000, 3000], 0.02, False, id="thousands", marks=pytest.mark.nightly),
    ],
)
def test_three_nodes_make_the_adapter_that_the_simulation_makes(
    numbers: list[int], rate: float, chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [of_clients(node, number, chat=chat) for node, number in zip("abc", numbers, strict=True)]
    run, text = tmp_path / "run", deployed(tmp_path, numbers, rate, chat=chat).replace("delta = 1e-3", "delta = 1e-5")
    with threads(2):  # as a node starts; a simulation's workers have one
        Federation(tmp_path, nodes, numbers).go(run, text)
        assert torch.get_num_threads() == 1, "or a client's row depends on the others that are computed with it"
    assert roster_of(run) == {"nodes": [1, 2, 3], "clients": numbers}
    joined, config = kept(tmp_path, (1, 2, 3)), load(run / "config.toml")
    same = many_clients.simulated(tmp_path, config, nodes, joined, monkeypatch)
    with Ledger.open(run / "ledger.jsonl", read_only=True) as ledger, Ledger.open(same / "ledger.jsonl") as other:
        assert [charge.event for charge in ledger.charges] == [charge.event for charge in other.charges]
        assert ledger.commitment == other.commitment
        assert ledger.commitment.population == sum(numbers)
    ours, theirs = adapter(run), adapter(same)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(float(values.abs().max()) > 0 for name, values in ours.items() if "lora_B" in name)
    statement = json.loads((run / "privacy.json").read_text())
    assert statement["nodes"]["clients"] == numbers


def test_a_run_that_is_resumed_draws_the_same_clients_and_says_what_one_node_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that failed before its charge is held again with its cohort; one lost after it, with another."""
    numbers = [30, 28, 36]  # of whom no node draws nobody, as fewer would now and then
    nodes, run = [of_clients(node, number) for node, number in zip("abc", numbers, strict=True)], tmp_path / "run"
    grid, trained = Federation(tmp_path, nodes, numbers), list[list[int]]()
    contribution = Worker.contribution

    def remember(self: Worker, request: TrainRequest) -> Any:
        trained.append(request.clients.tolist())
        return contribution(self, request)

    monkeypatch.setattr(Worker, "contribution", remember)
    for stage in ("before", "after"):
        with monkeypatch.context() as patch:
            real = Ledger.charge

            def die(self: Ledger, event: Any, stage: str = stage, real: Any = real) -> Any:
                if stage == "after":
                    real(self, event)
                raise Killed

            patch.setattr(Ledger, "charge", die)
            with pytest.raises(Killed):
                grid.go(run, "" if run.exists() else deployed(tmp_path, numbers, privacy=""))
    assert charges(run) == 1
    joined = kept(tmp_path, (1, 2, 3))
    grid.go(run)
    first, again, third = trained[:3], trained[3:6], trained[6:9]
    assert first == again == each_drawn(joined, 0)
    assert third == each_drawn(joined, 1) != first
    assert charges(run) == 2
    assert kept(tmp_path, (1, 2, 3))[0].seed == joined[0].seed
    presences = [record.presence for record in read_metrics(run) if record.phase == "round"]
    assert presences == [Presence(3, 3)]
    statement = json.loads((run / "privacy.json").read_text())
    assert statement["private"]
    assert statement["population"] == sum(numbers)
    assert statement["nodes"] == {"clients": numbers, "one_node_moves_a_mean_by": 0.77}  # 36 / (0.5 x 94)
    assert "and the node that holds the client's records" in statement["sentence"]
    assert any("up to 0.77 clipping bounds" in text for text in statement["not_covered"])
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b"of user" not in written  # no record, and no name, in what the run leaves behind
    assert b"a-00001" not in written
    assert not (run / "sampling.key").exists()


def each_drawn(joined: list[Joined], attempt: int) -> list[list[int]]:
    return [drawn([one], 1, 0.5, attempt).tolist() for one in joined]


def test_numbers_that_are_not_the_population_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    nodes, run = [of_clients(node, number) for node, number in zip("abc", NUMBERS, strict=True)], tmp_path / "run"
    grid = Federation(tmp_path, nodes, NUMBERS)
    with pytest.raises(ConfigError, match=r"clients = 22, but the nodes have 21 \(node 1 has 7, node 2 has 5, node 3"):
        grid.go(run, deployed(tmp_path, [7, 5, 10], privacy=""))
    assert charges(run) == 0


def test_a_node_with_more_clients_than_it_says_joins_no_run(tmp_path: Path) -> None:
    nodes, run = [of_clients(node, number) for node, number in zip("abc", NUMBERS, strict=True)], tmp_path / "run"
    grid = Federation(tmp_path, nodes, [7, 4, 9])
    with pytest.raises(RoundFailed, match=r"not every node joined .* node 2: the client's code raised an exception"):
        grid.go(run, deployed(tmp_path, [7, 4, 9], privacy=""))
    assert charges(run) == 0
    assert "clients" not in roster_of(run)


def test_one_who_leaves_within_a_run_takes_the_node_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run goes on with the other nodes, at the same divisor."""
    nodes, run = [of_clients(node, number) for node, number in zip("abc", NUMBERS, strict=True)], tmp_path / "run"
    grid, refused = Federation(tmp_path, nodes, NUMBERS), []
    answer = grid._answer

    def leave(message: Any) -> Any:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 2:
            many_clients.write(tmp_path / "own-2" / "records.jsonl", nodes[1][:-1])
            own_worker.cache_clear()
        reply = answer(message)
        refused.extend([message.metadata.dst_node_id] if reply.has_error() else [])
        return reply

    monkeypatch.setattr(grid, "_answer", leave)
    grid.go(run, deployed(tmp_path, NUMBERS, privacy=""))
    assert refused == [2, 2]
    assert charges(run) == 2


def test_ranks_by_clients_are_refused(tmp_path: Path) -> None:
    text = deployed(tmp_path, NUMBERS, privacy="").replace("[model]", 'aggregation = "zero-pad"\n[model]')
    with pytest.raises(ConfigError, match="'zero-pad' gives clients ranks by their ids"):
        assemble_client_level(parse(tomllib.loads(text)))
