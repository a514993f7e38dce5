"""Unit tests start fast because their modules load neither models nor Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PRIVATE = ["privacy", "strategies"]
COLLECT = """
import json, sys
import pytest
status = pytest.main(["-q", "--collect-only", "-m", "not run and not slow and not nightly", *sys.argv[1:]])
print(json.dumps([int(status), *({"transformers", "peft", "ray", "flwr.simulation"} & set(sys.modules))]))
"""


def loaded(*folders: str) -> set[str]:
    """What collecting the unit tests of folders imports, of what takes seconds."""
    command = [sys.executable, "-c", COLLECT, "-n", "0", "-p", "no:cacheprovider"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of ours
    done = subprocess.run(
        [*command, *(str(TESTS / folder) for folder in folders)],
        cwd=TESTS.parent, capture_output=True, text=True, env=outside,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status, *found = json.loads(done.stdout.splitlines()[-1])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
    return set(found)


@pytest.mark.xfail(reason="some unit tests still load transformers; they are to be found and moved", strict=False)
def test_privacy_and_strategies_are_tested_without_models_and_simulation() -> None:
    assert loaded(*PRIVATE) == set()


@pytest.mark.xfail(reason="some unit tests still load transformers; they are to be found and moved", strict=False)
def test_no_unit_test_loads_a_model_or_ray() -> None:
    assert loaded("client", "server", "simulations", "test_shape_checks.py") <= {"flwr.simulation"}


def test_the_check_sees_what_is_loaded() -> None:
    assert {"transformers", "peft"} <= loaded("engine/test_lora.py")
