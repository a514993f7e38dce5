"""``audit/`` of a run folder: what attacks on the run found, beside what its ledger says.

An audit reads private records as they are. What it writes is no release: nobody paid for it, it is not covered by the
guarantee, and it must stay with the auditor. So it lies in a folder of its own that only its owner can open, says so in
its first line, and nothing else of a run reads it: no controller, no resumed run, no command that shows or shares runs,
and not the run's own report.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.record_level.units import UnitIndex
from privacy import durable
from server.evaluation.finished import FinishedRun
from server.run_folder.names import AUDIT_FILE, AUDIT_FOLDER, SOURCE_FILE
from server.runs.assembly import data_spec
from simulations.audit.canaries import canary_findings, exposures
from simulations.audit.extraction import extraction
from simulations.audit.membership import membership
from simulations.audit.shadows import refuse_shadows, shadow_findings
from simulations.audit.units import audited_units
from simulations.report.audit import level_name
from simulations.report.page import write_report
from simulations.report.read_run import read_run

WARNING = (
    "Not covered by the guarantee. An audit reads the private records of a run without noise; its numbers may tell "
    "about them. Keep this with the auditor: never publish it, and never choose settings of a run by it."
)

NOT_TRIED = ("an attacker who chooses a unit's records",)
NO_SHADOWS = "shadow runs on data with and without the unit (LiRA: --shadows)"
NO_TEXTS = "extraction (not applicable: a classifier writes nothing)"
NO_CANARIES = (
    "an attacker who sees every release and chooses a unit's update (the run holds no canaries: audit.canaries)"
)
NO_SECRETS = "exposure and extraction of planted secrets (the run holds none: data.canaries)"


def audit_run(run: FinishedRun, most: int, shadows: int = 0) -> dict[str, Any]:
    """Make every audit that can be made of a finished run.

    Args:
        most: records of either side of membership inference.
        shadows: how many shadow runs to train; 0 for none.

    Raises:
        ValueError: the records are not here, or are not those that the run was trained on.
    """
    if shadows:
        refuse_shadows(run, shadows)
    data, canaries = read_records(run), run.config.audit.canaries
    population = len(_index(run, data)) if run.config.is_single_site else run.config.clients
    levels = audited_units(run.config, data, most, canaries)
    found: dict[str, Any] = {
        "not_covered_by_the_guarantee": WARNING,
        "upper_bound": _upper(read_run(run.folder).guarantee or {}),  # that of phases in one form
        "canaries": canary_findings(run, population),
        **_written(run),
        "membership": membership(run, data, levels),
    }
    if shadows:
        found["membership"].append(shadow_findings(run, data, levels[0], shadows))
    not_tried = {
        NO_CANARIES: not canaries,
        NO_TEXTS: run.task == "classification",
        NO_SECRETS: run.task != "classification" and found["exposure"] is None,
        NO_SHADOWS: not shadows,
    }
    said = [*(text for text, missing in not_tried.items() if missing), *NOT_TRIED]
    return {**found, "verdict": verdict(found), "not_tried": said}


def _written(run: FinishedRun) -> dict[str, Any]:
    """Measure what a language model writes and prefers; nothing of a classifier."""
    if run.task == "classification":
        return {"exposure": None, "extraction": None}
    model = run.language_model()
    return {"exposure": exposures(run, model), "extraction": extraction(run, model)}


def _index(run: FinishedRun, data: PreparedData) -> UnitIndex:
    return UnitIndex.of(data.train, grouped=run.config.privacy.unit == "group")


def read_records(run: FinishedRun) -> PreparedData:
    if run.config.is_deployed:
        raise ValueError(
            "data.held-by = 'nodes': the training records are not on this host; an audit needs the records of members"
        )
    data, noted = prepare(data_spec(run.config)), run.folder / SOURCE_FILE
    if noted.is_file() and noted.read_text(encoding="utf-8").strip() != str(data.meta["source"]):
        raise ValueError(
            f"data.source = {run.config.data.source!r} holds other records than the run was trained on ({noted} names "
            "them by a digest); restore the file it had"
        )
    return data


def _upper(said: Mapping[str, Any]) -> dict[str, Any] | None:
    """The upper bound that the ledger proves; None where nothing is guaranteed."""
    if said.get("not_private") is not None or said.get("epsilon") is None:
        return None
    return {"epsilon": said["epsilon"], "delta": said["delta"], "unit": said["unit"], "adjacency": said["adjacency"]}


def bounds(found: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """List name, value and ceiling of every lower bound on epsilon that holds for any mechanism."""
    canaries = found["canaries"]
    own = [("the game with canaries", canaries["epsilon_lower"], canaries["ceiling"])] if canaries else []
    return own + [
        (f"membership inference, {level_name(level)}", level["bound"]["epsilon_lower"], level["bound"]["ceiling"])
        for level in found["membership"]
        if level["bound"]
    ]


def verdict(found: Mapping[str, Any]) -> str:
    """Compare the lower bounds with the upper one, in words."""
    upper, lower = found["upper_bound"], bounds(found)
    if upper is None:
        return "There is no guarantee to refute."
    refuted = [f"{text} (level 99.9 %)" for text in (found["canaries"]["wrong"] if found["canaries"] else ())]
    refuted += [
        f"{name} shows epsilon of at least {value:.2f} where the ledger says {upper['epsilon']:.2f} (level 95 %)"
        for name, value, _ in lower
        if value > upper["epsilon"]
    ]
    if refuted:
        return f"REFUTED: {'; '.join(refuted)}. Something does not do what the proof is about."
    if not lower:
        return "No bound: there are too few units, or members and held-out units are not exchangeable."
    return (
        f"Consistent with the ledger: lower bounds up to {max(value for _, value, _ in lower):.2f}, upper bound "
        f"{upper['epsilon']:.2f}. That proves nothing; it did not refute the guarantee."
    )


def write_findings(run_folder: Path, found: Mapping[str, Any]) -> Path:
    """Write audit.json and the report with the audit's section into the run's ``audit/``; returns that folder."""
    folder = run_folder / AUDIT_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    durable.write(folder / AUDIT_FILE, json.dumps(found, indent=1) + "\n", mode=0o600)
    write_report(run_folder, found)
    return folder
