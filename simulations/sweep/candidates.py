"""A private sweep as it runs: one event, charged first; candidates that nobody is told of; one run that is released.

    OUTPUT/NAME-private/
        tuning.jsonl     the ledger of the event (privacy/ledger/tuning.py); outlives everything else
        draw.json        which candidates there are; readable by its owner only, gone at the end
        candidates/0 ... their run folders; gone at the end, but for the best
        chosen/          the best candidate: the only thing that is released
        results.json     its row

The order is that of the proof. The draw is on the disk, sealed by the ledger, before the first candidate begins, so
that a sweep that was killed goes on with the same candidates: one that was interrupted is resumed within its own
ledger, one that failed counts as the worst. The end is written before anything is removed.
"""

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from privacy import durable
from privacy.commitment import Commitment, Tuning
from privacy.errors import AccountRefused, CorruptRun
from privacy.ledger.account import Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.tuning import TuningLedger
from privacy.randomness.tries import draw
from server.config.account import account_of
from server.config.load import ConfigError
from server.run_folder import handed_on
from server.run_folder.errors import CannotResume
from server.run_folder.names import CANDIDATE_FILE, LEDGER_FILE, RESULTS_FILE, TUNING_FILE
from server.run_folder.resume import check_resumable
from simulations.report.read_run import read_run
from simulations.sweep.cells import Cell
from simulations.sweep.rows import Row, is_complete, row, write_results
from simulations.sweep.runner import INTERRUPTED, Outcome, run_cells, write_cell
from simulations.sweep.tuning import TuningPlan

DRAW_FILE, CANDIDATES, CHOSEN = "draw.json", "candidates", "chosen"
FAILURE_FILE, NOTE_FILE = "failed.txt", "README.txt"
_NOTE = (
    "Candidates of a private sweep. Neither they nor their number may leave this host: the guarantee is for the best "
    "of them alone, which will lie in ../chosen. They are removed when the sweep has ended.\n"
)


@dataclass(frozen=True)
class Released:
    """The release of a private sweep: a candidate with its folder and row; none of them if there was no candidate."""

    cell: Cell | None = None
    folder: Path | None = None
    row: Row | None = None


