"""What is refused of an interrupted run in phases. How one resumes: tests/runs/test_crashes.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import CorruptRun
from server.run_folder.errors import CannotResume
from server.run_folder.names import SAMPLING_SECRET
from server.run_folder.origin import check_origin, write_origin
from server.run_folder.progress import hold_folder
from server.runs.phase_config import parse_phases
from server.runs.phase_plan import PhasesConfig
from server.runs.phases import PhasesRun
from tests.cases.moments import Witness
from tests.cases.phases import train

PHASES: list[dict[str, Any]] = [
    {"kind": "ordinary", "name": "redacted", "text": "redacted", "batch-size": 8, "learning-rate": 0.01},
    {"kind": "private", "name": "dp", "steps": 3, "batch-size": 16, "noise-multiplier": 2.0},
    {
        "kind": "private", "name": "atdp", "text": "weighted", "steps": 3, "batch-size": 16, "noise-multiplier": 6.0,
        "controller": "rise-reset", "controller-options": {"clip-norm": 0.1, "seed": 3, "every": 2},
    },
]  # fmt: skip


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


def test_what_must_not_go_on_is_refused(config: PhasesConfig, tmp_path: Path) -> None:
    witness = Witness(tmp_path / "run", tmp_path / "copies", quiet=False)
    with witness.watching():
        train(config, witness.folder)
    folder = [moment.folder for moment in witness.moments if moment.name == "noise"][2]
    with hold_folder(folder), pytest.raises(CannotResume, match="still running"):
        train(config, folder)
    ledger, secret = folder / "ledger.jsonl", folder / "phases" / "2" / SAMPLING_SECRET
    whole, kept = ledger.read_text(), secret.read_bytes()
    ledger.write_text("".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(CorruptRun):  # rolled back: the same budget would be spent again
        train(config, folder)
    ledger.unlink()
    with pytest.raises(CorruptRun, match="is missing, though the run has begun to spend"):
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
    last = replace(config.private_phases[-1], noise_multiplier=7.0)
    other = replace(config, phases=(*config.phases[:-1], last))
    with pytest.raises(CannotResume, match="committed to other releases"):
        PhasesRun(other).train(folder)
    assert len(train(config, folder)["phases"]) == 3


def test_other_settings_or_phases_than_at_the_start_are_refused(config: PhasesConfig, tmp_path: Path) -> None:
    folder, tables = tmp_path, config.phase_tables()
    assert parse_phases({**config.run.to_table(), "phases": tables}) == config
    write_origin(folder, config.run, "digest", tables)
    assert check_origin(folder, config.run, data="digest", phases=tables) == []
    with pytest.raises(CannotResume, match="the phases are not the same"):
        check_origin(folder, config.run, phases=[tables[0], {**tables[1], "steps": 4}, tables[2]])
    with pytest.raises(CannotResume, match="data set"):
        check_origin(folder, config.run, data="another", phases=tables)
