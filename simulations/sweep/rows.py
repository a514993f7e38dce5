"""The rows that a sweep keeps of its cells: plain numbers, in a JSON file that a later sweep continues from.

A row holds two kinds of accuracy that must not be mixed up. ``validation_*`` is measured on the server's public
records; whoever compares settings in order to choose one reads these. ``test_*`` is measured once, at the end of a
cell, on records used for nothing else; it is for reporting.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from privacy import durable
from server.run_folder.names import RESULTS_FILE
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import read_run
from simulations.sweep.cells import USAGE_FILE, Cell

Row = dict[str, Any]

_MEASURED = (
    "test_accuracy", "test_loss", "test_records", "validation_accuracy", "validation_loss", "validation_records",
    "majority_accuracy", "dimension", "rounds_done", "stopped", "seconds", "test_perplexity", "validation_perplexity",
    "test_macro_f1", "start_validation_accuracy", "start_validation_perplexity",
    "test_rouge1", "test_rouge2", "test_rougeL",
)  # fmt: skip


def row(cell: Cell, folder: Path) -> Row:
    """Make the row of a cell whose run in `folder` has completed.

    Raises:
        ValueError: naming what failed of what a row is of.
    """
    run = read_run(folder)
    assert run.results is not None
    if lacks := _lacking(run.results):
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in lacks.items()))
    assert run.environment is not None
    guarantee = guaranteed_pair(run)
    told = [record.clip_bound or record.extra.get("clip-bound") for record in run.rounds]  # one threshold, or of all
    bounds = [bound for bound in told if bound is not None]
    losses = [record.validation_loss for record in run.rounds if record.validation_loss is not None]
    noise = [record.noise_multiplier for record in run.rounds]
    config, environment = cell.config, run.environment
    usage = folder / USAGE_FILE
    return {
        "cell": cell.key,
        "grid": cell.grid,
        "variant": cell.variant,
        "axes": dict(cell.axes),
        "seed": config.seed,
        "kind": cell.kind,
        "digest": cell.digest,
        "epsilon": config.privacy.epsilon,
        "epsilon_stated": guarantee[0] if guarantee else None,
        "delta": config.privacy.delta,
        "not_private": run.not_private,
        "clients": config.clients,
        "expected_cohort": config.site.batch_size if config.is_single_site else config.expected_cohort,
        "unit": config.unit,
        "rounds": config.rounds,
        "controller": config.strategy.controller,
        "aggregation": config.strategy.aggregation,
        **{name: run.results.get(name) for name in _MEASURED},
        "best_validation_accuracy": max((r.validation_accuracy or 0.0 for r in run.rounds), default=None),
        "noise_multiplier": noise[0] if noise else None,
        "first_clip_bound": bounds[0] if bounds else None,
        "last_clip_bound": bounds[-1] if bounds else None,
        "first_round_loss": losses[0] if losses else None,
        "highest_round_loss": max(losses, default=None),
        "last_round_loss": losses[-1] if losses else None,
        "curve": [(r.round, r.validation_loss) for r in run.rounds if r.validation_loss is not None]
        if config.is_single_site
        else [],
        "seconds_per_round": median(record.seconds for record in run.rounds) if run.rounds else None,
        "cpu_seconds": json.loads(usage.read_text())["cpu_seconds"] if usage.is_file() else None,
        "commit": environment["commit"],
        "machine": f"{environment['cores']} cores, {environment['system']}",
        "packages": {name: environment["packages"][name] for name in ("torch", "transformers", "flwr")},
    }


def read_results(file: Path) -> list[Row]:
    """Read the rows of a results file; none if it is not there.

    Raises:
        ValueError: the file is not one of a sweep.
    """
    if not file.is_file():
        return []
    try:
        rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))["cells"]
        keys = [(entry["cell"], entry["digest"]) for entry in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no results of a sweep ({error}); name another file") from None
    assert len(keys) == len(rows)
    return rows


def write_results(file: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a results file atomically; rows are ordered by cell, so that a diff shows what is new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(rows, key=lambda entry: str(entry["cell"]))
    durable.write(file, json.dumps({"sweep": name, "cells": ordered}, indent=1) + "\n")


def is_complete(folder: Path) -> bool:
    """Whether a run in `folder` has come to its end, measured as a row needs it."""
    if not (folder / RESULTS_FILE).is_file():
        return False
    run = read_run(folder)
    return run.state in ("completed", "stopped-budget") and not _lacking(run.results or {})


def _lacking(results: Mapping[str, Any]) -> dict[str, str]:
    """List what failed of what a row needs, and why."""
    missing = results.get("missing", {})
    return {name: reason for name, reason in missing.items() if name in ("validation", "test")}
