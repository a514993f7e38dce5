from tests.cases.runs import identity, start  # noqa: F401
