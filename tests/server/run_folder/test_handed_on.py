"""Noise that was calibrated is taken from the run's folder, and nothing there is trusted."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.ledger.ledger import Ledger
from server.config.load import parse, unflatten
from server.config.schema import RunConfig
from server.run_folder import handed_on
from server.run_folder.names import COMMITMENT_FILE
from server.runs import commitment as road
from server.runs.commitment import commit_clients
from server.runs.phase_plan import DpPhase, NonPrivatePhase, PhasesConfig, plan_noise
from strategies.calibration import Calibrated
from strategies.controllers.fixed import Fixed


def small(**settings: Any) -> RunConfig:
    table = {"clients": 60, "rounds": 3, "sampling-rate": 1.0, "privacy.delta": 1e-3, "strategy.controller": "fixed"}
    return parse(unflatten({**table, **settings}))


@functools.cache
def expected() -> Calibrated:
    """Cohorts of everyone are calibrated in a third of a second, others in two."""
    return commit_clients(small(), Fixed())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run whose noise was calibrated."""
    handed_on.write_noise(tmp_path, small(), expected().to_json())
    return tmp_path


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every calibration, which gives what is expected."""
    calls: list[None] = []
    result = expected()

    def counting(*given: Any, **named: Any) -> Calibrated:
        calls.append(None)
        return result

    monkeypatch.setattr(road, "calibrate", counting)
    return calls


def test_what_was_calibrated_is_not_calibrated_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    assert commit_clients(small(), Fixed(), folder) == expected()
    elsewhere = small(**{"output": "there", "engine.workers": 7, "data.cache": "cache"})
    assert commit_clients(elsewhere, Fixed(), folder) == expected()
    assert calls == []


def test_a_run_that_calibrates_itself_does_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    assert commit_clients(small(), Fixed(), tmp_path) == commit_clients(small(), Fixed(), tmp_path)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change", [{"sampling-rate": 0.5}, {"privacy.epsilon": 2.0}, {"strategy.controller": "quantile"}]
)
def test_noise_of_other_settings_is_calibrated_anew(
    change: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    commit_clients(small(**change), Fixed(), folder)
    assert len(calls) == 1


def test_noise_of_other_code_is_calibrated_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    monkeypatch.setattr(handed_on, "code_version", lambda config, methods: {"privacy/accountants/pld.py": "changed"})
    commit_clients(small(), Fixed(), folder)
    assert len(calls) == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"of": 1, "noise": 2}', "not json"])
def test_a_damaged_file_is_calibrated_anew(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    (folder / COMMITMENT_FILE).write_text(text)
    commit_clients(small(), Fixed(), folder)
    assert len(calls) == 1


def forged(folder: Path, **changes: Any) -> None:
    """The file of the same settings and code, with something else in its commitment."""
    document = json.loads((folder / COMMITMENT_FILE).read_text())
    document["noise"]["commitment"] |= changes
    (folder / COMMITMENT_FILE).write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 8.0},
        {"delta": 1e-2},
        {"unit": "record"},
        {"adjacency": "replace_one"},
        {"not_private": "no noise"},
        {"mode": "filter", "floor": [], "order": 8, "rho": 1e3},
    ],
)
def test_a_commitment_to_another_target_is_passed_over(
    change: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    forged(folder, **change)
    assert commit_clients(small(), Fixed(), folder) == expected()
    assert len(calls) == 1


def test_less_noise_than_the_target_needs_is_refused_by_the_ledger(folder: Path) -> None:
    (step,) = expected().commitment.floor
    forged(folder, floor=[replace(step, noise_multiplier=step.noise_multiplier / 2).to_json()])
    found = commit_clients(small(), Fixed(), folder)
    with pytest.raises(ValueError, match="the committed releases cost epsilon"):
        Ledger.create(folder / "ledger.jsonl", found.commitment)
    assert not (folder / "ledger.jsonl").exists()


def test_the_noise_of_phases_comes_back_and_is_held_against_their_target() -> None:
    plain = NonPrivatePhase("plain")
    given = DpPhase("given", steps=3, batch_size=40, noise_multiplier=4.0, controller="rise-reset")
    privacy = {"unit": "record", "epsilon": 4.0, "delta": 1e-4}
    run = parse({"clients": 1, "sampling-rate": 1.0, "privacy": privacy, "data": {"unit-column": "patient"}})
    phases = PhasesConfig(run, (plain, given))
    planned = plan_noise(phases, 400)
    assert type(planned).from_json(json.loads(json.dumps(planned.to_json()))) == planned
    assert planned.is_of(phases, 400)
    assert not planned.is_of(phases, 401)
    for other in ({"epsilon": planned.epsilon / 2}, {"unit": "group"}):
        changed = replace(phases, run=run.replace(privacy=run.privacy.replace(**other)))
        assert not planned.is_of(changed, 400)
    assert not planned.is_of(replace(phases, phases=(plain, replace(given, steps=4))), 400)
