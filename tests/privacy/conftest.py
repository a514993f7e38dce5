from tests.cases.ledgers import broke_ledger, ledger  # noqa: F401
