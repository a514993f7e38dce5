"""The report of a run: one HTML page that needs nothing else, made from what is in the run's folder.

It shows released and public values only, because the folder's files hold no others. A run that failed on its way gets
its page too, which says how far it came and what it has spent.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from statistics import median
from typing import Any

from client.data.sources import PATH_KINDS
from privacy import durable
from privacy.errors import CorruptRun
from server.evaluation.answers import SCORES, rouge_terms, rouge_text
from server.run_folder import names
from simulations.report.audit import audit_section
from simulations.report.budget import together_text
from simulations.report.data_block import data_rows
from simulations.report.figures import report_figures
from simulations.report.judgement import judgements
from simulations.report.next_steps import advice, commands
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text
from simulations.report.outcome import (
    examples,
    gain_of,
    guarantee_sentence,
    guaranteed_pair,
    resumed_text,
    selective_text,
    spent_text,
    state_text,
    training_time,
)
from simulations.report.read_run import Run, read_run
from simulations.report.tables import (
    classes,
    environment_rows,
    facts_rows,
    ledger_table,
    phase_rows,
    round_table,
    settings_rows,
)
from simulations.report.templating import render_template

log = logging.getLogger(__name__)

_CODE = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def export_command(run: Run, code: str | None) -> str:
    """The command that makes a model without Lacquer; empty where loading the adapter needs no Lacquer."""
    if code is None or "from client." not in code:
        return ""
    merged = "" if (run.results or {}).get("label_names") else " --merged"
    return f"lacquer export {names.shell_quoted(run.short_path)} my-model{merged}"


def loading_code(run: Run) -> str | None:
    """The Python that loads the adapter onto its base model; None if the run has left no adapter.

    It stands in the adapter's card, for whoever gets the adapter alone (:func:`server.evaluation.card.how_to_use`);
    here the path is that from the folder in which the folder of runs lies.
    """
    folder = run.path / names.ADAPTER_FOLDER
    card = folder / "README.md"
    if not card.is_file() or not (folder / "adapter_config.json").is_file():
        return None
    code = _CODE.search(card.read_text(encoding="utf-8"))
    if code is None:
        return None
    return code[1].replace(f'"{names.ADAPTER_FOLDER}")', f'"{run.short_path / names.ADAPTER_FOLDER}")')


_FILES = {
    names.CONFIG_FILE: "the resolved settings; they repeat the run",
    names.COMMITMENT_FILE: "the noise that was calibrated for it; the ledger says what it is committed to",
    names.PHASES_FILE: "the resolved settings and phases; they repeat the run",
    names.STAMP_FILE: "what the run does not guarantee; keep it beside everything the run made",
    names.CANARIES_FILE: "what was planted into the run for an audit; the model is not for use",
    names.LEDGER_FILE: "every privacy charge, hash-chained, written before its noise was drawn",
    names.PRIVACY_FILE: "the guarantee, for programs",
    names.METRICS_FILE: "one line per release",
    names.TIMES_FILE: "seconds of each round; they depend on who took part, so never share it",
    names.RESULTS_FILE: "the final numbers",
    names.FACTS_FILE: "what became of the records that were read",
    names.ENVIRONMENT_FILE: "versions and machine",
    names.ADAPTER_FOLDER: "the released adapter, loads with PEFT",
    names.PHASES_FOLDER: "what a resumed run continues from",
    names.SITES_FOLDER: "what the sites of a simulation keep for themselves",
    names.CHECKPOINT_FOLDER: "what a resumed run continues from",
    names.START_FOLDER: "what it went on from, with the ledgers of earlier runs",
    names.PUBLIC_START_FILE: "the adapter after the warm start on public records",
    names.TENSORBOARD_FOLDER: "the metrics as TensorBoard scalars",
    names.ORIGIN_FILE: "what it was started with; a resumed run is held against it",
    names.RESUMES_FILE: "a line for each time it was resumed",
    names.DATA_FILE: "which data set it was",
    names.SOURCE_FILE: "which records they were",
    names.SAMPLING_SECRET: "the secret that draws the cohorts",
    names.AUDIT_FOLDER: "what attacks on the run found",
    names.FLOWER_LOG: "what Flower and its workers printed",
    names.PROCESS_LOG: "what the run printed",
}


@dataclass(frozen=True)
class Tile:
    """A headline number of the report."""

    label: str
    value: str
    aside: str = ""
    bad: bool = False


def write_report(run_folder: Path, audit: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into a run's folder and return its path. What a run has not come to leaves its part out.

    Args:
        audit: what attacks on the run found; the page with its section is written into the audit's own folder, readable
            by its owner only, and the run's own page never holds it.

    Raises:
        NoRunFolder: if the folder is none.
        CorruptRun: naming a file of it that is damaged or gone.
    """
    run = read_run(run_folder)
    if audit is None:
        target = run.path / names.REPORT_FILE
        durable.write(target, render(run))
    else:
        target = run.path / names.AUDIT_FOLDER / names.REPORT_FILE
        durable.write(target, render(run, audit), mode=0o600)
    return target


