"""The picture of the README comes from a run, same run, same bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from simulations.report.figures import write_overview
from simulations.report.plots import DARK, LIGHT


def test_one_picture_per_theme_the_same_every_time(complete_run: Path, tmp_path: Path) -> None:
    first = write_overview(complete_run, tmp_path / "docs" / "quickstart")
    assert [path.name for path in first] == ["quickstart-light.svg", "quickstart-dark.svg"]
    light, dark = (path.read_bytes() for path in first)
    assert LIGHT.first.encode() in light
    assert DARK.first.encode() in dark
    again = write_overview(complete_run, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [light, dark]


def test_a_run_without_a_round_is_refused(record_run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training round to show"):
        write_overview(record_run(done=0, state="failed", ledger=False), tmp_path / "picture")
