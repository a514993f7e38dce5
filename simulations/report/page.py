"""The report of a run: one HTML page that needs nothing else, made from what is in the run's folder.

It shows released and public values only, because the folder's files hold no others. A run that failed on its way gets
its page too, which says how far it came and what it has spent.

The few lines that use a run's adapter, with the names and sizes of that run filled in.

The tables of a report: terms of the guarantee, ledger, settings, environment, as text ready to be shown.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from privacy import durable
from privacy.ledger.ledger import Charge
from server.config.load import flatten
from server.config.schema import RunConfig
from server.evaluation.rouge import SCORES, rouge_terms, rouge_text
from simulations.report.figures import report_figures
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text
from simulations.report.outcome import (
    guarantee_sentence,
    guaranteed,
    resumed_text,
    spent_text,
    state_text,
    training_time,
)
from simulations.report.phases import noise_rows, selective_text
from simulations.report.read_run import ADAPTER_FOLDER, Run, read_run

_CODE = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def loading_code(run: Run) -> str | None:
    """Python that loads the adapter onto its base model; None if the run has left no adapter.

    It stands in the adapter's card, for whoever gets the adapter alone (:func:`server.runs.artefacts.how_to_use`);
    here the path is that from the current folder.
    """
    folder = run.path / ADAPTER_FOLDER
    card = folder / "README.md"
    if not card.is_file() or not (folder / "adapter_config.json").is_file():
        return None
    code = _CODE.search(card.read_text(encoding="utf-8"))
    if code is None:
        return None
    load = 'from_pretrained(base, "{}")'
    return code[1].replace(load.format(ADAPTER_FOLDER), load.format(run.shown_path / ADAPTER_FOLDER))


_ADJACENCIES = {
    "add_remove": "data sets that differ by one unit more or less",
    "replace_one": "one unit replaced",
    "zero_out": "all that one unit contributes replaced by zero; that it takes part is seen",
}


def facts_rows(guarantee: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The terms of a guarantee (privacy.json) as (label, text)."""
    labels = {
        "epsilon": "ε guaranteed",
        "epsilon_spent": "ε of the releases made",
        "delta": "δ",
        "unit": "Protected unit",
        "population": "Population",
        "adjacency": "Neighbours",
        "sampling": "Sampling",
        "rounds": "Releases",
        "noise_multipliers": "Noise multiplier",
        "mechanism": "Mechanism",
        "accountant": "Accountant",
        "cross_checks": "ε by other accountants",
        "trust_model": "Trust",
    }
    return [(label, _fact(key, guarantee[key])) for key, label in labels.items() if guarantee.get(key)]


def _fact(key: str, value: Any) -> str:
    match value:
        case Mapping():
            return "; ".join(f"{name}: {_fact(key, item)}" for name, item in value.items())
        case list():
            lowest, highest = number_text(min(value)), number_text(max(value))
            return lowest if lowest == highest else f"{lowest} to {highest}"
        case float() if "epsilon" in key or key == "cross_checks":
            return epsilon_text(value)
        case float() if key == "delta":
            return delta_text(value)
        case int() | float():
            return number_text(value)
        case _:
            return _ADJACENCIES.get(value, str(value))


def ledger_table(charges: tuple[Charge, ...]) -> dict[str, Any]:
    """The charges with equal neighbours drawn together, as rows of a table."""
    rows = []
    for _, group in groupby(charges, key=lambda c: (c.event.label, c.event.sampling, c.event.components)):
        same = list(group)
        event, first, last = same[0].event, same[0].event.round, same[-1].event.round
        rows.append(
            {
                "label": event.label,
                "rounds": f"{first}" if first == last else f"{first}\u2013{last}",
                "count": len(same),
                "sampling": _sampling_text(event.sampling.to_json()),
                "components": ", ".join(f"{part.name} ({part.dim:,})" for part in event.components),
                "noise_multiplier": number_text(same[0].noise_multiplier),
            }
        )
    lost = sum(charge.released_at is None for charge in charges)
    text = "Its hash chain is intact and every charge follows its rules."
    if lost:
        text += f" {lost} charged {'release was' if lost == 1 else 'releases were'} never made; the budget is spent."
    return {"rows": rows, "text": text, "summary": f"{len(charges)} {'charge' if len(charges) == 1 else 'charges'}"}


