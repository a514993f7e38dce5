"""How far a recipe's run has come: the adapter behind every phase, and a checkpoint inside a private one.

    phases/2/done.safetensors    the adapter behind the second phase, and in its header what PhaseResult tells
    phases/2/checkpoint/         inside it, after every release
    phases/2/<secret>            draws its batches

A phase without noise is trained again from its start, to the same adapter. A private one goes on behind its last
checkpoint. Releases that were charged and are not in it stay spent, and count as steps done: so every later step pays
with the committed step that was meant for it, whatever its noise.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from client.record_level.dp_sgd import PrivateSgd
from privacy import durable
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from server.run_folder.checkpoint import (
    Checkpoint,
    Times,
    checkpoint_folder,
    ledger_head,
    load_checkpoint,
    save_checkpoint,
)
from server.run_folder.errors import CannotResume
from server.run_folder.names import LEDGER_FILE, SAMPLING_SECRET


@dataclass(frozen=True)
class PhaseResult:
    """What a phase ended with.

    Attributes:
        name: of the phase.
        seconds: wall time of its training.
        cpu_seconds: processor time of its training, all threads.
        validation_loss: public, after it.
        adapter: full vector after it.
    """

    name: str
    seconds: float
    cpu_seconds: float
    validation_loss: float
    adapter: Tensor

    def to_json(self) -> dict[str, Any]:
        """Its numbers."""
        return {name: value for name, value in vars(self).items() if name != "adapter"}


_DONE = "done.safetensors"


class Watch:
    """Time taken by a phase: since this was made, and before.

    Attributes:
        before: what it had taken when it was broken off.
    """

    def __init__(self) -> None:
        self.before = Times()
        self._started = time.monotonic(), time.process_time()

    def times(self) -> Times:
        """So far."""
        wall, processor = self._started
        return Times(
            run=self.before.run + time.monotonic() - wall,
            processor=self.before.processor + time.process_time() - processor,
        )


class PhaseFolder:
    """What is kept of phase `number` (from 1) of the run in `run_folder`; made if it is not there."""

    def __init__(self, run_folder: Path, number: int) -> None:
        self.path = run_folder / "phases" / str(number)
        self.path.mkdir(parents=True, exist_ok=True)

    def result(self, name: str, size: int) -> PhaseResult | None:
        """How the phase ended, with an adapter of `size` values; None if it has not.

        Raises:
            CorruptRun: the file is damaged, or of another phase.
        """
        path = self.path / _DONE
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                told, adapter = json.loads(file.metadata()["phase"]), file.get_tensor("adapter")
            result = PhaseResult(**told, adapter=adapter)
            if result.name != name or adapter.dtype != torch.float32 or adapter.shape != (size,):
                raise ValueError(f"it is of phase {result.name!r} and holds {adapter.dtype} {list(adapter.shape)}")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CorruptRun(f"{path} is not of this run: {type(error).__name__}: {error}; restore it") from error
        return result

    def finish(self, result: PhaseResult) -> None:
        """Keep how the phase ended, whole or not at all."""
        told = {"phase": json.dumps(result.to_json())}
        with durable.replacing(self.path / _DONE) as draft:
            save_file({"adapter": result.adapter.detach().cpu().contiguous()}, draft, metadata=told)

    def sampler(self, charged: int) -> CohortSampler:
        """What draws the phase's batches, `charged` of which were paid for.

        Raises:
            CorruptRun: some were, and its secret is gone.
        """
        secret = self.path / SAMPLING_SECRET
        if secret.is_file():
            return CohortSampler.load(secret)
        if charged:
            raise CorruptRun(f"{secret} is gone: without it other batches would be drawn than were; restore it")
        sampler = CohortSampler.fresh()
        sampler.save(secret)
        return sampler

    def save(self, training: PrivateSgd, taken: Times) -> None:
        """Keep the release just made."""
        save_checkpoint(self.path, Checkpoint.after(training.state, training.release, training.ledger.head, taken))

    def go_on(self, training: PrivateSgd, charged: int, observe: Callable[[], None]) -> Times:
        """Bring `training`, which has begun, to where the phase stood; the time it had taken.

        Args:
            training: as :meth:`client.record_level.dp_sgd.PrivateSgd.begin` leaves it.
            charged: releases of this phase that the ledger holds.
            observe: tells the controller of the release of the checkpoint.

        Raises:
            CannotResume: the release was lost that the phase's controller starts from.
        """
        first, taken = training.state.round, Times()
        if checkpoint_folder(self.path) is not None:
            checkpoint = load_checkpoint(self.path, training.state)
            training.restore(checkpoint.state, checkpoint.update, checkpoint.answers)
            observe()
            taken = checkpoint.taken
        lost = charged - (training.state.round - first)
        if lost and training.state.round < 0:
            raise CannotResume(
                f"the run was broken off in the first release of phase {self.path.name}, which its controller starts "
                "from and which is spent; start a new run (which spends a budget of its own)"
            )
        training.state = replace(training.state, round=training.state.round + lost)
        return taken


def reopened_ledger(run_folder: Path, phases: int) -> Ledger | None:
    """The ledger of a recipe's run, verified and held; None if the run has none (yet).

    Raises:
        CannotResume: another process holds it.
        CorruptRun: it was tampered with, is older than the last checkpoint, or is gone.
    """
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        if any(run_folder.glob(f"phases/*/{SAMPLING_SECRET}")):
            raise CorruptRun(f"{path} is gone: without it what was spent would be spent again; restore it")
        return None
    heads = [ledger_head(run_folder / "phases" / str(number)) for number in range(phases, 0, -1)]
    try:
        return Ledger.open(path, next((head for head in heads if head is not None), None))
    except BlockingIOError:
        raise CannotResume(f"{run_folder} is still running: a process holds its ledger; stop that one first") from None
