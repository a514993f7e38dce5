"""A run in phases that is broken off goes on: nothing is spent twice, nothing that is done is done again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from client.record_level.dp_sgd import PrivateSgd
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from server.run_folder.errors import CannotResume
from server.run_folder.names import SAMPLING_SECRET, STAMP_FILE
from server.run_folder.phase_progress import PhaseFolder
from server.run_folder.progress import owned
from server.run_folder.resume import check_origin, write_origin
from server.runs import lifecycle, loop
from server.runs.phase_config import parse_phases
from server.runs.phase_plan import PhasesConfig
from server.runs.phases import PhasesRun
from tests.cases.phases import train

PHASES: list[dict[str, Any]] = [
    {"kind": "ordinary", "name": "redacted", "text": "redacted", "batch-size": 8, "learning-rate": 0.01},
    {"kind": "private", "name": "dp", "steps": 3, "batch-size": 16, "noise-multiplier": 2.0},
    {
        "kind": "private", "name": "atdp", "text": "weighted", "steps": 3, "batch-size": 16, "noise-multiplier": 6.0,
        "controller": "rise-reset", "controller-options": {"clip-norm": 0.1, "seed": 3, "every": 2},
    },
]  # fmt: skip


class BrokenOff(Exception):
    """The machine has lost power."""


def on_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but its call of this number, from 1, is broken off."""
    calls = 0

    def called(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise BrokenOff
        return function(*args, **options)

    return called


@pytest.fixture
def config(tmp_path: Path) -> PhasesConfig:
    rows = [{"text": f"the nurse saw Ann Smith on ward {1000 + i} at {i % 12} o'clock"} for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {"partition": "iid", "validation-records": 8, "test-records": 8, "cache": str(tmp_path / "cache")}
    return parse_phases(
        {
            "name": "small",
            "privacy": {"epsilon": 6.0, "delta": 1e-3},
            "model": {"name": "random:llama", "task": "causal-lm", "rank": 2, "targets": "q_proj", "max-length": 32},
            "data": {**data, "source": f"jsonl:{tmp_path / 'texts.jsonl'}"},
            "phases": PHASES,
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def break_off(config: PhasesConfig, folder: Path, owner: Any, name: str, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, on_call(number, getattr(owner, name)))
        with pytest.raises(BrokenOff):
            train(config, folder)


PLACES: dict[str, tuple[Any, str, int, list[int]]] = {
    # what is broken off, at which call, and the private steps that are left
    "behind the first phase": (PhaseFolder, "finish", 1, [1, 2, 3, 1, 2, 3]),
    "charged and not released": (Ledger, "released", 2, [3, 1, 2, 3]),
    "released and not kept": (loop, "save_checkpoint", 4, [1, 2, 3]),
    "kept, and the controller not told": (PrivateSgd, "observe", 2, [3, 1, 2, 3]),
    "behind the first private phase": (PhaseFolder, "finish", 2, [1, 2, 3]),
    "first step of the second private phase": (Ledger, "released", 4, [2, 3]),
    "last step of all": (loop, "save_checkpoint", 8, []),
    "before the artefacts": (lifecycle, "write_artefacts", 1, []),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_goes_on_from_where_it_was_broken_off_and_spends_nothing_twice(
    config: PhasesConfig, folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, number, left = PLACES[place]
    break_off(config, folder, owner, name, number)
    before = {path: path.read_bytes() for path in folder.rglob("done.safetensors")}
    steps: list[int] = []
    made = PrivateSgd.step

    def counted(training: PrivateSgd) -> Any:
        release = made(training)
        steps.append(training.state.round)
        return release

    monkeypatch.setattr(PrivateSgd, "step", counted)
    if before:  # what has ended is not trained again
        monkeypatch.setattr(PhasesRun, "_without_noise", on_call(1, PhasesRun._without_noise))
    results = train(config, folder)
    assert steps == left
    assert [phase["name"] for phase in results["phases"]] == ["redacted", "dp", "atdp"]
    assert {path: path.read_bytes() for path in before} == before
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [event.round for event in ledger.events] == [1, 2, 3, 1, 2, 3]
        multipliers = [z for phase in PhasesRun(config).planned.multipliers for z in phase]
        assert [event.effective_noise_multiplier for event in ledger.events] == pytest.approx(multipliers)
        assert sum(charge.released_at is None for charge in ledger.charges) == (name == "released")
    assert (folder / "phases" / "1" / STAMP_FILE).is_file()


def test_the_same_run_broken_off_behind_noise_free_phases_gives_the_same_adapter(
    config: PhasesConfig, folder: Path, tmp_path: Path
) -> None:
    second = replace(config.ordinary[0], name="again", text="original")
    config = replace(config, phases=(config.ordinary[0], second))
    break_off(config, folder, PhaseFolder, "finish", 2)
    train(config, folder)
    train(config, tmp_path / "other")
    gone_on, at_once = (
        load_file(path / "adapter" / "adapter_model.safetensors") for path in (folder, tmp_path / "other")
    )
    assert gone_on.keys() == at_once.keys()
    assert all(torch.equal(gone_on[name], at_once[name]) for name in gone_on)


def test_what_must_not_go_on_is_refused(config: PhasesConfig, folder: Path) -> None:
    break_off(config, folder, loop, "save_checkpoint", 3)
    with owned(folder), pytest.raises(CannotResume, match="still running"):
        train(config, folder)
    ledger, secret = folder / "ledger.jsonl", folder / "phases" / "2" / SAMPLING_SECRET
    whole, kept = ledger.read_text(), secret.read_bytes()
    ledger.write_text("".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(CorruptRun):  # rolled back: the same budget would be spent again
        train(config, folder)
    ledger.unlink()
    with pytest.raises(CorruptRun, match="would be spent again"):
        train(config, folder)
    ledger.write_text(whole)
    secret.unlink()
    with pytest.raises(CorruptRun, match="other batches would be drawn"):
        train(config, folder)
    secret.write_bytes(kept)
    secret.chmod(0o600)
    done = folder / "phases" / "1" / "done.safetensors"
    content = done.read_bytes()
    done.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptRun, match="is not of this run"):
        train(config, folder)
    done.write_bytes(content)
    last = replace(config.private[-1], noise_multiplier=7.0)
    other = replace(config, phases=(*config.phases[:-1], last))
    with pytest.raises(CannotResume, match="committed to other releases"):
        PhasesRun(other).train(folder)
    assert len(train(config, folder)["phases"]) == 3


def test_other_settings_or_phases_than_at_the_start_are_refused(config: PhasesConfig, folder: Path) -> None:
    tables = config.phase_tables()
    assert parse_phases({**config.run.to_table(), "phases": tables}) == config
    write_origin(folder, config.run, "digest", tables)
    assert check_origin(folder, config.run, data="digest", phases=tables) == []
    with pytest.raises(CannotResume, match="the phases are not the same"):
        check_origin(folder, config.run, phases=[tables[0], {**tables[1], "steps": 4}, tables[2]])
    with pytest.raises(CannotResume, match="the data set is not the one"):
        check_origin(folder, config.run, data="another", phases=tables)