def _sampling_text(sampling: Mapping[str, Any]) -> str:
    population = f"{sampling['population']:,} {sampling['unit']}s"
    return f"all {population}" if sampling["rate"] == 1 else f"Poisson {sampling['rate']:g} of {population}"


def settings_rows(config: RunConfig) -> list[dict[str, str]]:
    """Every setting with its value and default, as dictionaries of `key`, `value` and `default`."""
    defaults = flatten(RunConfig().to_table())
    values = flatten(config.to_table())
    return [
        {"key": key, "value": _setting(value), "default": _setting(defaults.get(key, ""))}
        for key, value in values.items()
    ]


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return delta_text(value) if 0 < value < 1e-3 and math.isfinite(value) else f"{value:g}"
    return str(value)


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """environment.json as (label, text)."""
    rows = [
        ("Machine", f"{environment['system']}, {environment['cores']} cores" if "system" in environment else None),
        ("Accelerators", ", ".join(environment.get("accelerators", [])) or None),
        ("Python", environment.get("python")),
        *environment.get("packages", {}).items(),
        ("Commit", environment.get("commit")),
    ]
    return [(label, str(value)) for label, value in rows if value]


REPORT_FILE = "report.html"

_FILES = {
    "config.toml": "the resolved settings; they repeat the run",
    "recipe.toml": "the resolved settings and phases; they repeat the run",
    "NOT-PRIVATE.txt": "what the run does not guarantee; keep it beside everything the run made",
    "ledger.jsonl": "every privacy charge, hash-chained, written before its noise was drawn",
    "privacy.json": "the guarantee, for programs",
    "metrics.jsonl": "one line per release",
    "results.json": "the final numbers",
    "environment.json": "versions and machine",
    "adapter": "the released adapter, loads with PEFT",
    "phases": "what a resumed recipe continues from; whoever has it knows who was in a batch, so never share it",
    "checkpoint": "what a resumed run continues from",
    "tensorboard": "the metrics as TensorBoard scalars",
    "origin.json": "what it was started with; a resumed run is held against it",
    "resumed.jsonl": "a line for each time it was resumed",
    "data.digest": "which data set it was: who has all records but one can try out guesses of that, so never share it",
    "sampling.key": "the secret that draws the cohorts: whoever has it knows who took part, so never share it",
    "flower.log": "what Flower and its workers printed",
    "inprocess.log": "what the run printed",
}


