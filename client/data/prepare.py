"""The steps from texts to a prepared data set: hold out, tokenise, partition, write.

A data set is known by a digest of its settings, the content of its sources, the tokenizer and the code that builds it;
its folder is named by that digest under a key (:func:`privacy.durable.private_name`).
Of two processes that build the same one the first wins and the other takes that.
"""

import hashlib
import importlib.metadata
import inspect
import json
import logging
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from client.data import canaries, chat, conversations, partition, sensitive, sources, splits, tokenise
from client.data.catalog import consultations, corpora, diabetes130, notes, restaurants
from client.data.columns import labels, normal_form, preferences, tables
from client.data.prepared import FORMAT, META_FILE, PARTS, PreparedData, sha256
from client.data.records import Records
from client.data.sensitive import make_detector
from client.data.sources import Texts
from client.data.spec import NOTES, DataSpec
from client.data.splits import hold_out, public_reading, public_sources, source_reading
from client.models.base import load_tokenizer
from privacy import durable
from privacy.sensitive_text import detectors, treatments

log = logging.getLogger(__name__)

COLUMNS = ("labels", "token_weights", "units", "splits")
"""What records may have besides tokens, as :class:`client.data.records.Records` names it."""

_DECISIVE = (
    *(sensitive, detectors, treatments, notes, consultations, corpora, diabetes130, restaurants),
    *(canaries, normal_form, labels, tables, sources, splits, tokenise, partition, conversations, chat, preferences),
)


def prepare(spec: DataSpec) -> PreparedData:
    """The data set of `spec`, from the cache (verified) or built now. Safe to call from several processes at once.

    Raises:
        ValueError: a setting, a file or a column that cannot work, with the remedy.
    """
    check(spec)
    tokenizer = load_tokenizer(spec.tokenizer)
    digest = _digest(spec, tokenizer)
    folder = spec.cache_folder / durable.private_name(spec.cache_folder, digest)
    durable.make_folder(folder, lambda draft: _write(draft, spec, tokenizer, digest))
    durable.close_to_others(folder)
    data = PreparedData.open(folder, verify=True)
    if spec.clients not in (0, data.num_clients):
        raise ValueError(
            f"clients = {spec.clients}, but data.client-column = {spec.client_column!r} names {data.num_clients} "
            f"clients after validation and test were held out; set clients = {data.num_clients}, or 0 for as many as "
            "there are"
        )
    return data


def check(spec: DataSpec) -> None:
    """Refuse settings that do not fit each other, before anything is read.

    Raises:
        ValueError: naming the setting, its value and what to do.
    """
    if spec.task == "classification" and not spec.label_column:
        raise ValueError("data.label-column must be set for classification, got ''")
    if spec.task == "classification" and spec.label_column in (spec.text_column, spec.text_pair_column):
        raise ValueError(f"data.label-column = {spec.label_column!r} is a column of texts; name that of the labels")
    if spec.partition == "natural" and not spec.client_column and spec.source != NOTES:
        raise ValueError("data.partition = 'natural' needs data.client-column, the column that names the client")
    if not spec.clients and (spec.partition != "natural" or spec.source == NOTES):
        raise ValueError("clients = 0 takes what data.client-column names; data.partition must be 'natural'")
    if spec.task == "summarisation" and not spec.text_pair_column:
        raise ValueError("data.text-pair-column must name the summaries' column for summarisation, got ''")
    if (spec.chat or spec.task == "preference") and spec.canaries:
        raise ValueError(f"data.canaries = {spec.canaries} are planted into texts; model.task = {spec.task!r} has none")
    if spec.task == "preference" and (spec.sensitive != "none" or spec.text_pair_column):
        raise ValueError(
            f"data.sensitive = {spec.sensitive!r} and data.text-pair-column = {spec.text_pair_column!r} must be 'none' "
            "and '' with model.task = 'preference', which reads the columns prompt, chosen and rejected as they are"
        )
    if spec.source == NOTES and spec.least_words:
        raise ValueError("data.least-words must be 0 for generated notes, which are all long")
    if spec.test_limit and not spec.test_source:
        raise ValueError(
            f"data.test-limit = {spec.test_limit} bounds a test source and there is none; set data.test-source, or "
            "bound the carved-out test set by data.test-records"
        )
    if spec.source == NOTES and spec.validation_source:
        raise ValueError(
            f"data.validation-source = {spec.validation_source!r}: generated notes bring their own validation records; "
            "name a data.source, or leave it empty"
        )
    if spec.source == NOTES and spec.unit_column:
        raise ValueError("data.unit-column must be '' for generated notes, whose unit is the patient anyway")
    sensitive.check_policy(spec)
    if spec.sensitive == "weights" and spec.task != "causal-lm":
        raise ValueError(
            f"data.sensitive = 'weights' weights the tokens of a language model; model.task must be 'causal-lm', "
            f"got {spec.task!r}"
        )
    if spec.sensitive != "none" and spec.text_pair_column and not spec.chat:
        raise ValueError("data.sensitive works on single texts; data.text-pair-column must be empty")
    if spec.partition in partition.BY_LABEL and spec.task != "classification":
        raise ValueError(f"data.partition = {spec.partition!r} skews labels and a language model has none; take 'iid'")
    partition.check_options(spec.partition, spec.partition_options)


