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
QUESTION_FILE = "question.json"
"""Present in the folder of a run that asks (:mod:`server.asking`) and does not train: what its answers may cost."""
ANSWERS_FILE = "answers.json"
ORIGIN_FILE = "origin.json"
COMMITMENT_FILE = "commitment.json"
CANDIDATE_FILE = "candidate.json"
"""Present in a run that a private sweep started: which settings, and that its noise is the sweep's to choose."""
DATA_FILE = "data.digest"
"""Digest that names the data set. Not for others: who knows all records but one could try out guesses of the last."""
FACTS_FILE = "records.json"
"""Counts of the records that were read; see :mod:`server.run_folder.data_facts`."""
SOURCE_FILE = "source.digest"
"""Digest of the records before anything was drawn or dealt; not for others, as the file above."""
ENVIRONMENT_FILE = "environment.json"
ROSTER_FILE = "nodes.json"
CLIENTS_FILE = "clients.json"
"""Names of a deployed run's clients, by node."""
FLOWER_RUN_FILE = "flower-run.json"
"""Number of a deployed run at the SuperLink."""
LOCK_FILE = "run.lock"
LAUNCH_LOCK = "launch.lock"
"""Lock of the command that starts or resumes a run, from before the run's own process holds the other."""
SEAL_FILE = "files.sha256"
"""Digests of what a run has written for good; see :mod:`server.run_folder.seal`."""

LEDGER_FILE = "ledger.jsonl"
TUNING_FILE = "tuning.jsonl"
"""Ledger in the folder of a private sweep."""
SAMPLING_SECRET = "sampling.key"
CHECKPOINT_FOLDER = "checkpoint"
PUBLIC_START_FILE = "public-start.safetensors"
"""The adapter after a warm start on public records: what an audit compares the run's adapter with."""
START_FOLDER = "start"
"""What the run went on from; see :mod:`server.lineage`."""
BEST_FILE = "best.safetensors"
"""The adapter of the round with the lowest validation loss so far, where a run keeps that."""
SITES_FILE = "silos.safetensors"
SITES_FOLDER = "silos"
"""Folder in a simulation's run folder that holds one for every site's own ledger."""
PHASES_FOLDER = "phases"
PHASE_FILE = "done.safetensors"
"""Present in the folder of a phase that has ended."""
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
STATEMENT_FILE = "statement.html"
"""The guarantee for those who must sign, with risks in numbers."""
PUBLISHED_FILE = "PUBLISHED.md"
"""Present in a copy of a run that is made to be given to others; see :mod:`server.evaluation.published`."""
CANARIES_FILE = "HOLDS-CANARIES.txt"
"""Present in a run with made-up units or secrets in it."""
AUDIT_FOLDER = "audit"
"""Folder of what attacks on the run found, and of its canaries' secret; the guarantee does not cover it."""
AUDIT_FILE = "audit.json"
STAMP_FILE = "NOT-PRIVATE.txt"
"""Present in the run folder and beside the adapter, wherever there is no guarantee."""

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
    START_FOLDER: "it names the data of earlier runs by their digests",
    CHECKPOINT_FOLDER: "it holds what a resumed run draws from",
    PHASES_FOLDER: "it shows who was in a batch",
    SITES_FOLDER: "it holds the secrets of the sites",
    AUDIT_FOLDER: "the guarantee does not cover it",
}
"""What the guarantee does not cover in a run's folder, with why: for the owner alone, never to be shared."""


def shell_quoted(path: Path) -> str:
    """A path as one types it in a shell: quoted where it must be."""
    return shlex.quote(str(path))


def write_config(folder: Path, config: RunConfig) -> Path:
    """Write the resolved settings into a run's folder; a file that says the same stays as it is.

    Returns:
        the path of the file.
    """
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
