"""The times a run went on after a break: a line each in ``resumed.jsonl``, for the report."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from privacy.errors import CorruptRun

RESUMES_FILE = "resumed.jsonl"


@dataclass(frozen=True)
class Resumed:
    """One time a run went on.

    Attributes:
        round: the last one released before; 0 if only the initial release or nothing was, -1 if not even that.
        time: seconds since 1970.
        lost: charges so far that no released round stands for: the run was broken off between the charge and the
            checkpoint, or the round failed. They stay spent.
        code: what of the code was different from that at the start, in words.
    """

    round: int
    time: float
    lost: int
    code: tuple[str, ...] = ()


def note_resumed(run_folder: Path, resumed: Resumed) -> None:
    """Add a line to resumed.jsonl."""
    with (run_folder / RESUMES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(resumed)) + "\n")


def read_resumed(run_folder: Path) -> tuple[Resumed, ...]:
    """Every time a run went on, in order; CorruptRun if a line is none of ours."""
    path = run_folder / RESUMES_FILE
    if not path.is_file():
        return ()
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return tuple(Resumed(**{**line, "code": tuple(line["code"])}) for line in lines)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptRun(f"{path} is not what a resumed run writes: {error}") from error
