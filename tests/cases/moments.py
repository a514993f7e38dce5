"""What the disk holds of a run at every moment at which a kill may fall. Not a test.

A run that is killed leaves what it had written. So its folder is copied before a file is brought to the disk or put
in its place (``fsync``, ``rename``), before every draw of noise and before every evaluation, and the run goes on: one
whole run gives every folder that a killed one can leave. A loss of power may also take what is not yet on the disk: in
a second copy of such a moment, the file has half of what is new in it.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from client.engine.cohort import CohortEngine
from privacy.ledger.ledger import Ledger
from privacy.randomness.correlated import CorrelatedNoise
from privacy.randomness.noise import GaussianNoise, Noise
from privacy.randomness.sampling import CohortSampler
from server.run_folder.names import CHECKPOINT_FOLDER, LEDGER_FILE, SITES_FILE

DRAFT = re.compile(r"^\.(.+)\.[0-9a-f]{16}\.new$")
KEPT = (f"rename .{CHECKPOINT_FOLDER}.new", f"rename {SITES_FILE}")
"""What puts a checkpoint in its place."""


@dataclass(frozen=True)
class Moment:
    """A copy of a run's folder.

    Attributes:
        name: what the run was about to do: ``noise``, ``evaluate``, or sync or rename of a file.
        torn: whether the file that was about to be synced has half of what is new in it.
        folder: the copy.
        charged: how many charges its ledgers hold.
        kept: how many of them its last checkpoint knows of; the others are lost.
    """

    name: str
    torn: bool
    folder: Path
    charged: int
    kept: int


@dataclass
class Witness:
    """Watches a run in a folder.

    Attributes:
        folder: of the run.
        copies: where the moments go; None keeps none.
        quiet: noise is zero and every cohort that of one secret, so that all runs release the same.
        kept: how many charges need not be counted as lost: those that the last checkpoint knows of.
        draws: how often noise was drawn.
    """

    folder: Path
    copies: Path | None = None
    quiet: bool = True
    kept: int = 0
    draws: int = 0
    moments: list[Moment] = field(default_factory=list)
    _durable: dict[Path, int] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block ends."""
        self._durable = {path: path.stat().st_size for path in self.folder.rglob("*") if path.is_file()}
        fsync, evaluate = os.fsync, CohortEngine.evaluate

        def evaluated(engine: CohortEngine, *given: Any) -> Any:
            self._copy("evaluate")
            return evaluate(engine, *given)

        def watched(draw: Callable[[Any, Sequence[tuple[float, int]]], torch.Tensor]) -> Callable[..., torch.Tensor]:
            def drawn(noise: Noise, blocks: Sequence[tuple[float, int]]) -> torch.Tensor:
                self._copy("noise")
                self.draws += 1
                found = draw(noise, blocks)
                return torch.zeros_like(found) if self.quiet else found

            return drawn

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: self._synced(descriptor, fsync))
            for name in ("rename", "replace", "link"):
                patch.setattr(os, name, self._renaming(getattr(os, name)))
            for kind in (GaussianNoise, CorrelatedNoise):
                patch.setattr(kind, "draw", watched(kind.draw))
            patch.setattr(CohortEngine, "evaluate", evaluated)
            if self.quiet:
                patch.setattr(
                    CohortSampler, "create", lambda: CohortSampler(b"one of all runs, 32 bytes long. ", False)
                )
            yield

    def _synced(self, descriptor: int, sync: Callable[[int], None]) -> None:
        path = self._file(descriptor)
        if path is not None:
            what = f"sync {_named(path)}"
            self._copy(what)
            self._copy(what, path)
        sync(descriptor)
        if path is not None:
            self._durable[path] = path.stat().st_size

    def _file(self, descriptor: int) -> Path | None:
        """An open file of the run; None for what is read by nobody until it is renamed, and for folders."""
        status = os.fstat(descriptor)
        for path in self.folder.rglob("*"):
            if path.is_file() and not any(part.endswith(".new") for part in path.parts):
                if os.path.samestat(path.stat(), status):
                    return path
        return None

    def _renaming(self, rename: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def renamed(source: Any, target: Any) -> None:
            name = f"rename {_named(Path(source))}"
            if ours := Path(source).is_relative_to(self.folder):
                self._copy(name)
            rename(source, target)
            if ours and Path(target).is_file():
                self._durable[Path(target)] = Path(target).stat().st_size
            if ours and name in KEPT:
                self.kept = len(charges(self.folder))

        return renamed

    def _copy(self, name: str, torn: Path | None = None) -> None:
        if self.copies is None:
            return
        copy = self.copies / str(len(self.moments))
        shutil.copytree(self.folder, copy)
        if torn is not None:
            size, before = torn.stat().st_size, self._durable.get(torn, 0)
            os.truncate(copy / torn.relative_to(self.folder), before + (size - before) // 2)
        self.moments.append(Moment(name, torn is not None, copy, len(charges(copy)), self.kept))


def _named(path: Path) -> str:
    """Of a file; that of a draft is the name of the file it will replace, that of a ledger tells its last line."""
    if path.name == LEDGER_FILE:
        return str(json.loads(path.read_text().splitlines()[-1])["kind"])
    found = DRAFT.match(path.name)
    return found[1] if found else path.name


def charges(folder: Path) -> list[tuple[str, str, int]]:
    """Of every ledger below a folder: where it lies, and label and round of every charge."""
    found = []
    for path in sorted(folder.rglob(LEDGER_FILE)):
        with Ledger.open(path, read_only=True) as ledger:
            found += [(str(path.relative_to(folder)), event.label, event.round) for event in ledger.events]
    return found
