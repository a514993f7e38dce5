"""The report of a run: one HTML page that needs nothing else, made from what is in the run's folder.

It shows released and public values only, because the folder's files hold no others. A run that failed on its way gets
its page too, which says how far it came and what it has spent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from server.rouge import SCORES, rouge_terms, rouge_text
from simulations.loading import loading_code
from simulations.notation import delta_text, epsilon_text, number_text, percent_text
from simulations.outcome import guarantee_sentence, guaranteed, resumed_text, spent_text, state_text, training_time
from simulations.report_figures import report_figures
from simulations.report_recipe import noise_rows, selective_text
from simulations.report_tables import environment_rows, facts_rows, ledger_table, settings_rows
from simulations.run_folder import Run, read_run

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
    draft = target.with_suffix(".html.tmp")
    draft.write_text(render(run), encoding="utf-8")
    draft.replace(target)
    return target


def render(run: Run) -> str:
    """The report of a run as HTML text."""
    pages = Environment(
        loader=PackageLoader("simulations"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
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
