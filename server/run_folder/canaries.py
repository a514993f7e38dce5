"""Canaries of a run (``audit.canaries``): the secret of their coins, and what each release showed of them.

Both lie in the run's audit folder, which its owner alone can open. The run writes there and reads nothing but the
secret; the coins decide what canaries bring and nothing else.
"""

import json
import secrets
from dataclasses import asdict
from pathlib import Path

from privacy import durable
from privacy.audit.in_run import SECRET_BYTES, CanaryUnits, Observation
from privacy.errors import CorruptRun
from server.config.schema import RunConfig
from server.run_folder.names import AUDIT_FOLDER

KEY_FILE = "canaries.key"
SEEN_FILE = "canaries.jsonl"


def canary_key(folder: Path) -> Path:
    """The path of the secret of a run's coins."""
    return folder / AUDIT_FOLDER / KEY_FILE


def canaries_of(config: RunConfig, folder: Path, population: int, *, fresh: bool = False) -> CanaryUnits | None:
    """The canaries of a run, the last of its units; None where it has none.

    Args:
        fresh: make the secret where there is none yet.

    Raises:
        CorruptRun: the secret is gone.
    """
    if not config.audit.canaries:
        return None
    path = canary_key(folder)
    if fresh and not path.exists() and not (folder / AUDIT_FOLDER / SEEN_FILE).exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        durable.write(path, secrets.token_hex(SECRET_BYTES) + "\n", mode=0o600)
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii"))
        return CanaryUnits(population - config.audit.canaries, config.audit.canaries, secret, config.seed)
    except (OSError, ValueError) as error:
        raise CorruptRun(f"{path} holds no secret of the run's canaries ({error}); restore it") from error


def note_seen(folder: Path, seen: Observation) -> None:
    """Append what a release showed. A run that is killed right behind a checkpoint misses one: less power, no harm."""
    path = folder / AUDIT_FOLDER / SEEN_FILE
    with path.open("a", encoding="ascii") as file:
        file.write(json.dumps(asdict(seen)) + "\n")


def read_seen(folder: Path) -> list[Observation]:
    """Read what each release showed of the canaries, in the order of rounds.

    Of a round that was held again, the last observation counts.

    Raises:
        CorruptRun: a line cannot be read.
    """
    path = folder / AUDIT_FOLDER / SEEN_FILE
    found: dict[int, Observation] = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            values = json.loads(line)
            one = Observation(**{**values, "lengths": tuple(values["lengths"]), "scores": tuple(values["scores"])})
            found[one.round] = one
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; restore it") from error
    return [found[round] for round in sorted(found)]


def canary_note(config: RunConfig) -> str:
    """A sentence that whoever gets the model must know; "" for a run without canaries."""
    if config.audit.canaries:
        return (
            f"This run holds {config.audit.canaries} canaries ({config.unit} level): units of its population that "
            "brought made-up updates for an audit. The guarantee holds as stated; the model is for the audit, not for "
            "use."
        )
    if config.data.canaries:
        return (
            f"This run holds canaries: {config.data.canaries} made-up secrets are planted into its training records, "
            f"in {config.data.canary_copies} copies each, for an audit."
        )
    return ""
