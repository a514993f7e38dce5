"""Secure sums of a run: the federation's list, and in a simulation the identities of everyone on it."""

from collections.abc import Iterable
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from client.secure_sum import LIST_FILE, identity_file
from privacy.errors import CorruptRun
from privacy.ledger import Ledger
from privacy.secagg import keys
from privacy.secagg.federation import Federation, load_identity, save_identity
from server.config import ConfigError, RunConfig
from server.exchange import answers
from strategies.secure_aggregation import SecureAggregation

IDENTITIES = "secagg"
"""Folder of a simulated run with everybody's identity."""


def secure_aggregation(config: RunConfig, run_folder: Path, grid: Grid, ledger: Ledger) -> SecureAggregation | None:
    """How the run's clients open their sums; None if the server adds the noise.

    Raises:
        ConfigError: the list of the federation is missing or says something else than the configuration.
        CorruptRun: identities of a run that goes on are gone.
    """
    if config.noise_shares is None:
        return None
    given = config.privacy.secagg.federation
    federation = (
        listed(config, Path(given)) if given else simulated(config, run_folder / IDENTITIES, bool(ledger.events))
    )

    def ask(messages: Iterable[Message]) -> Iterable[Message]:
        return answers(grid, messages, config.privacy.secagg.step_timeout)

    return SecureAggregation(
        federation,
        ledger.run_id,
        ask,
        source="" if given else str((run_folder / IDENTITIES).resolve()),
        insecure=config.privacy.noise == "insecure-zero",
    )


def listed(config: RunConfig, path: Path) -> Federation:
    """The list that everybody has; ConfigError unless it says what the configuration does."""
    try:
        federation = Federation.from_text(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"privacy.secagg.federation = {str(path)!r}: {error}") from error
    if federation.noise_shares != config.noise_shares:
        raise ConfigError(
            f"privacy.secagg.federation = {str(path)!r} was agreed on {federation.noise_shares}, the configuration "
            f"says {config.noise_shares}; they must be the same"
        )
    return federation


def simulated(config: RunConfig, folder: Path, goes_on: bool) -> Federation:
    """Identities for a simulation, made once for a run: private ones readable by their owner only."""
    assert config.noise_shares is not None
    path = folder / LIST_FILE
    if path.exists():
        return Federation.from_text(path.read_text(encoding="ascii"))
    if goes_on:
        raise CorruptRun(f"{path} is gone; restore it, or start a new run")
    folder.mkdir(mode=0o700, exist_ok=True)
    public = []
    for number in range(config.clients):
        private = folder / identity_file(number)
        if not private.exists():
            save_identity(private, keys.fresh_identity())
        public.append(keys.public_identity(load_identity(private)))
    least = {"least_noise_multiplier": 1e-6} if config.privacy.non_private else {}
    federation = Federation(tuple(public), config.noise_shares, **least)
    path.write_text(federation.to_text(), encoding="ascii")
    return federation
