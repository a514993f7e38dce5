"""A run that dies at any step of a round goes on: same sums and plans, no line lost or doubled, no charge forgotten."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from privacy.commitment import Commitment, FloorStep
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.sampling import CohortSampler
from server.run_folder.checkpoint import load_checkpoint
from server.run_folder.telemetry import Telemetry, read_metrics
from server.runs import loop
from server.runs.commitment import round_sampling
from strategies.controllers.controller import PublicSignals
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.dispatch import RoundFailed
from strategies.dp_fedavg import DpFedAvg
from tests.cases.loop import LAYOUT, N, Run, clients, everything, settings
from tests.cases.runs import MakeRun

ROUNDS = 4


class Crash(BaseException):
    """What kill -9 would do, at a place of our choice."""


class Dying(InsecureZeroNoise):
    """Noise whose process dies before it is drawn."""

    def draw(self, *arguments: Any) -> torch.Tensor:
        raise Crash


PLACES: dict[str, tuple[Any, str, bool]] = {
    "before the cohort": (DpFedAvg, "_messages", False),
    "after the messages": (DpFedAvg, "_messages", True),
    "before the sum": (DpFedAvg, "_opened", False),
    "before the charge": (Ledger, "charge", False),
    "after the charge": (Ledger, "charge", True),
    "before the release is noted": (Ledger, "released", False),
    "after the release is noted": (Ledger, "released", True),
    "before the checkpoint": (loop, "save_checkpoint", False),
    "after the checkpoint": (loop, "save_checkpoint", True),
    "before the evaluation": (Run, "evaluate", False),
    "after the evaluation": (Run, "evaluate", True),
    "before the controller": (DpFedAvg, "observe", False),
    "after the controller": (DpFedAvg, "observe", True),
    "before the record": (Telemetry, "round", False),
    "after the record": (Telemetry, "round", True),
}
LOST = {
    "after the charge",
    "before the release is noted",
    "after the release is noted",
    "before the checkpoint",
}
"""Between the charge and the checkpoint: the release is gone with the process, and its charge stands."""


def dying(patch: pytest.MonkeyPatch, place: str, call: int) -> None:
    """Die at the ``call``-th time (from 0) that ``place`` is reached."""
    owner, name, late = PLACES[place]
    real: Callable[..., Any] = getattr(owner, name)
    count = [0]

    def step(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] <= call:
            return real(*arguments, **named)
        if late:
            real(*arguments, **named)
        raise Crash

    patch.setattr(owner, name, step)


def begun(run: Run, ledger: Ledger) -> DpFedAvg:
    strategy = run.strategy(ledger)
    strategy.begin(torch.zeros(LAYOUT.size), PublicSignals(0, 1.0))
    return strategy


def broken_off(run: Run, ledger: Ledger, place: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        dying(patch, place, call)
        with pytest.raises(Crash):
            run.go(ledger)
    ledger.close()


@pytest.mark.parametrize(
    ("place", "call"),
    [
        *((place, 2) for place in PLACES),
        ("after the charge", 0),
        ("after the checkpoint", 0),
        ("after the checkpoint", 1),
        ("before the charge", 0),
    ],
)
def test_a_run_that_dies_anywhere_goes_on_as_if_nothing_had_happened(
    place: str, call: int, start: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise and with cohorts from a seed, bit for bit; a lost release is made again from another cohort."""
    cohorts: list[list[int]] = []
    whole, ledger = start("whole", settings(ROUNDS), DpLac(), noise=InsecureZeroNoise(), app=clients(seen=cohorts))
    assert whole.go(ledger) is None
    again: list[list[int]] = []
    sampling = round_sampling(settings(ROUNDS))
    steps = (FloorStep("histogram", sampling, 0.0, 2), FloorStep("round", sampling, 0.0, ROUNDS + 1))  # one more each
    floor = Commitment("client", "add_remove", N, 3.0, 1e-3, floor=steps, not_private="a test without a budget")
    broken, ledger = start("broken", settings(ROUNDS), DpLac(), noise=InsecureZeroNoise(), floor=floor)
    broken_off(broken, ledger, place, call, monkeypatch)
    charged_before = len(Ledger.open(broken.folder / "ledger.jsonl", read_only=True).charges)
    broken.app = clients(seen=again)
    with Ledger.open(broken.folder / "ledger.jsonl") as ledger:
        assert broken.go(ledger, resume=True) is None
        rounds = [event.round for event in ledger.events]
        lost = [charge.event.round for charge in ledger.charges if charge.released_at is None]
    told = [(record.phase, record.round) for record in read_metrics(broken.folder)]
    lines = (broken.folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(told) == ROUNDS + 1, "no line is lost, none is doubled"
    assert told == [(record.phase, record.round) for record in whole.records]
    if place in LOST:
        died_in = charged_before - 1
        assert rounds == sorted([*range(ROUNDS + 1), died_in]), "the lost release is charged again"
        assert lost in ([], [died_in])
        sampler = CohortSampler.insecure_from_seed(3)
        assert again[1:] == cohorts[died_in + 1 :], "the rounds after it have the cohorts they would have had"
        second = sampler.draw(sampling, died_in, attempt=1, label="round" if died_in else "histogram")
        assert again[0] == second.tolist() != cohorts[died_in]
    else:
        assert rounds == list(range(ROUNDS + 1))
        assert lost == []
        assert everything(broken) == everything(whole)


def test_a_charge_whose_noise_was_never_drawn_stands(start: MakeRun) -> None:
    run, ledger = start("run", settings(3), Fixed(0.5), noise=Dying())
    with pytest.raises(Crash):
        run.go(ledger)
    ledger.close()
    run.noise = InsecureZeroNoise()
    with Ledger.open(run.folder / "ledger.jsonl") as ledger:
        assert "used" in str(run.go(ledger, resume=True))
        assert [(charge.event.round, charge.released_at is None) for charge in ledger.charges] == [
            (1, True),
            (1, False),
            (2, False),
        ]
    assert [record.round for record in run.records] == [1, 2]


def test_a_broken_run_fits_its_budget_with_real_noise(start: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every release the run lost shortens it by one round: it stops at its budget, with all that it released."""
    floor = (FloorStep("round", round_sampling(settings(1)), 1.5, 6),)
    commitment = Commitment("client", "add_remove", N, 50.0, 1e-3, floor=floor)
    run, ledger = start("run", settings(6), Fixed(0.5), sampler=CohortSampler.fresh(), floor=commitment)
    epsilon = ledger.guaranteed()
    broken_off(run, ledger, "before the checkpoint", 1, monkeypatch)  # the first save is that of the beginning
    with Ledger.open(run.folder / "ledger.jsonl") as ledger:
        with monkeypatch.context() as patch:
            dying(patch, "after the charge", 2)
            with pytest.raises(Crash):
                run.go(ledger, resume=True)
    with Ledger.open(run.folder / "ledger.jsonl") as ledger:
        assert "used" in str(run.go(ledger, resume=True))
        assert len(ledger.charges) == 6
        assert ledger.spent() <= ledger.guaranteed() == epsilon
    assert [record.round for record in run.records] == [1, 2, 3, 4]
    assert run.last.state is not None
    assert run.last.state.round == 4


def test_an_evaluation_that_fails_after_the_release_loses_no_round(
    start: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, ledger = start("whole", settings(ROUNDS), DpLac(), noise=InsecureZeroNoise())
    whole.go(ledger)
    run, ledger = start("run", settings(ROUNDS), DpLac(), noise=InsecureZeroNoise())

    def fail(adapter: torch.Tensor, split: str, evaluate: Any = run.evaluate) -> Any:
        if not bool(adapter.any()):  # the start, before any release
            return evaluate(adapter, split)
        raise RoundFailed("evaluation on validation: 0 of 3 workers answered")

    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate", fail)
        with pytest.raises(RoundFailed):
            run.go(ledger)
    ledger.close()
    assert [record.phase for record in run.records] == ["histogram"]
    with Ledger.open(run.folder / "ledger.jsonl") as ledger:
        assert run.go(ledger, resume=True) is None
        assert len(ledger.charges) == ROUNDS + 1
    assert everything(run) == everything(whole)


def test_noise_of_a_round_that_is_held_again_is_fresh(start: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """T3: two releases of one round differ by more than their cohorts do; noise is drawn, not remembered."""
    updates = []
    floor = (FloorStep("round", round_sampling(settings(1)), 1.5, 3),)
    commitment = Commitment("client", "add_remove", N, 50.0, 1e-3, floor=floor)
    run, ledger = start(
        "run", settings(1), Fixed(1e-3), sampler=CohortSampler.fresh(), floor=commitment, app=clients(0.0)
    )
    broken_off(run, ledger, "after the checkpoint", 1, monkeypatch)  # the first one is that of the beginning
    template = begun(run, Ledger.open(run.folder / "ledger.jsonl", read_only=True)).state
    assert template is not None
    first = load_checkpoint(run.folder, template)
    for _ in range(2):
        with Ledger.open(run.folder / "ledger.jsonl") as ledger:
            run.go(ledger)  # begins anew: round 1 is held again, and charged again
            assert run.last.release is not None
            updates.append(run.last.release.update)
    assert first.update is not None
    for one, other in ((first.update, updates[0]), (updates[0], updates[1])):
        assert not torch.equal(one, other)
        assert float(torch.nn.functional.cosine_similarity(one, other, dim=0)) < 0.999


def test_tensorboard_shows_every_round_once(start: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ledger = start("run", settings(3), Fixed(0.5), noise=InsecureZeroNoise())
    broken_off(run, ledger, "before the record", 2, monkeypatch)
    (run.folder / "metrics.jsonl").open("a").write('{"phase": "round", "rou')  # and the disk kept half a line
    with Ledger.open(run.folder / "ledger.jsonl") as ledger, Telemetry(run.folder) as telemetry:
        run.loop(ledger, telemetry).go_on(torch.zeros(LAYOUT.size))
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("validation/loss")] == [1, 2, 3]
    assert [record.round for record in run.records] == [1, 2, 3]


def test_a_checkpoint_whose_release_the_ledger_does_not_know_is_refused(
    start: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from privacy.errors import CorruptRun

    run, ledger = start("run", settings(3), Fixed(0.5), noise=InsecureZeroNoise())
    run.go(ledger)
    other, foreign = start("other", settings(3), Fixed(0.5), noise=InsecureZeroNoise())
    strategy = begun(other, foreign)
    assert strategy.state is not None
    checkpoint = load_checkpoint(run.folder, strategy.state)
    with pytest.raises(CorruptRun, match="the ledger knows of no release 'round' of round 3"):
        strategy.restore(checkpoint.state, checkpoint.update, checkpoint.answers)
    own = begun(run, ledger)
    with pytest.raises(CorruptRun, match="do not have the form"):
        own.restore(checkpoint.state, checkpoint.update.double(), checkpoint.answers)  # type: ignore[union-attr]
