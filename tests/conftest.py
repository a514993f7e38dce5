"""What every test shares: one torch thread, so that tests do not fight over cores; Ctrl-C as in a terminal.

Nothing of ours is imported here: pytest reads this file before jaxtyping's import hook is in place.
"""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jaxtyping
import pytest
import shape_checks
import torch
from jaxtyping import config as jaxtyping_config

torch.set_num_threads(1)
jaxtyping.jaxtyped = shape_checks.sparing(jaxtyping.jaxtyped)

# A suite started in the background of a shell inherits an ignored Ctrl-C, and so would every process it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TIERS = {"engine": "run", "runs": "run", "docker": "run", "end_to_end": "slow", "benchmarks": "nightly"}
"""The tier of all tests of a folder of tests/; tests elsewhere are unit tests unless they are marked."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test the tier of its folder, and one group to all that start Ray, which take turns (`loadgroup`)."""
    here = Path(__file__).parent
    for item in items:
        tier = TIERS.get(item.path.relative_to(here).parts[0])
        if tier is not None:
            item.add_marker(tier)
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("ray") else item.path.name))


@pytest.fixture(autouse=True)
def patient_commands(monkeypatch):
    """Let no command of a busy machine say that it is still at work, for tests read its output."""
    if progress := sys.modules.get("simulations.cli.progress"):
        monkeypatch.setattr(progress, "PATIENCE", 3600.0)


@pytest.fixture
def unchecked_shapes():
    """For a test that gives a function a wrong shape to see how the function itself refuses it."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)
