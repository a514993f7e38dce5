"""Runs of the server's loop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from privacy.commitment import Commitment, FloorStep
from privacy.ledger.ledger import Ledger
from server.config.load import parse
from server.config.schema import RunConfig
from server.runs.commitment import round_sampling
from tests.cases.loop import N, Run

MakeRun = Callable[..., tuple[Run, Ledger]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[MakeRun]:
    """A run and its ledger, which pays for anything (NOT PRIVATE) or for what is given as ``floor``."""
    ledgers: list[Ledger] = []

    def make(name: str, config: RunConfig, controller: Any, **parts: Any) -> tuple[Run, Ledger]:
        run = Run(tmp_path / name, config, controller, **parts)
        sampling = round_sampling(config)
        steps = (FloorStep("histogram", sampling, 0.0), FloorStep("round", sampling, 0.0, config.rounds))
        commitment = run.floor or Commitment(
            "client", "add_remove", N, 3.0, 1e-3, floor=steps, not_private="a test without a budget"
        )
        ledgers.append(Ledger.create(run.folder / "ledger.jsonl", commitment))
        return run, ledgers[-1]

    yield make
    for ledger in ledgers:
        ledger.close()


def tiny(cache: Path, **further: Any) -> RunConfig:
    """A run of seconds: a first release, then three rounds."""
    table = {
        "rounds": 3, "clients": 12, "sampling-rate": 0.5, "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "model": {"name": "random:bert", "rank": 2, "max-length": 16}, "engine": {"workers": 1},
        "data": {"partition": "iid", "validation-records": 10, "test-records": 10, "records-per-client": 4,
                 "cache": str(cache)},
    }  # fmt: skip
    return parse(table | further)
