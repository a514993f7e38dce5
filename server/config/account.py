"""The account that pays for a run, as its settings name it (``privacy.account``), and whether it will."""

from collections.abc import Sequence
from pathlib import Path

from client.settings import state_folder
from privacy.commitment import Commitment
from privacy.errors import AccountRefused
from privacy.ledger.account import Account
from privacy.ledger.place import At
from server.config.load import ConfigError
from server.config.schema import RunConfig


def account_of(config: RunConfig) -> At | None:
    """The file of the account, and this machine's place for how far it had got; None where the run names none."""
    return At(Path(config.privacy.account), state_folder()) if config.privacy.account else None


def check_account(config: RunConfig, commitments: Sequence[Commitment]) -> None:
    """Refuse runs that the account named in ``config`` does not pay for, all together; nothing is debited.

    Raises:
        ConfigError: what is left, what is asked for, and what would fit.
    """
    if (account := account_of(config)) is None:
        return
    if not commitments:
        raise ConfigError(
            f"privacy.account = {config.privacy.account!r}: no release of the run has noise, so no account pays for "
            "it; leave it out"
        )
    try:
        with Account.open(*account) as held:
            held.check(*commitments)
    except AccountRefused as error:
        raise ConfigError(f"privacy.account: {error}") from error
