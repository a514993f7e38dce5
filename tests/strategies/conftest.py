from tests.cases.federation import fed, ledger_for, quick_ledger_for, released  # noqa: F401