def attempt_report(run_folder: Path, told: Callable[[BaseException, Path], str] = durable.full_disk) -> str:
    """Write `report.html` beside a run that has ended well or badly; returns why there is none, or nothing.

    A page can be written again at any time, so whatever it fails of (a figure, a font, a damaged file) is told and ends
    nothing.

    Args:
        told: what a person is told of an error that has a remedy, of any other nothing.
    """
    try:
        write_report(run_folder)
    except CorruptRun as error:
        return str(error)
    except Exception as error:  # of any library that draws or reads
        log.exception("%s has no report", run_folder)
        return told(error, run_folder) or f"its report failed ({type(error).__name__}: {error})"
    return ""


def render(run: Run, audit: Mapping[str, Any] | None = None) -> str:
    """Render the report of a run as HTML text, with the section of an audit where there is one."""
    guarantee = {} if run.not_private else run.guarantee or {}
    settings = settings_rows(run.config) if run.config else []
    facts = [*facts_rows(guarantee), *phase_rows(run)]
    return render_template(
        names.REPORT_FILE,
        name=run.name,
        what=_what(run),
        state=run.state,
        state_text=state_text(run),
        about=_about(run),
        not_private=run.not_private,
        selective=bool(selective_text(run)),
        ending=_ending(run),
        resumed=resumed_text(run),
        warnings=judgements(run),
        tiles=_tiles(run),
        sentence=guarantee_sentence(run),
        together=together_text(run),
        terms=bool(facts or guarantee.get("covered") or guarantee.get("not_covered")),
        facts=facts,
        covers=guarantee.get("covered", []),
        does_not_cover=guarantee.get("not_covered", []),
        figures=report_figures(run),
        rounds=round_table(run),
        advice=advice(run),
        commands=commands(run),
        audited=(run.path / names.AUDIT_FOLDER).is_dir(),
        audit=None if audit is None else audit_section(audit),
        data=data_rows(run.facts, run.config) if run.facts and run.config else [],
        data_note=run.facts.note if run.facts else "",
        classes=classes(run),
        adapter_code=loading_code(run),
        adapter_export=export_command(run, loading_code(run)),
        classifies=bool((run.results or {}).get("label_names")),
        examples=examples(run),
        rouge=rouge_terms(run.results or {}) if rouge_text(run.results or {}) else "",
        ledger=ledger_table(run.account.charges) if run.account else None,
        settings=settings,
        settings_file=names.PHASES_FILE if run.phases else names.CONFIG_FILE,
        changed=[row for row in settings if row["value"] != row["default"]],
        environment=environment_rows(run.environment or {}),
        files=[(name, _file_text(name)) for name in _FILES if (run.path / name).exists()],
    )


def _file_text(name: str) -> str:
    """Say what a file is, and whether it may be shared."""
    why = names.FOR_THE_OWNER.get(name)
    return _FILES[name] + (f"; never share it: {why}" if why else "")


def _units(run: Run) -> str:
    return run.config.units_text if run.config else "clients"


_TASKS = {
    "classification": "Classification",
    "causal-lm": "Language modelling",
    "summarisation": "Summarisation",
    "instruction": "Instruction tuning",
    "preference": "Preference tuning",
}


def _what(run: Run) -> str:
    """The task, data set and model in a line: "Classification of notes with minilm"; "" if they are not known."""
    if run.config is None:
        return ""
    data, model = run.config.data, PurePath(run.config.model.name)
    kind, colon, path = data.source.partition(":")
    source = PurePath(path).name if colon and ("/" in path or kind in PATH_KINDS) else data.source
    records = "records of the nodes" if run.config.is_deployed else source
    return f"{_TASKS[run.config.model.task]} on {records} with {model.name if model.is_absolute() else model}"


def _about(run: Run) -> list[str]:
    if run.config is None:
        return []
    if run.phases:
        return ["phases", _phase_names(run)]
    return [run.config.strategy.controller, run.config.members_text]


def _phase_names(run: Run) -> str:
    return ", ".join(phase.name for phase in run.phases)


