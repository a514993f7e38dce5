"""Deployed nodes that protect their own records: ledgers in their own folders, limits of their operators."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import server.app
import server.runs.sites
from client.app import app as client_app
from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError
from server.run_folder.errors import CannotResume
from server.run_folder.names import CLIENTS_FILE
from server.run_folder.progress import Progress, SiteGuarantee, hold_folder, load_progress, save_progress
from server.run_folder.resume import check_resumable, read_resumed
from server.run_folder.round_record import Presence
from server.run_folder.telemetry import read_metrics, read_status
from simulations.engines.inprocess import InProcessGrid, identity
from simulations.report.judgement import judgements
from simulations.report.read_run import read_run
from simulations.tools.sample_records import write_records
from strategies.adapter.residual import residual_size
from strategies.messages.dispatch import RoundFailed
from strategies.sites import GlobalModel
from tests.cases.deployed import deployed_settings
from tests.cases.instructions import server as signer

pytestmark = pytest.mark.usefixtures("signing")

STEPS, ROUNDS = 2, 2
SETTINGS = (
    deployed_settings(clients=3, privacy='unit = "{unit}"\nepsilon = 4.0\ndelta = 1e-3')
    + """
unit-column = "patient"
[site]
steps = {steps}
batch-size = 8
"""
)
IN_SPAN = (
    SETTINGS.replace('name = "random:bert"', 'name = "random:llama"\ntask = "causal-lm"\ntargets = "q_proj,v_proj"')
    + """
[site.span]
method = "coefficients"
samples = 6
openings = "Notes: |A patient"
"""
)


class Grid(InProcessGrid):
    """The connection is lost behind the answers of a round, where one is named."""

    lost_in: int | None = None
    rounds = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = super().pull_messages(message_ids)
        self.rounds += 1
        if self.rounds == self.lost_in:
            raise OSError("the host is gone")
        return replies


@dataclass
class Nodes:
    """Three nodes with records of their own, and runs of them."""

    folder: Path
    unit: str
    settings: str = SETTINGS
    steps: int = STEPS
    grid: Grid = field(default_factory=lambda: Grid(client_app, 3))

    def __post_init__(self) -> None:
        for (node, context), path in zip(self.grid.contexts.items(), write_records(self.folder, 3, 64), strict=True):
            context.node_config = {"data": f"jsonl:{path}", "cache": str(self.folder / f"own-{node}")}
            context.node_config["authority"] = signer().authority

    def set(self, node: int, **settings: str | float) -> None:
        config = self.grid.contexts[node].node_config
        config |= {name.replace("_", "-"): value for name, value in settings.items()}

    def run(self, name: str, *, resume: bool = False) -> Path:
        folder = self.folder / name
        text = self.settings.format(rounds=ROUNDS, steps=self.steps, unit=self.unit, folder=self.folder)
        (self.folder / "run.toml").write_text(text)
        keys: dict[str, Any] = {"config-file": str(self.folder / "run.toml"), "run-folder": str(folder)}
        if resume:
            keys = {"resume": str(folder)}
        with identity(0):
            server.app.app(grid=self.grid, context=Context(1, 0, {}, RecordDict(), keys))
        return folder


@pytest.mark.parametrize(("unit", "told"), [("record", "record"), ("group", "group:patient")])
def test_every_node_keeps_a_ledger_of_its_own_and_its_operators_limit_holds(
    unit: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(tmp_path, unit)
    for node in (1, 2, 3):
        nodes.set(node, site_state=str(tmp_path / f"{node}"), epsilon_limit=3.9 if node == 2 else 4.0)
    with caplog.at_level(logging.WARNING):
        folder = nodes.run("first")
    status = read_status(folder)
    assert status is not None
    assert status.state == "completed"
    assert [record.round for record in read_metrics(folder)] == [0, 1, 2]
    assert not (tmp_path / "2").exists()  # refused before anything was written
    assert "guarantees an epsilon of at most 3.9" in caplog.text
    said = "site 1 (node 2): this site guarantees an epsilon of at most 3.9"
    assert [record.presence for record in read_metrics(folder)[1:]] == [Presence(3, 3, 2, said)] * ROUNDS
    assert not any(record.presence.is_complete for record in read_metrics(folder)[1:] if record.presence)
    for node in (1, 3):
        with Ledger.open(tmp_path / str(node) / "ledger.jsonl", read_only=True) as ledger:
            assert ledger.commitment.unit == told
            assert len(ledger.charges) == ROUNDS * STEPS
            assert 0 < ledger.epsilon_guaranteed() <= 4.0
    assert json.loads((folder / "privacy.json").read_text())["epsilon"] <= 4.0
    with pytest.raises(RoundFailed, match=r"site 0: .*spent.*site 1: .*3.9"):
        nodes.run("second")  # nothing is left of the promise
    with Ledger.open(tmp_path / "1" / "ledger.jsonl", read_only=True) as ledger:
        assert len(ledger.charges) == ROUNDS * STEPS


def test_nodes_send_coefficients_of_texts_that_the_server_wrote(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "record", IN_SPAN, steps=1)
    for node in (1, 2, 3):
        nodes.set(node, site_state=str(tmp_path / f"{node}"))
    sizes = []
    take = server.runs.sites.SiteReply.from_records

    def read(content: RecordDict, round: int, size: int, steps: int) -> Any:
        sizes.append((size, len(content.array_records["arrays"]["update"].data)))
        return take(content, round, size, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.runs.sites.SiteReply, "from_records", read)
        folder = nodes.run("first")
    status = read_status(folder)
    assert status is not None
    assert status.state == "completed"
    assert [size for size, _ in sizes] == [6] * 3 * ROUNDS
    assert max(length for _, length in sizes) < 200, "24 bytes of coefficients and a header"
    for node in (1, 2, 3):
        with Ledger.open(tmp_path / str(node) / "ledger.jsonl", read_only=True) as ledger:
            assert [event.components[0].dim for event in ledger.events] == [6] * ROUNDS


@pytest.fixture
def of_records(tmp_path: Path) -> Nodes:
    nodes = Nodes(tmp_path, "record")
    for node in (1, 2, 3):
        nodes.set(node, site_state=str(tmp_path / f"{node}"))
    return nodes


def test_an_interrupted_run_goes_on_with_its_nodes_and_ends_when_their_budgets_are_spent(of_records: Nodes) -> None:
    """The second round of two is lost behind the sites' steps, so that none is left."""
    of_records.grid.lost_in = 2
    with pytest.raises(OSError, match="gone"):
        of_records.run("first")
    folder = of_records.folder / "first"
    assert [record.round for record in read_metrics(folder)] == [0, 1]
    assert check_resumable(folder).clients == 3
    with hold_folder(folder), pytest.raises(CannotResume, match="still running"):
        of_records.run("first", resume=True)
    of_records.run("first", resume=True)
    status = read_status(folder)
    assert status is not None
    assert status.state == "stopped-budget"
    assert "site 2: this site's budget is spent" in status.message
    assert json.loads((folder / "results.json").read_text())["stopped"] == status.message
    assert [record.round for record in read_metrics(folder)] == [0, 1, 2]
    assert [resumed.round for resumed in read_resumed(folder)] == [1]
    for node in (1, 2, 3):
        with Ledger.open(of_records.folder / str(node) / "ledger.jsonl", read_only=True) as ledger:
            assert len(ledger.charges) == ROUNDS * STEPS
    with pytest.raises(ConfigError, match="already holds a run"):
        of_records.run("first")
    assert read_status(folder) == status


