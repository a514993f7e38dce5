from tests.cases.identity import identity  # noqa: F401
