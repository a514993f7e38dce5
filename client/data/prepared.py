"""A prepared data set: tokenised once, then memory-mapped by every process within milliseconds."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data.records import Records

META_FILE = "meta.json"
FORMAT = 4
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class PreparedData:
    """Clients, public validation records and test records of one data set, memory-mapped.

    Attributes:
        meta: counts, label names, the settings and SHA-256 of every file.
        train: all training records in client order.
        starts, stops: int64 ``[clients]``: client `i` owns rows ``starts[i]:stops[i]`` of `train`.
        client_tokens: int64 ``[clients]``, tokens per client; balances the work of the nodes.
        validation: public; hyper-parameters and thresholds may be chosen on it.
        test: used for reporting only.
    """

    folder: Path
    meta: dict[str, Any]
    train: Records
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    client_tokens: NDArray[np.int64]
    validation: Records
    test: Records

    @staticmethod
    def open(folder: str | Path, *, verify: bool = False) -> "PreparedData":
        """Map a prepared data set; with `verify` every file is read and checked against its SHA-256.

        Raises:
            ValueError: not a prepared data set, another format, or a damaged file.
        """
        folder = Path(folder)
        if not (folder / META_FILE).is_file():
            raise ValueError(f"{folder} is not a prepared data set: it has no {META_FILE}; prepare the data first")
        meta = json.loads((folder / META_FILE).read_text())
        if meta["format"] != FORMAT:
            raise ValueError(f"{folder} has format {meta['format']}, this version reads {FORMAT}; delete the folder")
        if verify:
            for name, expected in meta["files"].items():
                if sha256(folder / name) != expected:
                    raise ValueError(f"{folder / name} is damaged (its SHA-256 is not {expected}); delete the folder")

        def array(name: str) -> NDArray[Any]:
            mapped: NDArray[Any] = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return mapped

        train, validation, test = (
            Records(
                tokens=array(f"{part}_tokens"),
                offsets=array(f"{part}_offsets"),
                **{name: array(f"{part}_{name}") for name in meta["columns"][part]},
            )
            for part in PARTS
        )
        starts, stops, tokens = (array(f"client_{name}") for name in ("starts", "stops", "tokens"))
        return PreparedData(folder, meta, train, starts, stops, tokens, validation, test)

    @property
    def num_clients(self) -> int:
        """Logical clients, empty ones included."""
        return len(self.starts)

    @property
    def num_labels(self) -> int:
        """The number of classes; 0 for a language model."""
        return int(self.meta["num_labels"])

    @property
    def label_names(self) -> tuple[str, ...]:
        """Name of every class as the source has it."""
        return tuple(self.meta["label_names"])

    def predicted_tokens(self, part: str, start: int, stop: int) -> int | None:
        """Tokens that a language model predicts in these records of ``"validation"`` or ``"test"``.

        None where metrics are over records: of a classifier, and of pairs. The first token of a record is given, and so
        is what has weight 0.
        """
        records: Records = getattr(self, part)
        if self.num_labels or records.splits is not None:
            return None
        first, last = records.offsets[[start, stop]]
        if records.token_weights is None:
            return int(last - first - (stop - start))
        given = records.token_weights[records.offsets[start:stop]] > 0
        return int((records.token_weights[first:last] > 0).sum() - given.sum())

    def client(self, index: int) -> Records:
        """The records of one client, not copied."""
        if not 0 <= index < self.num_clients:
            raise ValueError(f"client must be in [0, {self.num_clients}), got {index}")
        return self.train.span(int(self.starts[index]), int(self.stops[index]))


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
