"""Digests of what a run has written for good, as ``sha256sum`` writes them: a file changed or lost is named.

    sha256sum -c files.sha256      in the run's folder, checks them without Lacquer

Written at the start for what never changes again, and once more at the end for everything that a report or an export
reads. It has no key: it finds accidents and careless edits, and whoever edits a file can write its digest too. So no
guarantee rests on it; what a ledger proves is proved without it (:mod:`server.run_folder.verify`).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from privacy import durable
from privacy.errors import CorruptRun
from server.run_folder import names

STARTED = (names.ORIGIN_FILE, names.PHASES_FILE, names.COMMITMENT_FILE, names.DATA_FILE, names.SOURCE_FILE,
    f"{names.START_FOLDER}/*", f"{names.START_FOLDER}/*/*")  # fmt: skip
"""Files that are written before anything is spent, and never again."""
ENDED = (
    *STARTED,
    names.CONFIG_FILE,
    names.LEDGER_FILE,
    names.SITES_FILE,
    names.ROSTER_FILE,
    names.FACTS_FILE,
    names.ENVIRONMENT_FILE,
    names.RESUMES_FILE,
    names.METRICS_FILE,
    names.TIMES_FILE,
    names.PRIVACY_FILE,
    names.STAMP_FILE,
    names.CANARIES_FILE,
    f"{names.ADAPTER_FOLDER}/*",
    f"{names.PHASES_FOLDER}/*/{names.PHASE_FILE}",
)
UNSHARED = (names.DATA_FILE, names.SOURCE_FILE, names.PHASES_FOLDER)
"""Files that are left out of a folder that is given to others."""


def write_seal(folder: Path, patterns: tuple[str, ...], coming: Mapping[str, str] | None = None) -> None:
    """Write the digests of a run's files.

    Args:
        folder: of the run.
        patterns: files below it, those of them that there are.
        coming: text of files that are written next, by name.
    """
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    digests = {str(path.relative_to(folder)): _digest(path) for path in found}
    digests |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (coming or {}).items()}
    text = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    durable.write(folder / names.SEAL_FILE, text)


def check_seal(folder: Path, *, ended: bool) -> None:
    """Compare a run's files with their digests; a folder without digests passes.

    Args:
        ended: whether the run has; before that only what it began with must be as it was.

    Raises:
        CorruptRun: the first file that is gone or was changed.
    """
    path = folder / names.SEAL_FILE
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or name.startswith(("/", "..")):
            raise CorruptRun(f"{path} line {number} is no digest and a file's name, got {line[:80]!r}; restore it")
        if not ended and name not in STARTED and not name.startswith(f"{names.START_FOLDER}/"):
            continue
        if not (folder / name).is_file():
            if name.partition("/")[0] in UNSHARED:
                continue
            raise CorruptRun(f"{folder / name} is missing, which the run has written; restore it")
        if _digest(folder / name) != digest:
            raise CorruptRun(
                f"{folder / name} is not as the run has written it ({path.name} has its digest); restore it"
            )


def tensors_digest(said: str, tensors: Mapping[str, Tensor]) -> str:
    """The digest of a file's tensors and of what its header says beside them; stands in the header."""
    return hashlib.sha256(said.encode() + save(dict(tensors))).hexdigest()


def check_tensors(file: Any, key: str) -> dict[str, Tensor]:
    """Load all tensors of an open safetensors file, which must have the digest in its header.

    Args:
        key: entry of the header that :func:`tensors_digest` was given.

    Raises:
        ValueError: the digest is not theirs; a file without one passes.
    """
    tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    if header.get("sha256", digest := tensors_digest(header[key], tensors)) != digest:
        raise ValueError("its digest is not that of its content")
    return tensors


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
