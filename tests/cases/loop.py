"""Runs of the server's loop over the in-process grid, with clients of a few lines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client.models.tasks import Metrics
from privacy.clipping.units import Units
from privacy.commitment import Commitment
from privacy.contribution import contribute
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import Noise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from server.config.load import parse
from server.config.schema import RunConfig
from server.network.grid import exchange_messages
from server.run_folder.checkpoint import Stopwatch
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Telemetry, read_metrics
from server.runs.commitment import round_sampling
from server.runs.loop import Loop
from simulations.engines.inprocess import InProcessGrid
from strategies.adapter.layout import AdapterLayout, Entry
from strategies.aggregations.factors import Plain
from strategies.controllers.controller import RunInfo
from strategies.dp_fedavg import DpFedAvg
from strategies.messages.client_update import TrainRequest, contribution_records
from strategies.optimizers.fedavg import FedAvgM

N, RATE = 60, 0.25
LAYOUT = AdapterLayout(
    (
        Entry("q.lora_A.weight", (2, 3), 0, "A", "q"),
        Entry("q.lora_B.weight", (3, 2), 6, "B", "q"),
        Entry("classifier.bias", (2,), 12, "head", "classifier"),
    )
)
DIM = LAYOUT.dim
UPDATES = torch.randn(N, DIM, generator=torch_generator(0, "updates"))


def settings(rounds: int, **changes: Any) -> RunConfig:
    table = {"rounds": rounds, "clients": N, "sampling-rate": RATE, "privacy": {"epsilon": 3.0, "delta": 1e-3}}
    return parse({**table, **changes})


def clients(scale: float = 1.0, fail_in: tuple[int, ...] = (), seen: list[list[int]] | None = None) -> ClientApp:
    """Clients with fixed updates, which vote for bin 14 of the grid; nodes fail in the rounds of ``fail_in``.

    ``seen`` is given the cohort of every round.
    """
    app = ClientApp()
    cohorts: dict[int, list[int]] = {}

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request = TrainRequest.from_records(message.content)
        if request.round in fail_in:
            raise MemoryError("the node is out of memory")
        if seen is not None:
            if request.round not in cohorts:
                cohorts[request.round] = []
                seen.append(cohorts[request.round])
            cohorts[request.round][:] = sorted([*cohorts[request.round], *request.clients.tolist()])
        rows = scale * UPDATES[torch.from_numpy(request.clients)]
        units = Units(rows, votes=torch.full((len(rows),), 14))
        return Message(contribution_records(contribute(units, request.plan), request.round), reply_to=message)

    return app


@dataclass
class Run:
    """One run in a folder of its own; what is not given is the simplest that works."""

    folder: Path
    config: RunConfig
    controller: Any
    noise: Noise | None = None
    app: ClientApp | None = None
    nodes: int = 3
    sampler: CohortSampler | None = None
    floor: Commitment | None = None
    multipliers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.evaluated: list[int] = []

    def strategy(self, ledger: Ledger) -> DpFedAvg:
        sampling = round_sampling(self.config)
        multipliers = self.multipliers or (1.5,) * self.config.rounds
        made = DpFedAvg(
            controller=self.controller,
            optimizer=FedAvgM(momentum=0.5),
            aggregation=Plain(),
            info=RunInfo(self.config.rounds, (LAYOUT.blocks(),), sampling, multipliers),
            layout=LAYOUT,
            ledger=ledger,
            sampler=self.sampler or CohortSampler.insecure_from_seed(3),
            job="{}",
            nodes=self.nodes,
            served_average=0.5,
            noise=self.noise,
            patience=0.0,
        )
        return made

    def evaluate(self, adapter: torch.Tensor, split: str) -> Metrics:
        assert split == "validation"
        if bool(adapter.any()):  # not that of the start
            self.evaluated.append(len(self.evaluated))
        return Metrics(loss=loss_of(adapter), accuracy=0.5, count=10)

    def loop(self, ledger: Ledger, telemetry: Telemetry) -> Loop:
        """The loop of a strategy that was never begun."""
        strategy, grid = self.strategy(ledger), InProcessGrid(self.app or clients(), self.nodes)
        strategy.grid = grid
        strategy.exchange = lambda messages: exchange_messages(grid, messages, 60.0)
        self.last = strategy
        return Loop(
            strategy,
            lambda adapter, split: self.evaluate(adapter, split),
            telemetry,
            self.folder,
            self.config.rounds,
            self.config.privacy.epsilon,
            evaluated=lambda round: round % self.config.evaluation.every == 0 or round == self.config.rounds,
            clock=Stopwatch(),
        )

    def go(self, ledger: Ledger, resume: bool = False) -> str | None:
        with Telemetry(self.folder, tensorboard=False) as telemetry:
            loop = self.loop(ledger, telemetry)
            if resume:
                loop.go_on(torch.zeros(LAYOUT.size))
            else:
                loop.begin(torch.zeros(LAYOUT.size))
            return loop.run()

    @property
    def records(self) -> list[RoundRecord]:
        """Of what was released."""
        return [record for record in read_metrics(self.folder) if record.phase != "start"]

    @property
    def start(self) -> RoundRecord:
        """Of the model that the run started from."""
        first, *rest = read_metrics(self.folder)
        assert first.phase == "start"
        assert all(record.phase != "start" for record in rest)
        return first


def loss_of(adapter: torch.Tensor) -> float:
    """A public loss that every released adapter moves."""
    return float((adapter.double() - 1.0).square().mean())
