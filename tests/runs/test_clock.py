"""The clock is put forward or back by a day while a run goes on: nothing that is decided depends on it.

The clock is that of this process, which the run and its clients ask; the machine's own is as it was.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

import privacy.ledger.ledger
from privacy.ledger.ledger import Ledger
from server.run_folder.names import LEDGER_FILE, LOCK_FILE
from server.run_folder.resume import read_resumed
from server.run_folder.telemetry import Status, Telemetry, read_metrics, read_status
from simulations.engines.inprocess import run_inprocess
from simulations.history.folders import true_state
from simulations.report.read_run import read_run
from tests.cases.runs import tiny

DAY = 86_400.0


@pytest.mark.parametrize("off", [-DAY, DAY])
def test_a_run_that_was_left_before_it_began_does_not_prepare_for_ever(
    record_run: Callable[..., Path], off: float
) -> None:
    folder = record_run(done=0, state="preparing", ledger=False)
    (folder / LOCK_FILE).unlink(missing_ok=True)
    run = read_run(folder)
    assert true_state(run) == "preparing"
    assert true_state(replace(run, status=Status("preparing", "data", time.time() + off))) == "interrupted"


class Interrupted(Exception):
    pass


def test_a_run_whose_clock_jumps_forward_and_back_is_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day forward in round 1, a day back in round 2, where it is broken off, to be resumed before it was begun."""
    real, record, days = time.time, Telemetry.round, [0]

    def told(self: Telemetry, item: object) -> None:
        record(self, item)  # type: ignore[arg-type]
        days[0] = {1: 1, 2: -1}.get(item.round, days[0])  # type: ignore[attr-defined]
        if item.round == 2 and not read_resumed(folder):  # type: ignore[attr-defined]
            raise Interrupted

    def today() -> str:
        return (datetime.now(UTC) + timedelta(days=days[0])).date().isoformat()

    monkeypatch.setattr(Telemetry, "round", told)
    monkeypatch.setattr(time, "time", lambda: real() + days[0] * DAY)
    monkeypatch.setattr(privacy.ledger.ledger, "_today", today)
    run, folder = tiny(tmp_path / "cache"), tmp_path / "run"
    folder.mkdir()
    with pytest.raises(Interrupted):
        run_inprocess(run, folder)
    assert true_state(read_run(folder)) == "failed"
    run_inprocess(run, folder, keys={"resume": str(folder)})
    lines = [json.loads(line) for line in (folder / LEDGER_FILE).read_text().splitlines()]
    days_told = [date.fromisoformat(line["body"]["debited_at"]) for line in lines if line["kind"] == "charge"]
    assert [(day - days_told[0]).days for day in days_told] == [0, 0, 1, -1], "the clock did not jump"
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        assert (len(ledger.charges), ledger.not_private) == (4, None)
        assert all(charge.released_at for charge in ledger.charges)
    assert [record.round for record in read_metrics(folder)] == [0, 0, 1, 2, 3]
    assert [resumed.lost for resumed in read_resumed(folder)] == [0]
    status = read_status(folder)
    assert status is not None
    assert true_state(read_run(folder)) == status.state == "completed"
