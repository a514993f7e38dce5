"""The prepared data set of a run: tokenised once, then memory-mapped by every process within milliseconds."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data.canaries import Canaries
from client.data.records import Records
from client.data.sensitive import Sensitive
from client.models.tasks import TASKS
from privacy import checks

META_FILE = "meta.json"
FORMAT = 2
PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class DataSpec:
    """Everything that decides the content of a prepared data set.

    Attributes:
        tokenizer: name of the base model whose tokenizer is used, see :func:`client.models.base.load_base`.
        clients: logical clients.
        seed: of the generated notes, the held-out rows and the partition.
        source: ``notes``, ``parquet:PATH``, ``csv:PATH``, ``jsonl:PATH`` or a hub id, see :mod:`client.data.sources`.
        test_source: where the test set is, same syntax; empty carves it out of `source`.
        text_column, text_pair_column, label_column, client_column: columns of `source`; empty for none.
        unit_column: column whose equal values form one unit of privacy (patient, document); empty: every record.
        whole_units: units are dealt to clients whole; else one may have records at several.
        task: ``"classification"``, ``"causal-lm"`` (no labels), or ``"summarisation"`` (no labels; the summary of
            ``text_column`` is in ``text_pair_column``).
        partition: one of :data:`client.data.partition.SCHEMES`.
        dirichlet_alpha: concentration of the label skew.
        validation_records, test_records: sizes of the public validation set and of a test set carved out.
        least_words: records of `source` with fewer words (between blanks) are left out; the test source is not touched.
        test_limit: most records of `test_source` that are tested on, the same for every seed; 0 tests on all.
        train_records: most records dealt to the clients, drawn by the seed; 0 deals all there are.
        records_per_client: generated notes per client, on average; window of the ``repeated`` partition.
        max_length: tokens of a record beyond this are cut off (and counted).
        canaries, canary_kind, canary_copies: secrets planted into the training records, see
        :mod:`client.data.canaries`. sensitive, detector, mask, other_weight: what is done about sensitive spans of the
            training records, see :class:`client.data.sensitive.Sensitive`.
        cache: folder of prepared data sets; empty is ``$XDG_CACHE_HOME/lacquer`` or ``~/.cache/lacquer``.
    """

    tokenizer: str
    clients: int
    seed: int = 0
    source: str = "notes"
    test_source: str = ""
    text_column: str = "text"
    text_pair_column: str = ""
    label_column: str = "label"
    client_column: str = ""
    unit_column: str = ""
    whole_units: bool = False
    task: str = "classification"
    partition: str = "dirichlet"
    dirichlet_alpha: float = 1.0
    validation_records: int = 1000
    test_records: int = 1000
    least_words: int = 0
    test_limit: int = 0
    train_records: int = 0
    records_per_client: int = 20
    max_length: int = 128
    canaries: int = 0
    canary_kind: str = "six-digit"
    canary_copies: int = 10
    sensitive: str = "none"
    detector: str = "regex"
    mask: str = "<MASK>"
    other_weight: float = 0.2
    cache: str = ""

    def check(self) -> None:
        """Refuse what cannot work, before anything is read.

        Raises:
            ValueError: naming the setting, its value and what to do.
        """
        checks.integer_at_least(1, clients=self.clients, records_per_client=self.records_per_client)
        checks.integer_at_least(0, seed=self.seed, train_records=self.train_records, least_words=self.least_words)
        checks.integer_at_least(0, test_limit=self.test_limit)
        checks.integer_at_least(1, validation_records=self.validation_records, test_records=self.test_records)
        checks.integer_at_least(4, max_length=self.max_length)
        checks.positive(dirichlet_alpha=self.dirichlet_alpha)
        checks.one_of(TASKS, task=self.task)
        checks.one_of(("dirichlet", "iid", "natural", "repeated"), partition=self.partition)
        checks.not_empty(source=self.source, text_column=self.text_column, tokenizer=self.tokenizer)
        if self.task == "classification" and not self.label_column:
            raise ValueError("data.label-column must be set for classification, got ''")
        if self.task == "classification" and self.label_column in (self.text_column, self.text_pair_column):
            raise ValueError(f"data.label-column = {self.label_column!r} is a column of texts; name that of the labels")
        if self.partition == "natural" and not self.client_column and self.source != "notes":
            raise ValueError("data.partition = 'natural' needs data.client-column, the column that names the client")
        if self.task == "summarisation" and not self.text_pair_column:
            raise ValueError("data.text-pair-column must name the summaries' column for summarisation, got ''")
        if self.source == "notes" and self.least_words:
            raise ValueError("data.least-words must be 0 for generated notes, which are all long")
        if self.test_limit and not self.test_source:
            raise ValueError(
                f"data.test-limit = {self.test_limit} bounds a test source and there is none; set data.test-source, or "
                "bound the carved-out test set by data.test-records"
            )
        if self.source == "notes" and self.unit_column:
            raise ValueError("data.unit-column must be '' for generated notes, whose unit is the patient anyway")
        _ = self.canaries_planted
        if self.policy.use == "weights" and self.task != "causal-lm":
            raise ValueError(
                f"data.sensitive = 'weights' weights the tokens of a language model; model.task must be 'causal-lm', "
                f"got {self.task!r}"
            )
        if self.policy.use != "none" and self.text_pair_column:
            raise ValueError("data.sensitive works on single texts; data.text-pair-column must be empty")
        if self.partition == "dirichlet" and self.task != "classification":
            raise ValueError("data.partition = 'dirichlet' skews labels and a language model has none; take 'iid'")

    @property
    def canaries_planted(self) -> Canaries:
        """The secrets in the training records."""
        return Canaries(self.canary_kind, self.canaries, self.canary_copies, self.seed)

    @property
    def policy(self) -> Sensitive:
        """What is done about sensitive spans."""
        return Sensitive(self.sensitive, self.detector, self.mask, self.other_weight)

    @property
    def cache_folder(self) -> Path:
        """Where prepared data sets are kept."""
        return Path(self.cache).expanduser() if self.cache else default_cache()

    def to_json(self) -> dict[str, Any]:
        """The settings that decide the content, without where it is kept."""
        return {key: value for key, value in asdict(self).items() if key != "cache"}


def default_cache() -> Path:
    """Where prepared data sets are kept if nobody says where."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lacquer"


