"""Resuming an interrupted run: what must be the same as at its start, and where it stood.

``origin.json`` is written before the ledger and tells what the run was started with. The rules, each with the reason it
is not left to the user:

- the settings that decide what is released are those of the start: the ledger's commitment was computed from them;
- the ledger's chain is whole and holds the line the checkpoint saw: a shorter one would spend the same budget twice;
- the secret that draws cohorts is there: a fresh one would give whoever can break a run off a choice between cohorts;
- the code is that of the start, unless the caller says that a change is meant. The ledger's rules hold either way;
- nobody else holds the ledger, and the run has not ended. One that ended without some of its measurements is resumed
  for these.

Each time a run is resumed adds a line to ``resumed.jsonl``, for the report.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from privacy import durable
from privacy.commitment import Commitment
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from server.config.schema import RunConfig
from server.run_folder.checkpoint import checkpoint_folder, read_mark
from server.run_folder.errors import CannotResume
from server.run_folder.names import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    LEDGER_FILE,
    PHASES_FOLDER,
    RESULTS_FILE,
    RESUMES_FILE,
    SAMPLING_SECRET,
    SITES_FILE,
    SITES_FOLDER,
)
from server.run_folder.origin import Tables, check_origin
from server.run_folder.progress import hold_folder
from server.run_folder.telemetry import read_status
from server.run_folder.verify import ENDED, VerifiedRun, read_object, traces, verify_run


def check_same_run(
    config: RunConfig, data: str, commitment: Commitment, folder: Path, ledger: Ledger, other_code: bool
) -> list[str]:
    """Refuse to resume a run with other settings, data, commitment or secret than it was started with.

    Args:
        data: name of the prepared data set.
        other_code: accept that the code has changed.

    Returns:
        what of the code is different, in words.

    Raises:
        CannotResume, CorruptRun: why it cannot be the same run.
    """
    changes = check_origin(folder, config, data=data, other_code=other_code)
    check_secret(folder, config, ledger)
    if ledger.commitment != commitment:
        raise CannotResume(
            "the settings now give another commitment than the ledger's first line, so the code that calibrates the "
            "noise has changed; go back to the code the run was started with"
        )
    if ledger.charges and checkpoint_folder(folder) is None:
        raise CorruptRun(f"{folder / CHECKPOINT_FOLDER} is missing, though the run has spent budget; restore it")
    return changes


def claim_ledger(run_folder: Path) -> Ledger:
    """Open the ledger of a run that has not ended: verified, not older than the checkpoint, held by nobody else.

    Raises:
        CannotResume: the run has ended, another process holds the ledger, or nothing was committed to yet.
        CorruptRun: a file of the run is damaged, gone, or was rolled back.
    """
    refuse_ended(run_folder)
    return _hold_ledger(verify_run(run_folder))


def _hold_ledger(run: VerifiedRun) -> Ledger:
    if run.ledger is None:
        raise CannotResume(f"{run.folder} was interrupted before it could spend anything; start it anew")
    try:
        return Ledger.open(run.folder / LEDGER_FILE, run.head)
    except BlockingIOError:
        raise CannotResume(f"{run.folder} is still running: a process holds its ledger; stop that one first") from None


def refuse_ended(run_folder: Path) -> None:
    """Refuse to resume a run that has ended with all that belongs to it.

    Raises:
        CannotResume: it has ended.
        CorruptRun: its results cannot be read.
    """
    if (results := read_object(run_folder / RESULTS_FILE)) is not None:
        if results.get("missing"):
            return
        raise CannotResume(f"{run_folder} has ended; there is nothing to resume")
    status = read_status(run_folder)
    if status is not None and status.state in ENDED:
        raise CannotResume(f"{run_folder} has ended ({status.state}: {status.message}); there is nothing to resume")


def check_resumable(run_folder: Path, *, other_code: bool = False, phases: Tables = ()) -> RunConfig:
    """Check all that can be checked of a run before it is resumed; returns its settings.

    Raises:
        CannotResume, CorruptRun: why it cannot be resumed.
    """
    if not (run_folder / CONFIG_FILE).is_file() and not traces(run_folder):
        raise CannotResume(f"{run_folder} is no run folder: it has no {CONFIG_FILE}; give what `lacquer run` named")
    with hold_folder(run_folder):
        refuse_ended(run_folder)
        run = verify_run(run_folder)
        assert run.config is not None, "its file is there, or was demanded"
        if run.config.several_sites:
            check_sites(run)
        elif run.phases:
            for place in run_folder.glob(f"{PHASES_FOLDER}/*/{CHECKPOINT_FOLDER}"):
                if (mark := read_mark(place.parent)) is not None:
                    mark.check_secret(place.parent / SAMPLING_SECRET)
        else:
            with _hold_ledger(run) as ledger:
                check_secret(run_folder, run.config, ledger)
        check_origin(run_folder, run.config, other_code=other_code, phases=phases)
    return run.config


def check_sites(run: VerifiedRun) -> None:
    """Check that a verified run over sites has begun and that the secrets of its sites here are whole.

    Raises:
        CannotResume: it never began.
        CorruptRun: the secret of a site is gone.
    """
    if not (run.folder / SITES_FILE).is_file():
        raise CannotResume(f"{run.folder} was interrupted before its sites were asked for anything; start it anew")
    for site in sorted((run.folder / SITES_FOLDER).glob("*/")):
        if (site / SAMPLING_SECRET).is_file():
            CohortSampler.load(site / SAMPLING_SECRET)
        elif (site / LEDGER_FILE).exists():  # else it was interrupted before it drew any
            raise CorruptRun(f"{site / SAMPLING_SECRET} is missing, with which the site draws its batches; restore it")


def check_secret(run_folder: Path, config: RunConfig, ledger: Ledger) -> None:
    """Refuse to draw cohorts anew for a run that has drawn some. Nodes with many clients keep their own secrets.

    Raises:
        CorruptRun: the secret is gone, or is another one.
    """
    secret = run_folder / SAMPLING_SECRET
    if config.privacy.seeded_cohorts or config.data.nodes or not ledger.charges:
        return
    if not secret.is_file():
        raise CorruptRun(f"{secret} is gone: without it other cohorts would be drawn than were; restore it")
    if (mark := read_mark(run_folder)) is not None:
        mark.check_secret(secret)


@dataclass(frozen=True)
class Resumed:
    """A record of one time that a run was resumed.

    Attributes:
        round: the last one released before; 0 if only the initial release or nothing was, -1 if not even that.
        time: seconds since 1970.
        lost: charges so far that no released round stands for: the run was interrupted between the charge and the
            checkpoint, or the round failed. They stay spent.
        code: what of the code was different from that at the start, in words.
    """

    round: int
    time: float
    lost: int
    code: tuple[str, ...] = ()


def note_resumed(run_folder: Path, resumed: Resumed) -> None:
    """Add a line to resumed.jsonl. The file is written anew: half a line could not be read at the end of the run."""
    path = run_folder / RESUMES_FILE
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    durable.write(path, before + json.dumps(asdict(resumed)) + "\n")


def read_resumed(run_folder: Path) -> tuple[Resumed, ...]:
    """Read every time that a run was resumed, in order.

    Raises:
        CorruptRun: a line is none of ours.
    """
    path = run_folder / RESUMES_FILE
    if not path.is_file():
        return ()
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return tuple(Resumed(**{**line, "code": tuple(line["code"])}) for line in lines)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRun(f"{path} is not what a resumed run writes: {error}") from error
