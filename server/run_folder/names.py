"""Every file name in a run's folder, and the folder itself."""

import shlex
import time
from pathlib import Path

from privacy import durable
from server.config.load import ConfigError
from server.config.schema import RunConfig

CONFIG_FILE = "config.toml"
PHASES_FILE = "recipe.toml"
"""The settings of a run in phases, and its phases."""
ORIGIN_FILE = "origin.json"
COMMITMENT_FILE = "commitment.json"
CANDIDATE_FILE = "candidate.json"
"""Of a run that a private sweep started: which settings, and that its noise is the sweep's to choose."""
DATA_FILE = "data.digest"
"""Which data set it is. Not for others: who knows all records but one could try out guesses of the last."""
FACTS_FILE = "records.json"
"""What became of the records that were read; see :mod:`server.run_folder.data_facts`."""
SOURCE_FILE = "source.digest"
"""Which records they were, before anything was drawn or dealt; not for others, as the file above."""
ENVIRONMENT_FILE = "environment.json"
ROSTER_FILE = "nodes.json"
CLIENTS_FILE = "clients.json"
"""Of a deployed run: names of its clients, by node."""
FLOWER_RUN_FILE = "flower-run.json"
"""Of a deployed run: its number at the SuperLink."""
LOCK_FILE = "run.lock"
LAUNCH_LOCK = "launch.lock"
"""Held by the command that starts or resumes a run, from before the run's own process holds the other."""
SEAL_FILE = "files.sha256"
"""Digests of what a run has written for good; see :mod:`server.run_folder.seal`."""

LEDGER_FILE = "ledger.jsonl"
TUNING_FILE = "tuning.jsonl"
"""In the folder of a private sweep: its ledger."""
SAMPLING_SECRET = "sampling.key"
CHECKPOINT_FOLDER = "checkpoint"
PUBLIC_START_FILE = "public-start.safetensors"
"""The adapter after a warm start on public records: what an audit compares the run's adapter with."""
SITES_FILE = "silos.safetensors"
SITES_FOLDER = "silos"
"""In the run folder of a simulation: a folder for every site's own ledger."""
PHASES_FOLDER = "phases"
PHASE_FILE = "done.safetensors"
"""In the folder of a phase that has ended."""
RESUMES_FILE = "resumed.jsonl"

METRICS_FILE = "metrics.jsonl"
TIMES_FILE = "times.jsonl"
"""Wall seconds of each round. Not for others: they depend on who took part."""
STATUS_FILE = "status.json"
TENSORBOARD_FOLDER = "tensorboard"
FLOWER_LOG = "flower.log"
PROCESS_LOG = "inprocess.log"

PRIVACY_FILE = "privacy.json"
ADAPTER_FOLDER = "adapter"
RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"
PUBLISHED_FILE = "PUBLISHED.md"
"""In a copy of a run that is made to be given to others; see :mod:`server.evaluation.published`."""
CANARIES_FILE = "HOLDS-CANARIES.txt"
"""In a run with made-up units or secrets in it."""
AUDIT_FOLDER = "audit"
"""What attacks on the run found: not covered by the guarantee, and read by nothing else. The secret of its canaries."""
AUDIT_FILE = "audit.json"
STAMP_FILE = "NOT-PRIVATE.txt"
"""In the run folder and beside the adapter, wherever there is no guarantee."""

FOR_THE_OWNER = {
    SAMPLING_SECRET: "whoever has it knows who took part",
    DATA_FILE: "whoever has all records but one can guess that",
    SOURCE_FILE: "whoever has all records but one can guess that",
    FACTS_FILE: "its counts are exact",
    TIMES_FILE: "how long a round took depends on who was in it",
    RESULTS_FILE: "its times and counts are exact",
    TENSORBOARD_FOLDER: "how long a round took depends on who was in it",
    ORIGIN_FILE: "it says where things lie on this machine",
    FLOWER_LOG: "it may name errors, times and places of this machine",
    PROCESS_LOG: "it may name errors, times and places of this machine",
    CHECKPOINT_FOLDER: "it holds what a resumed run draws from",
    PHASES_FOLDER: "it shows who was in a batch",
    SITES_FOLDER: "it holds the secrets of the sites",
    AUDIT_FOLDER: "the guarantee does not cover it",
}
"""What the guarantee does not cover in a run's folder, with why: for the owner alone, never to be shared."""


def typed(path: Path) -> str:
    """A path as one types it in a shell: quoted where it must be."""
    return shlex.quote(str(path))


def write_config(folder: Path, config: RunConfig) -> Path:
    """The resolved settings into a run's folder: once, by whoever starts the run; where they stand, they stay."""
    path, text = folder / CONFIG_FILE, config.to_toml()
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        durable.write(path, text)
    return path


def new_run_folder(config: RunConfig) -> Path:
    """Make an empty folder ``output/name-time`` that no other run has."""
    stem = Path(config.output) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        folder = stem if attempt == 0 else stem.with_name(f"{stem.name}-{attempt + 1}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)  # it holds what the guarantee does not cover
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output = {config.output!r}: cannot make {folder}: {error.strerror}") from error
        return folder
    raise ConfigError(f"output = {config.output!r}: {stem.name} and 999 more are taken")
