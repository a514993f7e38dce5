"""The server's loop, resumed: which cohorts it draws, what TensorBoard shows, which checkpoints it refuses."""

from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from privacy.commitment import Commitment, FloorStep
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.sampling import CohortSampler
from server.run_folder.checkpoint import load_checkpoint
from server.run_folder.telemetry import Telemetry
from server.runs.commitment import round_sampling
from strategies.controllers.controller import PublicSignals
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.dp_fedavg import DpFedAvg
from tests.cases.loop import LAYOUT, N, Run, clients, settings
from tests.cases.runs import MakeRun

ROUNDS = 4


class Crash(BaseException):
    """What kill -9 would do, at a place of our choice."""


class Dying(InsecureZeroNoise):
    """Noise whose process dies before it is drawn another time."""

    def __init__(self, draws: int) -> None:
        self.left = draws

    def draw(self, *arguments: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise Crash
        return super().draw(*arguments)


def begun(run: Run, ledger: Ledger) -> DpFedAvg:
    strategy = run.strategy(ledger)
    strategy.begin(torch.zeros(LAYOUT.size), PublicSignals(0, 1.0))
    return strategy


def broken_off(run: Run, ledger: Ledger, draws: int) -> None:
    """Die in the release behind so many; it is charged."""
    run.noise = Dying(draws)
    with pytest.raises(Crash):
        run.go(ledger)
    ledger.close()
    run.noise = InsecureZeroNoise()


@pytest.mark.parametrize("died_in", [0, 2])
def test_a_lost_release_is_made_again_from_another_cohort(died_in: int, start: MakeRun) -> None:
    """And the rounds after it have the cohorts they would have had."""
    cohorts: list[list[int]] = []
    whole, ledger = start("whole", settings(ROUNDS), DpLac(), noise=InsecureZeroNoise(), app=clients(seen=cohorts))
    assert whole.go(ledger) is None
    again: list[list[int]] = []
    sampling = round_sampling(settings(ROUNDS))
    steps = (FloorStep("histogram", sampling, 0.0, 2), FloorStep("round", sampling, 0.0, ROUNDS + 1))  # one more each
    floor = Commitment("client", "add_remove", N, 3.0, 1e-3, floor=steps, not_private="a test without a budget")
    broken, ledger = start("broken", settings(ROUNDS), DpLac(), floor=floor)
    broken_off(broken, ledger, died_in)
    broken.app = clients(seen=again)
    with Ledger.open(broken.folder / "ledger.jsonl") as ledger:
        assert broken.go(ledger, resume=True) is None
        assert [event.round for event in ledger.events] == sorted([*range(ROUNDS + 1), died_in])
    second = CohortSampler.insecure_from_seed(3).draw(
        sampling, died_in, attempt=1, label="round" if died_in else "histogram"
    )
    assert again[0] == second.ids.tolist() != cohorts[died_in]
    assert again[1:] == cohorts[died_in + 1 :]


def test_tensorboard_shows_every_round_once(start: MakeRun) -> None:
    run, ledger = start("run", settings(3), Fixed(0.5))
    broken_off(run, ledger, 2)
    (run.folder / "metrics.jsonl").open("a").write('{"phase": "round", "rou')  # and the disk kept half a line
    with Ledger.open(run.folder / "ledger.jsonl") as ledger, Telemetry(run.folder) as telemetry:
        run.loop(ledger, telemetry).go_on(torch.zeros(LAYOUT.size))
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("validation/loss")] == [0, 1, 2]
    assert [record.round for record in run.records] == [1, 2]


def test_a_checkpoint_whose_release_the_ledger_does_not_know_is_refused(start: MakeRun) -> None:
    run, ledger = start("run", settings(3), Fixed(0.5), noise=InsecureZeroNoise())
    run.go(ledger)
    other, foreign = start("other", settings(3), Fixed(0.5), noise=InsecureZeroNoise())
    strategy = begun(other, foreign)
    assert strategy.state is not None
    checkpoint = load_checkpoint(run.folder, strategy.state)
    with pytest.raises(CorruptRun, match="'round' of round 3"):
        strategy.restore(checkpoint.state, checkpoint.update, checkpoint.answers)
    own = begun(run, ledger)
    with pytest.raises(CorruptRun, match="do not have the form"):
        own.restore(checkpoint.state, checkpoint.update.double(), checkpoint.answers)  # type: ignore[union-attr]
