"""The rounds of a run over the in-process grid: what they record, where they stop, and how they go on."""

import json
import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from privacy.clipping.norms import FlatClip, PerAdapterClip
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import Plan
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import InsecureSeededNoise, InsecureZeroNoise
from privacy.randomness.sampling import CohortSampler
from server.run_folder.checkpoint import load_checkpoint
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Telemetry
from server.runs.commitment import commit_clients, round_sampling
from strategies.controllers.controller import RunInfo
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.controllers.loss_following import GRID
from strategies.messages.dispatch import RoundFailed
from tests.cases.loop import DIM, LAYOUT, RATE, N, clients, loss_of, settings
from tests.cases.runs import MakeRun

# --- a whole run --------------------------------------------------------------------------------------------------


def test_a_private_run_spends_its_budget_round_by_round(start: MakeRun) -> None:
    config, controller = settings(3), DpLac()
    commitment, multipliers = commit_clients(config, controller)
    run, ledger = start(
        "run", config, controller, sampler=CohortSampler.create(), floor=commitment, multipliers=multipliers
    )
    assert run.go(ledger) is None
    assert [(record.phase, record.round) for record in run.records] == [
        ("histogram", 0),
        ("round", 1),
        ("round", 2),
        ("round", 3),
    ]
    spent = [record.epsilon_spent for record in run.records]
    assert all(before < after for before, after in pairwise(spent))
    assert 0 < spent[0]
    assert 0.95 * 3.0 < spent[-1] == ledger.epsilon_spent() <= 3.0
    assert all(record.not_private is None for record in run.records)
    assert [charge.released_at is not None for charge in ledger.charges] == [True] * 4
    assert run.evaluated == [0, 1, 2]
    ratios = []
    for record in run.records[1:]:
        assert record.noise_multiplier == multipliers[0]
        assert record.noise_norm is not None
        assert record.update_norm is not None
        ratios.append(record.update_norm / record.noise_norm)
    # Releases that are nearly all noise have about its norm; 42 values of it are not, once in 10^7 runs.
    assert 0.4 < math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios)) < 3.0


def test_records_hold_released_and_public_values_and_nothing_else(start: MakeRun) -> None:
    run, ledger = start("run", settings(3), DpLac(), noise=InsecureSeededNoise(1))
    run.go(ledger)
    histogram, *rounds = run.records
    assert histogram.update_norm is histogram.noise_norm is histogram.signal_estimate is histogram.clip_bound is None
    assert histogram.validation_loss is histogram.validation_accuracy is None
    assert histogram.noise_multiplier == 2.0
    votes = [histogram.extra[f"vote-{place}"] for place in range(1, len(GRID) + 1)]
    assert histogram.extra.keys() == {"clip-bound", *(f"vote-{place}" for place in range(1, len(GRID) + 1))}
    assert histogram.extra["clip-bound"] == GRID[14] == GRID[votes.index(max(votes))]
    bound = GRID[14]
    for record in rounds:
        assert record.clip_bound == bound
        assert record.noise_norm == pytest.approx(1.5 * bound * math.sqrt(DIM) / (RATE * N), rel=1e-12)
        assert record.update_norm is not None
        assert record.signal_estimate == pytest.approx(math.sqrt(max(record.update_norm**2 - record.noise_norm**2, 0)))
        assert record.expected_cohort == RATE * N
        assert record.validation_loss is not None
        bound = record.extra["clip-bound"]  # the threshold of the next round
    assert rounds[-1].update_norm == pytest.approx(float(run.last.release.update.norm()), rel=1e-6)  # type: ignore[union-attr]
    assert rounds[-1].validation_loss == loss_of(run.last.state.served)  # type: ignore[union-attr]


def test_the_model_before_the_first_release_is_recorded(start: MakeRun) -> None:
    run, ledger = start("run", settings(2), Fixed(0.5))
    run.go(ledger)
    assert (run.start.round, run.start.rounds, run.start.epsilon_spent) == (0, 2, 0.0)
    assert run.start.validation_loss == loss_of(torch.zeros(LAYOUT.size))
    assert run.start.noise_multiplier == run.start.expected_cohort == 0.0


def test_what_is_clipped_away_shows_nowhere(start: MakeRun) -> None:
    """Updates 1024 times as large are the same after clipping, so every file of the run is the same but for times."""
    files = []
    for name, scale, nodes in (("small", 1.0, 3), ("large", 1024.0, 3), ("other nodes", 1024.0, 7)):
        run, ledger = start(
            name, settings(3), Fixed(0.1), noise=InsecureSeededNoise(1), app=clients(scale), nodes=nodes
        )
        run.go(ledger)
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        found = {field.name for field in fields(RoundRecord)} - {"seconds"}
        unasked = {name for name in found if name.startswith(("validation_confusion", "validation_tokens"))}
        assert {key for line in lines for key in line} == found - unasked
        state = (run.folder / "checkpoint" / "state.safetensors").read_bytes()
        charges = [charge.event.to_json() for charge in ledger.charges]
        files.append((lines, state, charges))
    assert files[0] == files[1] == files[2]


@dataclass(frozen=True)
class PerAdapter(Fixed):
    """Fixed thresholds, one per block."""

    bounds: ClassVar[tuple[float, ...]] = (0.5, 0.1)

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(PerAdapterClip(self.bounds, info.blocks(round)), info.noise_multiplier(round))


