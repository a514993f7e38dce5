"""A sweep without a terminal says how far a long cell is."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from simulations.sweep import display
from simulations.sweep.display import Progress, run_shown


@pytest.mark.parametrize(("quiet", "lines"), [(0.0, 2), (3600.0, 0)])
def test_a_cell_that_runs_on_is_told_of_after_a_while(
    quiet: float, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell: Any = SimpleNamespace(key="grid/fixed/seed=0", config=SimpleNamespace(rounds=40))

    def runs_on(
        cells: Any, fresh: Any, jobs: int, plugins: Path, start: Any, ended: Any, look: Callable[[], None], *_: Any
    ) -> None:
        start(cell, tmp_path)
        look()
        look()

    monkeypatch.setattr(display, "run_cells", runs_on)
    monkeypatch.setattr(display, "QUIET", quiet)
    said, store = io.StringIO(), SimpleNamespace(folder=tmp_path)
    console = Console(file=said, width=40)
    run_shown([cell], set(), store, 1, tmp_path, Progress(1, 0), console)  # type: ignore[arg-type]
    assert said.getvalue().count("grid/fixed/seed=0  round 0 of 40, 0 s\n") == lines