class PrivateSweep:
    """The folder of a private sweep, charged and held by this process until :meth:`close`."""

    def __init__(self, name: str, folder: Path, cells: Sequence[Cell], plan: TuningPlan) -> None:
        """Charge the event, or find it charged.

        Args:
            folder: of the sweep; made if it is not there.

        Raises:
            ConfigError: another sweep was charged in this folder, or another process is at it.
            CorruptRun: the ledger or the draw is not what it was.
        """
        self.folder, self._name, self._plan = folder, name, plan
        self._drawn: list[str]
        self._cells = {cell.key: cell for cell in cells}
        path = folder / TUNING_FILE
        durable.new_folder(folder)
        if not path.is_file():
            if (folder / CANDIDATES).exists() or (folder / CHOSEN).exists():
                raise CorruptRun(
                    f"{path} is gone, and candidates were run by it; restore it. What it paid for is spent"
                )
            self._charge(path)
        else:
            try:
                self._ledger = TuningLedger.open(path)
            except BlockingIOError as error:
                raise ConfigError(f"{folder} is at work: {error.strerror}; let that one end") from error
            try:
                self._find(path)
            except BaseException:
                self._ledger.close()
                raise

    def close(self) -> None:
        """Let go of the sweep's folder."""
        self._ledger.close()

    @property
    def ended(self) -> bool:
        """Whether it is settled what is released."""
        return self._ledger.released is not None

    def run(self, jobs: int, plugins: Path, look: Callable[[], None]) -> None:
        """Run the candidates that have not ended; `look` is called between whiles.

        Raises:
            CannotResume: why a candidate cannot begin, or go on where it was interrupted; with that put right, the same
                sweep goes on.
        """
        unbegun: list[str] = []
        todo = [number for number in range(len(self._drawn)) if not self._is_over(number)]
        for number in todo:
            self._prepare(number)
        candidates = [replace(self._cells[self._drawn[number]], key=str(number)) for number in todo]

        def ended(outcome: Outcome) -> None:
            folder = self._candidate(int(outcome.cell.key))
            if outcome.row is not None or outcome.error == INTERRUPTED:
                return
            if (folder / LEDGER_FILE).is_file():
                durable.write(folder / FAILURE_FILE, f"{outcome.error}\n")
            else:  # it has released nothing and could release nothing: whoever runs it again runs it for the first time
                unbegun.append(outcome.error)

        run_cells(
            [one for one in candidates if not self._is_over(int(one.key))],
            lambda cell: self._candidate(int(cell.key)), jobs, plugins, lambda *_: None, ended, look,
        )  # fmt: skip
        if unbegun:
            raise CannotResume(f"a candidate cannot begin; put it right, and the same sweep goes on: {unbegun[0]}")

    def release(self) -> Released:
        """Settle which candidate is released, remove all others, and say what there is; may be called again."""
        if not self.ended:
            best = self._best()
            if best is None:
                self._ledger.end(None, None)
            else:
                self._ledger.end(self._drawn[best], _head(self._candidate(best)))
        assert self._ledger.released is not None
        key, head = self._ledger.released["cell"], self._ledger.released["ledger"]
        if key is None:
            (self.folder / DRAW_FILE).unlink(missing_ok=True)
            return Released()
        chosen = self.folder / CHOSEN
        if not chosen.is_dir():
            found = [folder for folder in sorted((self.folder / CANDIDATES).glob("*/")) if _head(folder) == head]
            if len(found) != 1:
                raise CorruptRun(f"the candidate that {self.folder / TUNING_FILE} releases is gone; restore it")
            os.rename(found[0], chosen)
            durable.sync(self.folder)
        if (self.folder / CANDIDATES).is_dir():
            shutil.rmtree(self.folder / CANDIDATES)
        (self.folder / DRAW_FILE).unlink(missing_ok=True)
        entry = row(self._cells[key], chosen)
        write_results(self.folder / RESULTS_FILE, self._name, [entry])
        for path in (*self.folder.rglob("*"), self.folder):  # when the best one ran tells how many ran before and after
            os.utime(path)
        return Released(self._cells[key], chosen, entry)

    @property
    def failures(self) -> list[str]:
        """The reasons why candidates failed: for the operator, where none was left to release."""
        files = sorted((self.folder / CANDIDATES).glob(f"*/{FAILURE_FILE}"))
        return list(dict.fromkeys(file.read_text(encoding="utf-8").strip() for file in files))

    def _charge(self, path: Path) -> None:
        """Draw, then charge; a draw that nothing was charged for was never used."""
        keys = list(self._cells)
        self._drawn = [keys[number] for number in draw(self._plan.tries, len(keys))]
        drawn = self._draw(self._drawn, secrets.token_hex(32))
        durable.write(self.folder / DRAW_FILE, json.dumps(drawn) + "\n", mode=0o600)
        commitment = next(iter(self._plan.noise.values())).commitment
        self._ledger = self._paid(
            commitment, lambda: TuningLedger.charge(path, commitment, self._plan.statement, drawn)
        )

    def _paid(self, commitment: Commitment, charge: Callable[[], TuningLedger]) -> TuningLedger:
        """The ledger of the event, charged and debited to the account of its data before a candidate begins."""
        if (account := account_of(next(iter(self._cells.values())).config)) is None:
            return charge()
        try:
            with Account.open(*account) as held:
                if not (self.folder / TUNING_FILE).is_file():
                    held.check(commitment)
                ledger = charge()
                held.debit("", commitment, str(self.folder))
        except AccountRefused as error:
            raise ConfigError(f"privacy.account: {error}") from error
        return ledger

    def _find(self, path: Path) -> None:
        asked = next(iter(self._plan.noise.values())).commitment
        if replace(asked, tuning=self._tuning(asked)) != self._ledger.commitment:
            raise ConfigError(
                f"{path} was charged for other candidates, tries, noise or another guarantee than is asked for now "
                f"({self._ledger.statement}). Put the sweep's file, --tries, --draw and --only back, or give another "
                "--output, which spends a budget of its own"
            )
        if self.ended:
            self._drawn = []
            return
        self._paid(self._ledger.commitment, lambda: self._ledger)
        try:
            drawn = json.loads((self.folder / DRAW_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CorruptRun(f"{self.folder / DRAW_FILE} cannot be read ({error}); restore it") from error
        self._ledger.check_draw(drawn)
        self._drawn = [key for key, _ in drawn["candidates"]]
        if drawn["candidates"] != self._draw(self._drawn, "")["candidates"]:
            raise ConfigError(f"{path} was charged for cells with other settings; put the sweep's file back")

    def _tuning(self, commitment: Commitment) -> Tuning:
        """The tuning of a commitment, under the name of the event that was charged."""
        assert commitment.tuning is not None
        return replace(commitment.tuning, id=self._ledger.tuning.id)

    def _draw(self, keys: Sequence[str], salt: str) -> dict[str, Any]:
        known = {key: cell.digest for key, cell in self._cells.items()}
        return {"salt": salt, "candidates": [[key, known.get(key, "")] for key in keys]}

    def _candidate(self, number: int) -> Path:
        return self.folder / CANDIDATES / str(number)

    def _is_over(self, number: int) -> bool:
        folder = self._candidate(number)
        return (folder / FAILURE_FILE).is_file() or is_complete(folder)

    def _prepare(self, number: int) -> None:
        """Make the folder of a candidate, with its noise; one that was interrupted must be able to go on."""
        folder, cell = self._candidate(number), self._cells[self._drawn[number]]
        durable.new_folder(folder)
        (folder.parent / NOTE_FILE).write_text(_NOTE, encoding="utf-8")
        if (folder / LEDGER_FILE).is_file():
            try:
                check_resumable(folder)
            except CorruptRun as error:  # nothing can be made of it any more, whoever tries
                durable.write(folder / FAILURE_FILE, f"{error}\n")
            except CannotResume as error:
                raise CannotResume(f"a candidate cannot go on: {error}") from error
            return
        noise = self._plan.noise[cell.key]
        commitment = replace(noise.commitment, tuning=self._tuning(noise.commitment))
        write_cell(cell, folder)
        durable.write(folder / CANDIDATE_FILE, json.dumps({"cell": cell.key}) + "\n")
        handed_on.write_noise(folder, cell.config, noise._replace(commitment=commitment).to_json())

    def _best(self) -> int | None:
        """The candidate with the best score; of equal ones the first, which of them it is being chance."""
        over = [number for number in range(len(self._drawn)) if is_complete(self._candidate(number))]
        for number in over:
            with Ledger.open(self._candidate(number) / LEDGER_FILE, read_only=True) as ledger:
                if ledger.commitment.tuning != self._ledger.tuning:
                    raise CorruptRun(f"{ledger.path} is not of a candidate of this sweep; restore it")
        return max(over, key=lambda number: _score(self._candidate(number)), default=None)


def _score(folder: Path) -> tuple[float, float]:
    """The score of a complete candidate on public validation records: accuracy of labels, then loss.

    Not a number is worst.
    """
    results: Mapping[str, Any] = read_run(folder).results or {}
    accuracy = results.get("validation_accuracy") if "validation_perplexity" not in results else None
    loss = float(results["validation_loss"])
    return (0.0 if accuracy is None else float(accuracy), -math.inf if math.isnan(loss) else -loss)


def _head(folder: Path) -> str | None:
    """The mark of the last line of a candidate's ledger."""
    if not (folder / LEDGER_FILE).is_file():
        return None
    with Ledger.open(folder / LEDGER_FILE, read_only=True) as ledger:
        return ledger.head
