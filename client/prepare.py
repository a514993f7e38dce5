"""From texts to a prepared data set: hold out, tokenise, partition, write.

A data set is named by a hash of its settings, the content of its sources, the tokenizer and the code that builds it.
It is written to a folder of its own and renamed into place, so a reader sees all of it or nothing, and of two processes
that build the same one the first wins and the other takes that.
"""

import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from client import held_out, note_writer, notes, partition, sources
from client.data import FORMAT, META_FILE, PARTS, DataSpec, PreparedData, sha256
from client.held_out import columns, hold_out, test_columns
from client.models import load_tokenizer
from client.records import Records
from client.sources import Texts

log = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 8192


def build(spec: DataSpec) -> PreparedData:
    """Open the data set of `spec` if it is in the cache (verified), build it otherwise."""
    tokenizer = load_tokenizer(spec.tokenizer)
    key = _key(spec, tokenizer)
    folder = spec.cache_folder / key
    if not folder.is_dir():
        spec.cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=spec.cache_folder, ignore_cleanup_errors=True) as made:
            _write(Path(made) / "data", spec, tokenizer)
            try:
                os.rename(Path(made) / "data", folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster, and its data set is the same
                    raise
    return PreparedData.open(folder, verify=True)


def _key(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything the files depend on."""
    if spec.source == sources.NOTES:
        content = [note_writer.grammar_text(), importlib.metadata.version("faker")]
    else:
        content = [sources.fingerprint(spec.source, columns(spec))]
    if spec.test_source:
        content.append(sources.fingerprint(spec.test_source, test_columns(spec), "data.test-source"))
    # any change of the code that decides the content gives new names: nobody has to remember a version number
    code = [
        inspect.getsource(module)
        for module in (notes, note_writer, sources, held_out, partition, sys.modules[__name__])
    ]
    versions = [importlib.metadata.version("flwr-datasets"), importlib.metadata.version("tokenizers")]
    backend: Any = tokenizer
    # Truncation is left behind by whoever used the tokenizer last, in this process or another.
    definition = {**json.loads(backend.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    parts = [FORMAT, spec.to_json(), content, code, definition, versions]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _write(folder: Path, spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    held = hold_out(spec)
    folder.mkdir()
    records: dict[str, Records] = {}
    truncated: dict[str, int] = {}
    for part in PARTS:
        labels = held.labels.get(part)
        records[part], truncated[part] = tokenise(held.texts[part], labels, tokenizer, spec)
    owners = _partition(spec, records["train"], held.texts["train"])
    records["train"] = records["train"].select(owners.order)
    lengths = np.concatenate([[0], np.cumsum(records["train"].lengths)])
    arrays: dict[str, NDArray[Any]] = {
        "client_starts": owners.starts,
        "client_stops": owners.stops,
        "client_tokens": lengths[owners.stops] - lengths[owners.starts],
    }
    for part in PARTS:
        arrays[f"{part}_tokens"] = records[part].tokens
        arrays[f"{part}_offsets"] = records[part].offsets
        label_ids = records[part].labels
        if label_ids is not None:
            arrays[f"{part}_labels"] = label_ids
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    meta = {
        "format": FORMAT,
        "spec": spec.to_json(),
        "num_labels": len(held.label_names),
        "label_names": held.label_names,
        "records": {part: len(records[part]) for part in PARTS},
        "tokens": {part: len(records[part].tokens) for part in PARTS},
        "truncated": truncated,
        "removed": held.removed,
        "clients": len(owners),
        "empty_clients": int((owners.sizes == 0).sum()),
        "files": {f"{name}.npy": sha256(folder / f"{name}.npy") for name in sorted(arrays)},
    }
    (folder / META_FILE).write_text(json.dumps(meta, indent=1, sort_keys=True))
    log.info("prepared %s: %s", spec.source, {key: meta[key] for key in ("records", "truncated", "removed")})


def tokenise(
    texts: Texts, labels: NDArray[np.int64] | None, tokenizer: PreTrainedTokenizerBase, spec: DataSpec
) -> tuple[Records, int]:
    """Token ids with the tokenizer's special tokens, at most ``max_length``; how many records were cut.

    Language models get an end-of-text token behind every record if the tokenizer does not put one there.
    """
    end = tokenizer.eos_token_id if spec.task == "causal-lm" else None
    rows: list[list[int]] = []
    truncated = 0
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        chunk = slice(start, start + _TEXTS_AT_ONCE)
        encoded = tokenizer(
            texts.texts[chunk],
            None if texts.pairs is None else texts.pairs[chunk],
            truncation=True,
            max_length=spec.max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        truncated += sum(bool(encoding.overflowing) for encoding in encoded.encodings or [])
        rows += encoded["input_ids"]
    if end is not None:
        rows = [row if row and row[-1] == end else [*row[: spec.max_length - 1], end] for row in rows]
    if any(not row for row in rows):
        raise ValueError(f"{sum(not row for row in rows)} texts have no tokens under tokenizer {spec.tokenizer!r}")
    return Records.from_lists(rows, labels), truncated


def _partition(spec: DataSpec, train: Records, texts: Texts) -> partition.Partition:
    match spec.partition:
        case "dirichlet":
            assert train.labels is not None
            return partition.dirichlet(train.labels, spec.clients, spec.dirichlet_alpha, spec.seed)
        case "iid":
            return partition.iid(len(train), spec.clients, spec.seed)
        case "repeated":
            return partition.repeated(len(train), spec.clients, spec.records_per_client, spec.seed)
        case _:
            owners = partition.natural(texts.clients or [])
            if len(owners) != spec.clients:
                raise ValueError(
                    f"clients = {spec.clients}, but data.client-column = {spec.client_column!r} names {len(owners)} "
                    f"clients after validation and test were held out; set clients = {len(owners)}"
                )
            return owners
