"""The round with the lowest validation loss: its adapter is kept on the disk until the run ends with it.

What chooses it are values that everybody may know (losses on public records, or estimates that were paid for), so the
choice is post-processing. The file is written behind the round's record: by then the checkpoint holds the same adapter,
so a run that ended in between writes it again when it is resumed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from privacy import durable
from privacy.errors import CorruptRun
from server.run_folder.names import BEST_FILE
from server.run_folder.round_record import RoundRecord


@dataclass
class BestRound:
    """The best round of a run so far.

    Attributes:
        folder: of the run, or of its phase.
        keeps: whether its adapter is kept.
        patience: evaluations in a row without a better loss after which the run ends; 0 never ends it.
        round: 0 before the first evaluation.
        loss: of that round.
        stale: evaluations since.
    """

    folder: Path
    keeps: bool = False
    patience: int = 0
    round: int = 0
    loss: float = math.inf
    stale: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether patience is at its end."""
        return 0 < self.patience <= self.stale

    def take(self, round: int, loss: float | None, served: Tensor) -> None:
        """Hear of a round that was measured, and keep its adapter if it is the best so far."""
        if self._hear(round, loss) and self.keeps:
            with durable.open_replacement(self.folder / BEST_FILE) as draft:
                save_file({"adapter": served.contiguous()}, draft, {"round": str(round)})

    def go_on(self, records: Sequence[RoundRecord], round: int, served: Tensor) -> None:
        """Hear of the rounds of a resumed run again; ``served`` is the adapter after ``round``, the last one."""
        for record in records:
            if record.phase == "round" and record.round < round:
                self._hear(record.round, record.validation_loss)
            elif record.phase == "round":
                self.take(round, record.validation_loss, served)

    def chosen_adapter(self, round: int, served: Tensor) -> Tensor:
        """The adapter that the run ends with, in place of ``served`` after its last ``round``.

        Raises:
            CorruptRun: that of the best round is gone.
        """
        if not self.keeps or self.round in (0, round):
            return served
        path = self.folder / BEST_FILE
        try:
            with safe_open(path, "pt") as file:
                kept = int((file.metadata() or {})["round"])
                adapter: Tensor = file.get_tensor("adapter")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CorruptRun(f"{path} holds no adapter of round {self.round} ({error}); restore it") from error
        if kept != self.round or adapter.shape != served.shape:
            raise CorruptRun(f"{path} is of round {kept}, the best one is round {self.round}; restore it")
        return adapter

    def _hear(self, round: int, loss: float | None) -> bool:
        if loss is None:
            return False
        better = loss < self.loss
        if better:
            self.round, self.loss = round, loss
        self.stale = 0 if better else self.stale + 1
        return better
