"""The failures of the privacy core that a caller may want to catch by name. All others are plain ValueErrors."""


class BudgetExceeded(RuntimeError):
    """The committed budget cannot pay for this release. Nothing was written and nothing was released."""


class UnsupportedEvent(ValueError):
    """No sound accountant is known for this combination of sampling, adjacency and mechanism."""


class CorruptRun(RuntimeError):
    """Files that a run left on disk (ledger, cohort secret) were altered, truncated, or belong to another run."""


class AccountRefused(ValueError):
    """The account of a data set does not pay for this commitment, or not from here. Nothing was written."""
