"""A run started from Python: callbacks see its records and nothing else, and may end it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from server.config.load import ConfigError
from server.run_folder.errors import CannotResume
from server.run_folder.round_record import RoundRecord
from simulations import resume, run

SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients": 60,
    "sampling-rate": 0.2,
    "privacy": {"delta": 1e-3},
    "model": {"name": "random:bert", "rank": 2},
    "data": {"validation-records": 40, "test-records": 40, "records-per-client": 4},
    "engine": {"kind": "inprocess"},
    "strategy.controller": "fixed",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_callbacks_see_every_record_in_order(here: Path) -> None:
    seen: list[RoundRecord] = []
    result = run(SMALL, {"data.cache": str(here / "cache"), "name": "mine"}, callbacks=seen.append)
    assert [(record.phase, record.round) for record in seen] == [("start", 0), ("round", 1), ("round", 2)]
    assert tuple(seen) == result.records
    assert result.folder.parent == here / "runs"
    assert result.folder.name.startswith("mine-")
    assert (result.state, result.results["rounds_done"]) == ("completed", 2)
    assert result.epsilon is not None
    assert result.epsilon <= 4.0
    assert result.adapter is not None
    assert (result.folder / "report.html").is_file()
    allowed = {field.name for field in fields(RoundRecord)}
    assert set(vars(seen[-1])) == allowed, "what a callback sees has no place for a client's own numbers"


def test_a_callback_may_end_a_run_which_is_then_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(record: RoundRecord) -> None:
        if record.round:
            raise KeyError("enough")

    longer = {"data.cache": str(here / "cache"), "rounds": 12}
    with pytest.raises(KeyError, match="enough"):
        run(SMALL, longer, callbacks=[stop], resume_or_start=True)
    (folder,) = (here / "runs").iterdir()
    assert '"interrupted"' in (folder / "status.json").read_text()
    with pytest.raises(
        ConfigError, match=r"unfinished run of the name 'run' has other settings: .*rounds is 2, it was"
    ):
        run(SMALL, resume_or_start=True)
    result = run(SMALL, longer, callbacks=print, resume_or_start=True)
    assert result.folder == folder
    assert (result.state, result.results["rounds_done"]) == ("completed", 12)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Before round 1: accuracy ")
    assert said[-1].startswith("Round 12 of 12: accuracy ")
    assert said[-1].endswith(" of 4.")
    with pytest.raises(CannotResume, match="has ended"):
        resume(folder)
    again = run(SMALL, longer, resume_or_start=True)
    assert (again.folder, again.state) == (folder, "completed"), "at once"


def test_wrong_settings_are_refused_before_anything_is_made(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean privacy\.epsilon"):
        run(SMALL, {"privacy.epsilom": 1.0})
    assert not (here / "runs").exists()