def test_the_norm_of_noise_under_per_adapter_clipping(start: MakeRun) -> None:
    run, ledger = start("run", settings(1), PerAdapter(), noise=InsecureZeroNoise())
    run.go(ledger)
    (record,) = run.records
    sizes = LAYOUT.blocks()
    total = sum(c * math.sqrt(d) for c, d in zip(PerAdapter.bounds, sizes, strict=True))
    stds = [1.5 * math.sqrt(total * c / math.sqrt(d)) for c, d in zip(PerAdapter.bounds, sizes, strict=True)]
    expected = math.sqrt(sum(d * s**2 for d, s in zip(sizes, stds, strict=True))) / (RATE * N)
    assert record.noise_norm == pytest.approx(expected, rel=1e-12)
    assert sum((c / s) ** 2 for c, s in zip(PerAdapter.bounds, stds, strict=True)) == pytest.approx(1.5**-2)
    assert record.clip_bound is None


class FixedWholeNumber(Fixed):
    """A method of a user's own that plans with an integer."""

    def plan(self, state: Any, info: RunInfo, round: int) -> Plan:
        return Plan(FlatClip(1, info.dimension(round)), 2)


def test_a_threshold_that_is_an_integer_is_recorded(start: MakeRun) -> None:
    run, ledger = start("run", settings(1), FixedWholeNumber(), noise=InsecureZeroNoise())
    run.go(ledger)
    assert run.records[0].clip_bound == 1.0


def test_evaluation_is_as_rare_as_was_asked_and_never_skips_the_last_round(start: MakeRun) -> None:
    config = settings(5, evaluation={"every": 2})
    run, ledger = start("run", config, Fixed(0.5), noise=InsecureZeroNoise())
    run.go(ledger)
    evaluated = [record.round for record in run.records if record.validation_loss is not None]
    assert evaluated == [2, 4, 5]


# --- where it stops, and how it goes on ---------------------------------------------------------------------------


def limited(rounds: int) -> Commitment:
    """Pays for fewer rounds than are planned."""
    steps = (FloorStep("round", round_sampling(settings(1)), 1.5, rounds),)
    return Commitment("client", "add_remove", N, 50.0, 1e-3, floor=steps)


def test_a_run_ends_when_the_ledger_refuses(start: MakeRun) -> None:
    run, ledger = start("run", settings(5), Fixed(0.5), sampler=CohortSampler.create(), floor=limited(2))
    refusal = run.go(ledger)
    assert refusal is not None
    assert "round" in refusal
    assert [record.round for record in run.records] == [1, 2]
    assert len(ledger.events) == 2
    assert run.last.state is not None
    assert run.last.state.round == 2


def test_a_round_that_fails_stays_charged_and_is_held_again_with_another_cohort(start: MakeRun) -> None:
    run, ledger = start("run", settings(4), DpLac(), noise=InsecureZeroNoise(), app=clients(fail_in=(2,)))
    with pytest.raises(RoundFailed, match="round 2: too few"):
        run.go(ledger)
    assert [record.round for record in run.records] == [0, 1]
    assert [charge.released_at is not None for charge in ledger.charges] == [True, True, False]
    ledger.close()
    cohorts: list[list[int]] = []
    run.app = clients(seen=cohorts)
    with Ledger.open(run.folder / "ledger.jsonl") as ledger:
        assert "used" in str(run.go(ledger, resume=True))  # the fourth round was paid for by the second's failure
        assert [event.round for event in ledger.events] == [0, 1, 2, 2, 3]
    assert [record.round for record in run.records] == [0, 1, 2, 3]
    secret, sampling = CohortSampler.insecure_from_seed(3), round_sampling(run.config)
    assert cohorts[0] == secret.draw(sampling, 2, attempt=1).ids.tolist()
    assert cohorts[0] != secret.draw(sampling, 2, attempt=0).ids.tolist()


def test_the_checkpoint_names_the_ledger_it_belongs_to(start: MakeRun) -> None:
    run, ledger = start("run", settings(2), Fixed(0.5), noise=InsecureZeroNoise())
    run.go(ledger)
    ledger.close()
    file = run.folder / "ledger.jsonl"
    assert run.last.state is not None
    head = load_checkpoint(run.folder, run.last.state).ledger_head
    Ledger.open(file, head).close()
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]))  # an older backup
    with pytest.raises(CorruptRun):
        Ledger.open(file, head)


def test_log_and_status_are_the_same_whoever_was_drawn_and_whatever_they_sent(
    start: MakeRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    shown, status = list[str](), Telemetry.status
    monkeypatch.setattr(Telemetry, "status", lambda self, *said: (shown.append(f"{said}"), status(self, *said))[1])
    told, sizes = [], []
    for name, seed, scale in (("one", 3, 1.0), ("other", 4, 1e6)):
        shown.clear()
        caplog.clear()
        cohorts: list[list[int]] = []
        app, sampler = clients(scale, seen=cohorts), CohortSampler.insecure_from_seed(seed)
        run, ledger = start(name, settings(3), Fixed(), app=app, sampler=sampler)
        run.go(ledger)
        told.append([*shown, *(record.getMessage() for record in caplog.records)])
        sizes.append([len(cohort) for cohort in cohorts])
    assert sizes[0] != sizes[1]
    assert told[0] == told[1]
    assert any("round 3 of 3" in text for text in told[0])


def test_every_release_is_watched_the_last_one_too(start: MakeRun) -> None:
    run, ledger = start("run", settings(3), Fixed())
    watched: list[tuple[int, torch.Tensor]] = []
    with Telemetry(run.folder, tensorboard=False) as telemetry:
        loop = run.loop(ledger, telemetry)
        loop.watched = lambda round, release: watched.append((round, release.update.clone()))
        loop.begin(torch.zeros(LAYOUT.size))
        loop.run()
    assert [round for round, _ in watched] == [1, 2, 3]
    assert torch.equal(watched[-1][1], run.last.release.update)
