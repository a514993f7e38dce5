"""The progress of a run in phases: the adapter behind every phase, and a checkpoint inside a private one.

    phases/2/done.safetensors    the adapter behind the second phase, and in its header what PhaseResult tells
    phases/2/checkpoint/         inside it, after every release
    phases/2/sampling.key        draws its batches

A phase without noise is trained again from its start, to the same adapter. One with noise continues behind its last
checkpoint. Releases that were charged and are not in it stay spent, and count as steps done: so every later step pays
with the committed step that was meant for it, whatever its noise.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from privacy import durable
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Charge, Ledger
from privacy.randomness.sampling import CohortSampler
from server.run_folder.checkpoint import read_mark
from server.run_folder.errors import CannotResume
from server.run_folder.names import LEDGER_FILE, PHASE_FILE, PHASES_FOLDER, SAMPLING_SECRET
from server.run_folder.seal import check_tensors, tensors_digest


@dataclass(frozen=True)
class PhaseResult:
    """The outcome of a phase: its numbers and its adapter.

    Attributes:
        seconds: wall time of its training.
        cpu_seconds: processor time of its training, all threads.
        validation_loss: public, after it.
        adapter: full float32 vector ``[d]`` after it.
    """

    name: str
    seconds: float
    cpu_seconds: float
    validation_loss: float
    adapter: Tensor

    def to_json(self) -> dict[str, Any]:
        """The numbers of the result, without its adapter."""
        return {name: value for name, value in vars(self).items() if name != "adapter"}


class PhaseFolder:
    """The folder of phase `number` (from 1) of the run in `run_folder`; made if it is not there."""

    def __init__(self, run_folder: Path, number: int) -> None:
        self.path = run_folder / PHASES_FOLDER / str(number)
        self.path.mkdir(parents=True, exist_ok=True)

    def result(self, name: str, size: int) -> PhaseResult | None:
        """Read how the phase ended, with an adapter of `size` values; None if it has not.

        Raises:
            CorruptRun: the file is damaged, or of another phase.
        """
        path = self.path / PHASE_FILE
        if not path.is_file():
            return None
        with _readable(path) as file:
            adapter = check_tensors(file, "phase")["adapter"]
            result = PhaseResult(**json.loads(file.metadata()["phase"]), adapter=adapter)
            if result.name != name or adapter.dtype != torch.float32 or adapter.shape != (size,):
                raise ValueError(f"it is of phase {result.name!r} and holds {adapter.dtype} {list(adapter.shape)}")
        return result

    def finish(self, result: PhaseResult) -> None:
        """Write how the phase ended, whole or not at all."""
        tensors, said = {"adapter": result.adapter.detach().cpu().contiguous()}, json.dumps(result.to_json())
        with durable.open_replacement(self.path / PHASE_FILE) as draft:
            save_file(tensors, draft, metadata={"phase": said, "sha256": tensors_digest(said, tensors)})

    def sampler(self, charged: int) -> CohortSampler:
        """Load or make what draws the phase's batches.

        Args:
            charged: number of batches that were paid for.

        Raises:
            CorruptRun: some were, and the secret that drew them is gone.
        """
        secret = self.path / SAMPLING_SECRET
        if secret.is_file():
            return CohortSampler.load(secret)
        if charged:
            raise CorruptRun(f"{secret} is gone: without it other batches would be drawn than were; restore it")
        sampler = CohortSampler.create()
        sampler.save(secret)
        return sampler


def ended_phases(run_folder: Path) -> tuple[dict[str, Any], ...]:
    """The numbers of the phases that have ended, in order, as :meth:`PhaseResult.to_json` gives them.

    Raises:
        CorruptRun: a phase's file is damaged.
    """
    ended: list[dict[str, Any]] = []
    while (path := run_folder / PHASES_FOLDER / str(len(ended) + 1) / PHASE_FILE).is_file():
        with _readable(path) as file:
            check_tensors(file, "phase")
            values = json.loads(file.metadata()["phase"])
            numbers = {key: float(values[key]) for key in ("seconds", "cpu_seconds", "validation_loss")}
            ended.append({"name": str(values["name"]), **numbers})
    return tuple(ended)


@contextmanager
def _readable(path: Path) -> Iterator[Any]:  # safetensors names no type for an open file
    """Open the file of an ended phase for reading.

    Raises:
        CorruptRun: it is none, or what is read of it is not as it was written.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptRun(f"{path} is not of this run: {type(error).__name__}: {error}; restore it") from error


def reopened_ledger(run_folder: Path, phases: int) -> Ledger | None:
    """Open the ledger of a run in phases, verified and held; None if the run has none (yet).

    Raises:
        CannotResume: another process holds it.
        CorruptRun: it was tampered with, is older than the last checkpoint, or is gone.
    """
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        if any(run_folder.glob(f"{PHASES_FOLDER}/*/{SAMPLING_SECRET}")):
            raise CorruptRun(f"{path} is gone: without it what was spent would be spent again; restore it")
        return None
    marks = [read_mark(run_folder / PHASES_FOLDER / str(number)) for number in range(phases, 0, -1)]
    try:
        return Ledger.open(path, next((mark.ledger_head for mark in marks if mark is not None), None))
    except BlockingIOError:
        raise CannotResume(f"{run_folder} is still running: a process holds its ledger; stop that one first") from None


def charges_of(run_folder: Path) -> tuple[Charge, ...]:
    """The charges in the ledger of the run in a folder, so far; none where it has no ledger."""
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        return ()
    with Ledger.open(path, read_only=True) as ledger:
        return ledger.charges