def _progress(run: Run) -> tuple[int, str]:
    """The rounds or phases done, and how many were planned, as "of N"; "" if that is not known."""
    if run.phases:
        return sum(phase.ended is not None for phase in run.phases), f"of {len(run.phases)}"
    return run.rounds[-1].round if run.rounds else 0, "" if run.config is None else f"of {run.config.rounds}"


def _ending(run: Run) -> dict[str, str] | None:
    """What to say above all numbers when the run did not complete."""
    if run.state == "completed":
        return None
    done, planned = _progress(run)
    what = "phases" if run.phases else "rounds"
    text = f"It did {done} {planned or 'of an unknown number of'} {what}; what they released and cost is below."
    return {"title": f"{state_text(run)}.", "text": text, "message": run.status.message if run.status else ""}


def _tiles(run: Run) -> list[Tile]:
    tiles = [_quality_tile(run), *_learnt_tile(run), *_rouge_tile(run), _epsilon_tile(run), _progress_tile(run)]
    time = training_time(run)
    if time is not None:
        dimension = run.result("dimension")
        trained = [f"{number_text(dimension)} values trained"] if dimension is not None else []
        tiles.append(Tile("Time in training", time, "; ".join([*_speed(run), "start-up not counted", *trained])))
    return tiles


def _speed(run: Run) -> list[str]:
    """The speed of the median round; the clients are those that were expected."""
    if not run.rounds:
        return []
    seconds = median(record.seconds for record in run.rounds)
    text = f"{number_text(float(f'{seconds:.2g}'))} s a round"
    if seconds > 0 and (cohort := run.rounds[-1].expected_cohort) > 0:
        text += f", {number_text(float(f'{cohort / seconds:.2g}'))} {_units(run)} a second"
    return [text]


def _progress_tile(run: Run) -> Tile:
    aside = _phase_names(run)
    if run.rounds and not run.phases:
        aside = f"{number_text(run.rounds[-1].expected_cohort)} {_units(run)} expected in each"
    done, planned = _progress(run)
    return Tile("Phases" if run.phases else "Rounds", f"{done} {planned}".strip(), aside)


def _quality_tile(run: Run) -> Tile:
    majority = run.result("majority_accuracy")
    aside = f"most frequent class: {percent_text(majority)}" if majority is not None else ""
    if run.accuracy_name != "accuracy":
        aside = "pairs whose chosen answer has the higher reward; 50 % prefers none"
    if (macro := run.result("test_macro_f1")) is not None:
        aside = "; ".join(filter(None, [f"macro-F1: {percent_text(macro)}", aside]))
    accuracy, loss = run.result("test_accuracy"), run.result("test_loss")
    if (perplexity := run.result("test_perplexity")) is not None:
        return Tile("Test perplexity", number_text(perplexity), "per token")
    if accuracy is not None:
        return Tile(f"Test {run.accuracy_name}", percent_text(accuracy), aside)
    if loss is not None:
        return Tile("Test loss", number_text(loss), "")
    perplexities = [r.validation_perplexity for r in run.rounds if r.validation_perplexity is not None]
    if perplexities:
        return Tile("Validation perplexity", number_text(perplexities[-1]), "public; not tested")
    validation = [record.validation_accuracy for record in run.rounds if record.validation_accuracy is not None]
    if validation:
        return Tile(f"Validation {run.accuracy_name}", percent_text(validation[-1]), "public; not tested")
    return Tile("Test accuracy", "none", "the run was not tested")


def _learnt_tile(run: Run) -> list[Tile]:
    """The gain over the start, by the same records."""
    found = gain_of(run)
    if found is None:
        return []
    before = f"validation {found.name} {found.before_text} before round 1, {found.after_text} now"
    who = found.who.capitalize()
    if found.name == "accuracy":
        return [Tile(f"{who} added", found.change, f"points: {before}", bad=not found.better)]
    return [Tile(f"{who} changed perplexity by", found.change, before, bad=not found.better)]


def _rouge_tile(run: Run) -> list[Tile]:
    results = run.results or {}
    if not rouge_text(results):
        return []
    *others, last = SCORES
    also = ", ".join(f"{SCORES[key]} {results[key]:.3f}" for key in others)
    return [Tile(f"Test {SCORES[last]}", f"{results[last]:.3f}", also)]


def _epsilon_tile(run: Run) -> Tile:
    if run.not_private:
        return Tile("Privacy", "none", selective_text(run) or "no guarantee", bad=True)
    pair = guaranteed_pair(run)
    if pair is None:
        return Tile("Privacy", "unknown", "no readable ledger")
    used = spent_text(run)
    aside = f"at δ = {delta_text(pair[1])}" + (f"; {used}" if used else "")
    return Tile("Privacy", f"ε ≤ {epsilon_text(pair[0])}", aside)
