"""Unit tests start fast because their modules load neither models nor Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COLLECT = """
import json, os, sys, traceback
import pytest

WATCHED = {"transformers", "peft", "ray", "flwr.simulation"}
chains = {}


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in WATCHED and name not in chains:
            files = [os.path.relpath(frame.filename) for frame in traceback.extract_stack()]
            chains[name] = [file for file in files if not file.startswith(("..", ".venv", "<"))]


sys.meta_path.insert(0, Watch())
marks = "not run and not slow and not nightly"
status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--collect-only", "-m", marks, *sys.argv[1:]])
print(json.dumps([int(status), chains]))
"""


def loaded(*folders: str) -> dict[str, list[str]]:
    """What collecting the unit tests of folders imports, of what takes seconds, and through which of our files."""
    paths = [str(TESTS / folder) for folder in folders]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of ours
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *paths],
        cwd=TESTS.parent, env=outside, capture_output=True, text=True, check=True,
    )  # fmt: skip
    status, chains = json.loads(done.stdout.splitlines()[-1])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
    return dict(chains)


def test_privacy_and_strategies_are_tested_without_models_and_simulation() -> None:
    assert loaded("privacy", "strategies") == {}


def test_no_unit_test_loads_a_model_or_ray() -> None:
    chains = loaded("client", "server", "simulations", "test_shape_checks.py", "test_structure.py")
    chains.pop("flwr.simulation", None)
    assert chains == {}


def test_the_check_sees_what_is_loaded() -> None:
    assert {"transformers", "peft"} <= loaded("engine/test_lora.py").keys()