@dataclass(frozen=True)
class PreparedData:
    """Clients, public validation records and test records of one data set, memory-mapped.

    Attributes:
        folder: where it is.
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
        """Classes; 0 for a language model."""
        return int(self.meta["num_labels"])

    @property
    def label_names(self) -> tuple[str, ...]:
        """Name of every class as the source has it."""
        return tuple(self.meta["label_names"])

    def predicted_tokens(self, part: str, start: int, stop: int) -> int | None:
        """Tokens that a language model predicts in these records of ``"validation"`` or ``"test"``; None if it is none.

        The first token of a record is given, and so is what has weight 0.
        """
        if self.num_labels:
            return None
        records: Records = getattr(self, part)
        first, last = records.offsets[[start, stop]]
        if records.token_weights is None:
            return int(last - first - (stop - start))
        given = records.token_weights[records.offsets[start:stop]] > 0
        return int((records.token_weights[first:last] > 0).sum() - given.sum())

    def client(self, index: int) -> Records:
        """The records of one client, not copied."""
        if not 0 <= index < self.num_clients:
            raise ValueError(f"client must be in [0, {self.num_clients}), got {index}")
        first, last = int(self.starts[index]), int(self.stops[index])
        labels, units = (None if of is None else of[first:last] for of in (self.train.labels, self.train.units))
        return replace(self.train, offsets=self.train.offsets[first : last + 1], labels=labels, units=units)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