def test_a_site_that_is_missing_is_named_with_the_reason(of_records: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, folder = of_records.grid, of_records.folder / "first"
    folder.mkdir()
    (folder / CLIENTS_FILE).write_text(json.dumps({"2": "clinic", "3": "ward\x1b[31m"}))
    answer = grid._answer

    def changed(message: Message) -> Message:
        reply = answer(message)
        if message.metadata.dst_node_id == 2:
            reply.content["config"]["code"] = "other"
        return reply

    monkeypatch.setattr(grid, "_answer", changed)
    of_records.run("first")
    presence = read_metrics(folder)[1].presence
    assert presence is not None
    said = "2 of 3 contributed; site 1 (clinic): its reply was refused: site runs other code than the server"
    assert presence.text == said
    assert f"2 of 2 rounds went without some of the clients, the last of them round 2: {said}." in judgements(
        read_run(folder)
    )


def test_a_damaged_checkpoint_is_named(of_records: Nodes) -> None:
    folder = of_records.folder
    layout = adapter_layout(load_base("random:bert", "classification", 2)[0], LoraSpec(2, 4.0, ("query",)))
    wider = adapter_layout(load_base("random:bert", "classification", 2)[0], LoraSpec(3, 4.0, ("query",)))
    for residual in (None, torch.ones(residual_size(layout))):
        model = GlobalModel(torch.zeros(layout.size), residual)
        progress = Progress(model, 1, {0: SiteGuarantee(1.5, 20, 0.7)}, 4, {1: "spent"}, 2.5)
        assert progress.summary() == "1 rounds done; 1 took no step: site 1: spent"
        save_progress(folder, progress)
        again = load_progress(folder, layout)
        assert torch.equal(again.model.adapter, torch.zeros(layout.size))
        assert (again.model.residual is None) == (residual is None)
        assert residual is None or torch.equal(again.model.residual, residual)
        assert (again.round, again.sites, again.steps) == (1, {0: SiteGuarantee(1.5, 20, 0.7)}, 4)
        assert (again.refusals, again.seconds) == ({1: "spent"}, 2.5)
    with pytest.raises(CorruptRun, match=f"this run has {wider.size} values"):
        load_progress(folder, wider)
    save_progress(folder, Progress(GlobalModel(torch.zeros(layout.size), torch.ones(5))))
    with pytest.raises(CorruptRun, match="residual must have"):
        load_progress(folder, layout)
    (folder / "silos.safetensors").write_bytes(b"no such thing")
    with pytest.raises(CorruptRun, match="is not of this run"):
        load_progress(folder, layout)


def test_sites_that_fail_fail_the_run_instead_of_training_on_nothing(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "record")
    nodes.set(3, site_state=str(tmp_path / "3"))  # the others were not told where to keep a ledger
    with pytest.raises(RoundFailed, match="1 of 3 sites answered soundly"):
        nodes.run("first")
