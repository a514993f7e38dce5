"""A run's ledger whose commitment the data set's account has paid for."""

from collections.abc import Callable

from privacy.commitment import Commitment
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.place import At


def debited_ledger(
    ledger: Ledger | None, make: Callable[[], Ledger], account: At | None, commitment: Commitment
) -> Ledger:
    """The ledger of a run, found or made; its commitment is debited before anything can be charged to it.

    Args:
        ledger: of a run that is resumed, else None.
        make: makes that of a new run, which is not begun unless the account pays for it.
        account: None where the owner keeps none.

    Raises:
        AccountRefused, CorruptRun: see :class:`Account`. The ledger is closed.
    """
    if account is None:
        return ledger or make()
    try:
        with Account.open(*account) as held:
            if ledger is None:
                if commitment.tuning is None:  # the sweep has paid for all its candidates
                    held.check(commitment)
                ledger = make()
            held.debit(ledger.run_id, commitment, str(ledger.path.parent), spent=bool(ledger.charges))
    except BaseException:
        if ledger is not None:
            ledger.close()
        raise
    return ledger
