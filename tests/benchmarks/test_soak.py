"""The soak run in short: thirty rounds under random faults and kill -9, on the real model code."""

from pathlib import Path

import pytest

from simulations.benchmarks.faults.soak import soak_inprocess


@pytest.mark.timeout(1200)
def test_thirty_rounds_under_faults_leave_a_right_ledger_and_an_adapter(tmp_path: Path) -> None:
    """What must hold is checked by the run itself; here, that the faults really happened."""
    result = soak_inprocess(tmp_path / "soak", rounds=30, kills=4, seed=1)
    assert sum(result["kills"].values()) >= 3
    assert result["resumes"] >= 3
    assert result["rounds_released"] + result["charged_and_lost"] == 30
    assert result["charged_and_lost"] >= 2
    assert result["lost_rounds_in_the_ledger"] == 0
    assert (
        result["epsilon_of_the_rounds_kept"] < result["epsilon_of_all_charges"] <= result["epsilon_stated"] * 1.000001
    )
    assert sum(result["faults"].values()) > 0
