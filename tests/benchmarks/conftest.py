"""Tests of the benchmarks run at night: they are about measurements, not about what is installed."""

from pathlib import Path

import pytest

from tests.cases.recorded_runs import complete_run, record_run, run_config  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.nightly)