@dataclass(frozen=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    aside: str = ""
    bad: bool = False


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run's folder and return its path. Files that are missing leave their part out.

    Raises:
        NoRunFolder: if the folder is none.
    """
    run = read_run(run_folder)
    target = run.path / REPORT_FILE
    durable.write(target, render(run))
    return target


def render(run: Run) -> str:
    """The report of a run as HTML text."""
    pages = Environment(
        loader=PackageLoader("simulations.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    guarantee = {} if run.not_private else run.guarantee or {}
    settings = settings_rows(run.config) if run.config else []
    return pages.get_template(REPORT_FILE).render(
        name=run.name,
        state=run.state,
        state_text=state_text(run),
        about=_about(run),
        not_private=run.not_private,
        selective=bool(selective_text(run.guarantee or {})),
        ending=_ending(run),
        resumed=resumed_text(run),
        problems=run.problems,
        tiles=_tiles(run),
        sentence=_sentence(run),
        facts=_facts(run, guarantee),
        covers=guarantee.get("covered", []),
        does_not_cover=guarantee.get("not_covered", []),
        figures=report_figures(run),
        adapter_code=loading_code(run),
        classifies=bool((run.results or {}).get("label_names")),
        rouge=rouge_terms(run.results or {}) if rouge_text(run.results or {}) else "",
        ledger=ledger_table(run.account.charges) if run.account else None,
        settings=settings,
        changed=[row for row in settings if row["value"] != row["default"]],
        environment=environment_rows(run.environment or {}),
        files=[(name, text) for name, text in _FILES.items() if (run.path / name).exists()],
    )


def _units(run: Run) -> str:
    return run.config.units_text if run.config else "clients"


def _about(run: Run) -> list[str]:
    if run.recipe is not None:
        return [run.recipe.run.model.name, "recipe", run.recipe.names]
    if run.config is None:
        return []
    config = run.config
    return [config.model.name, config.strategy.controller, config.members_text]


def _sentence(run: Run) -> str:
    return guarantee_sentence(run) if run.recipe is None or run.guarantee is None else str(run.guarantee["sentence"])


def _facts(run: Run, guarantee: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = facts_rows(guarantee)
    return [*facts, *noise_rows(run.guarantee or {}), *run.recipe.rows()] if run.recipe else facts


def _ending(run: Run) -> dict[str, str] | None:
    """What to say above all numbers when the run did not complete."""
    if run.state == "completed":
        return None
    title = state_text(run) + "."
    if run.recipe is not None:
        text = f"It did {len(run.recipe.done)} of {len(run.recipe.phases)} phases; what they cost is below."
        return {"title": title, "text": text, "message": run.status.message if run.status else ""}
    done = run.rounds[-1].round if run.rounds else 0
    planned = run.config.rounds if run.config else "an unknown number of"
    text = f"It did {done} of {planned} rounds; what they released and cost is below."
    return {"title": title, "text": text, "message": run.status.message if run.status else ""}


def _tiles(run: Run) -> list[Tile]:
    tiles = [_quality_tile(run), *_rouge_tile(run), _epsilon_tile(run), _progress_tile(run)]
    time = training_time(run)
    if time is not None:
        dimension = run.result("dimension")
        trained = f"{number_text(dimension)} values trained" if dimension is not None else ""
        tiles.append(Tile("Time", time, trained))
    return tiles


def _progress_tile(run: Run) -> Tile:
    if run.recipe is not None:
        return Tile("Phases", f"{len(run.recipe.done)} of {len(run.recipe.phases)}", run.recipe.names)
    done = run.rounds[-1].round if run.rounds else 0
    planned = f"of {run.config.rounds}" if run.config else ""
    cohort = f"{number_text(run.rounds[-1].expected_cohort)} {_units(run)} expected in each" if run.rounds else ""
    return Tile("Rounds", f"{done} {planned}".strip(), cohort)


def _quality_tile(run: Run) -> Tile:
    majority = run.result("majority_accuracy")
    aside = f"most frequent class: {percent_text(majority)}" if majority is not None else ""
    accuracy, loss = run.result("test_accuracy"), run.result("test_loss")
    if (perplexity := run.result("test_perplexity")) is not None:
        return Tile("Test perplexity", number_text(perplexity), "per token")
    if accuracy is not None:
        return Tile("Test accuracy", percent_text(accuracy), aside)
    if loss is not None:
        return Tile("Test loss", number_text(loss), "")
    validation = [record.validation_accuracy for record in run.rounds if record.validation_accuracy is not None]
    if validation:
        return Tile("Validation accuracy", percent_text(validation[-1]), "public; not tested")
    return Tile("Test accuracy", "none", "the run was not tested")


def _rouge_tile(run: Run) -> list[Tile]:
    results = run.results or {}
    if not rouge_text(results):
        return []
    *others, last = SCORES
    also = ", ".join(f"{SCORES[key]} {results[key]:.3f}" for key in others)
    return [Tile(f"Test {SCORES[last]}", f"{results[last]:.3f}", also)]


def _epsilon_tile(run: Run) -> Tile:
    if run.not_private:
        return Tile("Privacy", "none", selective_text(run.guarantee or {}) or "no guarantee", bad=True)
    pair = guaranteed(run)
    if pair is None:
        return Tile("Privacy", "unknown", "no readable ledger")
    used = spent_text(run)
    aside = f"at δ = {delta_text(pair[1])}" + (f"; {used}" if used else "")
    return Tile("Privacy", f"ε ≤ {epsilon_text(pair[0])}", aside)
