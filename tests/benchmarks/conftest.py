from tests.cases.recorded_runs import complete_run, record_run, run_config  # noqa: F401
