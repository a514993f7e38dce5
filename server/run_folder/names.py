"""File names in a run's folder, and the folder itself."""

import time
from pathlib import Path

from server.config.load import ConfigError
from server.config.schema import RunConfig

LEDGER_FILE = "ledger.jsonl"
SAMPLING_SECRET = "sampling.key"
CONFIG_FILE = "config.toml"
ORIGIN_FILE = "origin.json"
DATA_FILE = "data.digest"
"""Which data set it is. Not for others: who knows all records but one could try out guesses of the last."""
ADAPTER_FOLDER = "adapter"
PRIVACY_FILE = "privacy.json"
RESULTS_FILE = "results.json"
PHASES_FILE = "recipe.toml"
"""In the run folder: the recipe with all its settings."""
STAMP_FILE = "NOT-PRIVATE.txt"
"""In the run folder and beside the adapter, wherever there is no guarantee."""


def new_run_folder(config: RunConfig) -> Path:
    """Make an empty folder ``output/name-time`` that no other run has."""
    stem = Path(config.output) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        folder = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output = {config.output!r}: cannot make {folder}: {error.strerror}") from error
        return folder
    raise ConfigError(f"output = {config.output!r}: {stem.name} and 999 more are taken")
