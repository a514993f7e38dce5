"""A sweep of tiny runs in a folder of its own, and optimizers of a user that fail or wait."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli.app import app

RunSweep = Callable[..., tuple[int, str]]
"""Options of ``lacquer sweep tiny.toml`` to its exit code and what it printed."""

BASE = """
rounds = 2
clients = 60
sampling-rate = 0.2
[privacy]
delta = 1e-3
[strategy]
controller = "fixed"
[model]
name = "random:bert"
rank = 2
max-length = 32
[data]
validation-records = 40
test-records = 40
records-per-client = 4
cache = "CACHE"
"""
BROKEN = """
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from strategies.optimizers.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    def step(self, *arguments, **named):
        if "simulations.sweep.child" in sys.orig_argv:  # a cell, and not its rehearsal
            raise RuntimeError("planted failure")
        return super().step(*arguments, **named)
"""
HELD = (
    'raise RuntimeError("planted failure")',
    """while Path(__file__).with_name("hold").exists():
                time.sleep(0.05)""",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run_sweep(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> RunSweep:
    """Runs ``tiny.toml``, which the test writes beside ``base.toml``."""
    (tmp_path / "base.toml").write_text(BASE.replace("CACHE", str(cache)))
    (tmp_path / "own_broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["sweep", "tiny.toml", *arguments])
        return done.exit_code, done.output

    return run