def _digest(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything the files depend on."""
    content = [_source(spec)]
    for part, place in public_sources(spec).items():
        content.append(sources.fingerprint(place, public_reading(spec), f"data.{part}-source", task=spec.task))
    # any change of the code that decides the content gives new names: nobody has to remember a version number
    code = [inspect.getsource(module) for module in (*_DECISIVE, sys.modules[__name__])]
    versions = [importlib.metadata.version("flwr-datasets"), importlib.metadata.version("tokenizers")]
    if spec.sensitive != "none":  # with another version of what it is made of, a detector finds other spans
        versions.append(make_detector(spec.detector).name)
    backend: Any = tokenizer
    # Truncation is left behind by whoever used the tokenizer last, in this process or another.
    definition = {**json.loads(backend.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    parts = [FORMAT, spec.identity(), content, code, definition, versions]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _source(spec: DataSpec) -> str:
    """SHA-256 of the records of the source, before anything is drawn or dealt; of generated ones what decides them."""
    if spec.source != NOTES:
        return sources.fingerprint(spec.source, source_reading(spec), task=spec.task)
    sizes = (spec.seed, spec.clients, spec.records_per_client, spec.task)
    content = [notes.grammar_text(), consultations.words_text(), importlib.metadata.version("faker"), sizes]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write(folder: Path, spec: DataSpec, tokenizer: PreTrainedTokenizerBase, digest: str) -> None:
    held = hold_out(spec)
    folder.mkdir(mode=0o700)  # it holds private texts, as tokens
    records: dict[str, Records] = {}
    made: dict[str, tokenise.Tokenised] = {}
    for part in PARTS:
        weights = spec if part == "train" and spec.sensitive == "weights" else None
        made[part] = tokenise.tokenise(
            held.texts[part],
            held.labels.get(part),
            tokenizer,
            spec.task,
            spec.max_length,
            weights,
            spec.chat_template,
        )
        records[part] = made[part].records
    trained = made["train"].of(held.texts["train"])
    records["train"] = replace(records["train"], units=trained.unit_numbers())
    owners = _partition(spec, records["train"], trained)
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
        for name in COLUMNS:
            column = getattr(records[part], name)
            if column is not None:
                arrays[f"{part}_{name}"] = column
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    meta = {
        "format": FORMAT,
        "digest": digest,
        "spec": spec.identity(),
        "num_labels": len(held.label_names),
        "label_names": held.label_names,
        "columns": {part: [name for name in COLUMNS if f"{part}_{name}" in arrays] for part in PARTS},
        "records": {part: len(records[part]) for part in PARTS},
        "tokens": {part: len(records[part].tokens) for part in PARTS},
        "truncated": {part: made[part].truncated for part in PARTS},
        "answers_cut": {part: made[part].answers_cut for part in PARTS},
        "removed": held.removed | sum((made[part].left_out for part in PARTS), Counter[str]()),
        "source": _source(spec),
        "read": held.read,
        "not_drawn": held.not_drawn,
        "noted": dict(held.noted) | sum((made[part].noted for part in PARTS), Counter[str]()),
        "clients": len(owners),
        "empty_clients": int((owners.sizes == 0).sum()),
        "files": {f"{name}.npy": sha256(folder / f"{name}.npy") for name in sorted(arrays)},
    }
    (folder / META_FILE).write_text(json.dumps(meta, indent=1, sort_keys=True))
    log.info("prepared %s", spec.source)  # no counts: they are of private records


def _partition(spec: DataSpec, train: Records, texts: Texts) -> partition.Partition:
    if spec.whole_units and train.units is not None and spec.partition not in ("natural", "repeated"):
        _, first = np.unique(train.units, return_index=True)  # a unit's label is that of its first record
        return partition.of_whole_units(
            train.units, _partition(spec.replace(whole_units=False), train.select(first), texts)
        )
    match spec.partition:
        case "dirichlet":
            assert train.labels is not None
            return partition.dirichlet(train.labels, spec.clients, spec.dirichlet_alpha, spec.seed)
        case "iid":
            return partition.iid(len(train), spec.clients, spec.seed)
        case "repeated":
            return partition.repeat_records(len(train), spec.clients, spec.records_per_client, spec.seed)
        case "natural":
            return partition.natural(texts.clients or [])
        case name:
            assert train.labels is not None
            return partition.by_flwr_datasets(name, train.labels, spec.clients, spec.partition_options, spec.seed)
