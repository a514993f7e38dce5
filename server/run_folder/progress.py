"""The progress of a run over sites: one file, written whole or not at all after every round.

    sites.safetensors    the adapter (residual, served average, public texts and state of the server's optimizer, if
                         there are any), and in its header the round and what the sites have said

The server has no ledger to lose: what a site charged for a round that this file does not hold stays spent in the
site's own ledger, which continues behind it, so such a run may end that many steps earlier. The file ``run.lock``
keeps a second process out, as the ledger does for other runs.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from client.data.records import Records
from privacy import durable
from privacy.errors import CorruptRun
from server.run_folder.errors import CannotResume
from server.run_folder.names import LOCK_FILE, SITES_FILE
from server.run_folder.seal import check_tensors, tensors_digest
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.residual import check_residual
from strategies.sites import GlobalModel

FORMAT = 1
_OPTIMIZER = "optimizer."
_TEXTS = ("tokens", "offsets")


@dataclass(frozen=True)
class SiteGuarantee:
    """The guarantee that a site last stated; see :class:`client.record_level.messages.SiteReply`."""

    epsilon: float
    population: int
    noise_multiplier: float


@dataclass
class Progress:
    """The state of a run over sites behind its last round.

    Attributes:
        round: the last one done.
        sites: guarantees of the sites, by number.
        steps: taken by all of them, in all rounds.
        refusals: reasons of the sites that took no step when last asked, by number.
        texts: public ones of the next round, where sites send coefficients of their gradients.
        optimizer: tensors of the server's optimizer, where it has one.
    """

    model: GlobalModel
    round: int = 0
    sites: dict[int, SiteGuarantee] = field(default_factory=dict)
    steps: int = 0
    refusals: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    texts: Records | None = None
    optimizer: dict[str, Tensor] = field(default_factory=dict)

    def summary(self) -> str:
        """Rounds done, and which sites never took a step, with what they said last."""
        idle = [f"site {site}: {said}" for site, said in sorted(self.refusals.items()) if site not in self.sites]
        without = f"; {len(idle)} took no step: {'; '.join(idle)}" if idle else ""
        return f"{self.round} rounds done{without}"

    def end_reason(self, sites: int) -> str | None:
        """The reason why none of so many sites takes part any more; None if one does."""
        if len(self.refusals) < sites:
            return None
        said = "; ".join(f"site {site}: {reason}" for site, reason in sorted(self.refusals.items()))
        return f"no site continues: {said}"


def save_progress(folder: Path, progress: Progress, records: tuple[int, str] | None = None) -> None:
    """Write the progress of a run over sites. A crash at any moment leaves the previous file or this one.

    Args:
        records: how many records of rounds there are, and their digest.
    """
    values = {
        "format": FORMAT,
        "records": records,
        "round": progress.round,
        "silos": {site: asdict(said) for site, said in progress.sites.items()},
        "steps": progress.steps,
        "refusals": progress.refusals,
        "seconds": progress.seconds,
    }
    tensors = {name: tensor.contiguous() for name, tensor in vars(progress.model).items() if tensor is not None}
    tensors |= {f"{_OPTIMIZER}{name}": tensor.contiguous() for name, tensor in progress.optimizer.items()}
    if progress.texts is not None:
        tensors |= {name: torch.from_numpy(np.array(getattr(progress.texts, name))) for name in _TEXTS}
    said = json.dumps(values)
    with durable.open_replacement(folder / SITES_FILE) as draft:
        save_file(tensors, draft, metadata={"progress": said, "sha256": tensors_digest(said, tensors)})


def load_progress(folder: Path, layout: AdapterLayout) -> Progress:
    """Load the progress that :func:`save_progress` wrote.

    Raises:
        CorruptRun: the file is damaged, or of a run with another adapter.
    """
    values, tensors, noted = _read(folder)
    try:
        adapter, residual, average = (tensors.get(name) for name in ("adapter", "residual", "average"))
        if adapter is None or adapter.dtype != torch.float32 or adapter.shape != (layout.size,):
            found = None if adapter is None else f"{adapter.dtype} {list(adapter.shape)}"
            raise ValueError(f"it holds {found}, this run has {layout.size} values")
        if residual is not None:
            check_residual(residual, layout)
        kept = [name for name in tensors if name.startswith(_OPTIMIZER)]
        optimizer = {name.removeprefix(_OPTIMIZER): tensors[name] for name in kept}
        texts = Records(*(tensors[name].numpy() for name in _TEXTS)) if "tokens" in tensors else None
        refusals = {int(site): str(reason) for site, reason in values.pop("refusals").items()}
        model = GlobalModel(adapter, residual, average)
        return Progress(
            model, sites=dict(noted.guarantees), refusals=refusals, texts=texts, optimizer=optimizer, **values
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_of_this_run(folder / SITES_FILE, error) from error


@dataclass(frozen=True)
class Noted:
    """The content of a progress file beside the model.

    Attributes:
        guarantees: of the sites, by number.
        records: number of records of rounds, and their digest; None where nobody counted.
    """

    guarantees: Mapping[int, SiteGuarantee]
    records: tuple[int, str] | None = None


def read_noted(folder: Path) -> Noted:
    """Read what a run over sites has noted; nothing before its first round, and for other runs.

    Raises:
        CorruptRun: the file is damaged.
    """
    return _read(folder)[2] if (folder / SITES_FILE).is_file() else Noted({})


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Noted]:
    """Read what a progress file's header has for the run alone, its tensors, and what is for others."""
    try:
        with safe_open(folder / SITES_FILE, "pt") as file:
            tensors, values = check_tensors(file, "progress"), json.loads(file.metadata()["progress"])
        if (found := values.pop("format")) != FORMAT:
            raise ValueError(f"it has format {found!r}, this code reads {FORMAT}")
        guarantees = {int(site): SiteGuarantee(**said) for site, said in values.pop("silos").items()}
        records = values.pop("records", None)
        return values, tensors, Noted(guarantees, None if records is None else (int(records[0]), str(records[1])))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_of_this_run(folder / SITES_FILE, error) from error


def _not_of_this_run(path: Path, error: Exception) -> CorruptRun:
    return CorruptRun(f"{path} is not of this run: {type(error).__name__}: {error}; restore it")


@contextmanager
def hold_folder(folder: Path, lock: str = LOCK_FILE) -> Iterator[None]:
    """Hold a folder's lock, so that this process is its one owner meanwhile.

    Args:
        lock: name of the file that is held.

    Raises:
        CannotResume: another process trains in it, or starts a run there.
    """
    with (folder / lock).open("a") as file:
        try:
            durable.lock(file.fileno(), f"{folder} is still running: a process holds its lock; stop that one first")
        except BlockingIOError as error:
            raise CannotResume(error.strerror) from None
        yield


def is_owned(folder: Path, lock: str = LOCK_FILE) -> bool:
    """Whether a process trains in the folder now, or holds another ``lock`` there.

    The call holds the lock itself for a moment, so make it now and then only.
    """
    try:
        with (folder / lock).open("r") as file:
            durable.lock(file.fileno(), "")
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
