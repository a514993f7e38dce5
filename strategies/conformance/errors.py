"""What a check says when a promise is broken."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class ConformanceError(AssertionError):
    """A broken promise.

    Attributes:
        rule: its name, e.g. ``"deterministic"``.
    """

    def __init__(self, rule: str, what: str, remedy: str) -> None:
        super().__init__(f"{rule}: {what}; {remedy}")
        self.rule = rule


def broken(rule: str, what: str, remedy: str) -> NoReturn:
    """Raise it."""
    raise ConformanceError(rule, what, remedy)


@contextmanager
def rule(name: str, what: str, remedy: str) -> Iterator[None]:
    """Whatever an inner check or the method itself raises breaks this rule."""
    try:
        yield
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(name, f"{what}: {type(error).__name__}: {error}", remedy) from error
