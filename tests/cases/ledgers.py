"""A ledger in memory that writes down what the mechanism asked of it, in order."""

import pytest

from privacy.errors import BudgetExceeded
from privacy.events import ReleaseEvent


class MemoryLedger:
    """Stands in for the ledger where a test is about the mechanism. ``steps`` is the order of calls."""

    def __init__(self, affordable: int = 1_000_000) -> None:
        self.steps: list[str] = []
        self.events: list[ReleaseEvent] = []
        self.not_private: str | None = None
        self._affordable = affordable

    def stamp_not_private(self, reason: str) -> None:
        self.steps.append("stamp")
        self.not_private = reason

    def attempts(self, label: str, round: int) -> int:
        return sum((event.label, event.round) == (label, round) for event in self.events)

    def charge(self, event: ReleaseEvent) -> int:
        if len(self.events) >= self._affordable:
            raise BudgetExceeded("the committed budget is spent")
        self.steps.append("charge")
        self.events.append(event)
        return len(self.events)

    def note_release(self, receipt: int) -> None:
        assert receipt == len(self.events)
        self.steps.append("released")


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


@pytest.fixture
def broke_ledger() -> MemoryLedger:
    """A ledger that cannot pay for anything."""
    return MemoryLedger(affordable=0)
