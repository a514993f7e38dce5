"""Fixtures of the integration tests."""

from tests.cases.disk import disk  # noqa: F401
from tests.cases.federation import fed, ledger_for, quick_ledger_for, released  # noqa: F401
from tests.cases.identity import identity  # noqa: F401
from tests.cases.instructions import signing  # noqa: F401
from tests.cases.recorded_runs import complete_run, record_run, run_config  # noqa: F401
from tests.cases.runs import start  # noqa: F401
from tests.cases.sweeps import cache, run_sweep  # noqa: F401
