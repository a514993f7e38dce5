"""The copy of a run that may be given to others: what the guarantee covers, in a form that can be verified.

A run's own folder tells more than its guarantee covers: seconds, counts of records, the secret that draws cohorts, what
a process printed, and when each file was written. It stays with its owner. The copy holds functions of what was
released and of public data only, and its files all have one time, the midnight before it was made.
"""

import datetime
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from server.config.load import flatten, parse, unflatten
from server.config.schema import RunConfig
from server.evaluation.finished import FinishedRun
from server.run_folder import names
from server.run_folder.seal import write_seal
from server.run_folder.verify import site_ledgers

COVERED = (names.METRICS_FILE, names.STAMP_FILE, names.CANARIES_FILE)
"""Files that are copied as they are, beside ledgers."""
RESULTS = ("test_", "validation_", "start_", "public_test_", "majority_", "rounds_done", "stopped", "dimension",
    "model", "label_names", "not_private")  # fmt: skip
"""Beginnings of the results that are numbers of public records, or of the settings."""
PLACES = (
    "data.source", "data.validation-source", "data.test-source", "model.name", "model.adapter",
    "privacy.secagg.federation", "strategy.controller-options.policy",
)  # fmt: skip
"""Settings that may name a file of the owner's machine; its name alone is told."""
UNTOLD = ("output", "data.cache", "engine.ray-address", "privacy.account")
"""Settings that say where a run ran, and nothing of what it released."""
TEXT = """# {name}

{sentence}

This folder is a copy that was made to be given to others. It holds only what the guarantee covers, and public data:

{files}

Verify it with Lacquer: `lacquer report FOLDER` accounts for the ledger anew and holds privacy.json against it. The
ledger has no signature. Compare its last line with what the owner of the run told you:

{heads}
"""
_SAID = {
    names.ADAPTER_FOLDER: "the adapter, which PEFT loads, with its card",
    names.LEDGER_FILE: "every privacy charge, hash-chained, by day",
    names.SITES_FOLDER: "the ledger of every site, by its number",
    names.START_FOLDER: "the ledgers of the runs that it went on from",
    names.PRIVACY_FILE: "the guarantee, for programs",
    names.METRICS_FILE: "one line per release",
    names.RESULTS_FILE: "numbers on public records",
    names.CONFIG_FILE: "the settings, without places of the owner's machine",
    names.PHASES_FILE: "the settings once more, with the phases",
    names.STAMP_FILE: "why the run guarantees nothing",
    names.CANARIES_FILE: "what was planted into the run for an audit",
}


class CannotPublish(ValueError):
    """A run without a ledger here that others could verify."""


def publish(run: FinishedRun, folder: Path) -> None:
    """Write the copy of a run that may be given to others.

    Args:
        run: verified.
        folder: exists and is empty.

    Raises:
        CannotPublish: no ledger lies in the run's folder: its sites are deployed, or no phase of it is private.
        CorruptRun: a file of the run says something else than its ledger.
    """
    heads = _heads(run)
    if not heads:
        raise CannotPublish(
            f"{run.folder} holds no ledger, so no copy of it can be verified by others; "
            "`lacquer export` writes its adapter with card and privacy.json, which may be given away"
        )
    statement, config = dict(run.statement), _without_places(run.config)
    shutil.copytree(run.adapter, folder / names.ADAPTER_FOLDER)
    for name in (*heads, *COVERED):
        if (run.folder / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(run.folder / name, folder / name)
    for file in sorted((run.folder / names.START_FOLDER).glob("*/*.jsonl")):
        target = folder / file.relative_to(run.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    _write(folder / names.PRIVACY_FILE, statement)
    _write(folder / names.RESULTS_FILE, {key: value for key, value in run.results.items() if key.startswith(RESULTS)})
    (folder / names.CONFIG_FILE).write_text(config.to_toml(), encoding="utf-8")
    if run.verified.phases:
        phases = tomli_w.dumps({**config.to_table(), "phases": list(run.verified.phases)})
        (folder / names.PHASES_FILE).write_text(phases, encoding="utf-8")
    files = "\n".join(f"- `{name}`: {said}" for name, said in _SAID.items() if (folder / name).exists())
    lines = "\n".join(f"- `{name}`: `{head}`" for name, head in heads.items())
    text = TEXT.format(name=run.config.name, sentence=statement["sentence"], files=files, heads=lines)
    (folder / names.PUBLISHED_FILE).write_text(text, encoding="utf-8")
    write_seal(folder, ("*.*", f"{names.ADAPTER_FOLDER}/*", f"{names.SITES_FOLDER}/*/*", f"{names.START_FOLDER}/*/*"))
    _hide_times(folder)


def _heads(run: FinishedRun) -> dict[str, str]:
    """The marks of the last lines of the run's ledgers, by the paths of these in its folder."""
    ledgers = site_ledgers(run.folder) if run.verified.ledger is None else {}
    heads = {str(ledger.path.relative_to(run.folder)): ledger.head for ledger in ledgers.values()}
    return heads if run.verified.head is None else {names.LEDGER_FILE: run.verified.head}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")


def _without_places(config: RunConfig) -> RunConfig:
    """A copy of the settings that names no place on the owner's machine; of a file only its name stays."""
    table, default = flatten(config.to_table()), flatten(RunConfig().to_table())
    for key in UNTOLD:
        if key in table:
            table[key] = default[key]
    for key in PLACES:
        kind, colon, path = str(table.get(key, "")).rpartition(":")
        if "/" in path:
            table[key] = f"{kind}{colon}{path.rpartition('/')[2]}"
    return parse(unflatten(table))


def _hide_times(folder: Path) -> None:
    """Give every file the same time and permissions: when they were written tells how long a round took."""
    midnight = datetime.datetime.combine(datetime.datetime.now(datetime.UTC).date(), datetime.time(), datetime.UTC)
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (midnight.timestamp(),) * 2)
