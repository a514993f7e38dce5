"""The summary that `lacquer run` ends with, in three lines: how good, how private, where it lies and what next.

Before them stands what is wrong, if anything is; the report has the rest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from server.evaluation.answers import SCORES
from server.run_folder.names import ADAPTER_FOLDER, REPORT_FILE, shell_quoted
from simulations.report.judgement import judgements
from simulations.report.notation import number_text, percent_text
from simulations.report.outcome import (
    beside_public,
    examples,
    gain_of,
    guaranteed_pair,
    privacy_text,
    resumed_text,
    run_time,
    selective_text,
    state_text,
)
from simulations.report.read_run import Run, read_run

SHORT = 160
"""Most characters of a text that is shown."""

_STYLES = {"completed": "bold green", "stopped-budget": "bold yellow"}


def print_summary(run_folder: Path, console: Console | None = None) -> None:
    """Print the summary of a run; plain text where colours have no place.

    Raises:
        NoRunFolder: if the folder is none.
    """
    console, run = console or Console(), read_run(run_folder)
    for line in summary_lines(run):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def summary_lines(run: Run) -> list[Text]:
    """The three lines, behind warnings and an example where there are any."""
    color = "bold red" if run.not_private else _STYLES.get(run.state, "bold red")
    asides = [Text(f"Warning: {text}", "yellow") for text in judgements(run)]
    if text := resumed_text(run):
        asides.append(Text(text))
    if run.state not in _STYLES and run.status:
        asides.append(Text(run.status.message, "red"))
    asides += [Text.assemble((f"{label}: ", "dim"), said) for label, said in _answers(run)]
    time = run_time(run)
    head = f"{run.name}: {state_text(run).lower()}" + (f" in {time}" if time else "")
    good = "; ".join(_quality(run))
    privacy = Text.assemble(("privacy: ", "dim"), Text("; ".join(_privacy(run)), "bold red" if run.not_private else ""))
    return [
        *asides,
        Text.assemble((head, color), f". {good[0].upper()}{good[1:]}" if good else ""),
        privacy,
        Text.assemble(("run folder: ", "dim"), "; ".join([str(run.shown_path), *_next_steps(run)])),
    ]


def _quality(run: Run) -> Iterator[str]:
    majority, macro = run.result("majority_accuracy"), run.result("test_macro_f1")
    perplexity, accuracy, loss = (run.result(f"test_{name}") for name in ("perplexity", "accuracy", "loss"))
    if perplexity is not None:
        yield f"test perplexity {number_text(perplexity)}"
    elif accuracy is not None:
        text = f"test {run.accuracy_name} {percent_text(accuracy)}"
        text += "" if macro is None else f", macro-F1 {percent_text(macro)}"
        yield text + ("" if majority is None else f" (most frequent class {percent_text(majority)})")
    elif loss is not None:
        yield f"test loss {number_text(loss)}"
    if (beside := beside_public(run)) is not None:
        yield f"{beside.public} with public records alone"
    rouge = [f"{name} {value:.3f}" for key, name in SCORES.items() if (value := run.result(key)) is not None]
    if rouge:
        yield ", ".join(rouge)
    if (found := gain_of(run)) is not None:
        yield found.sentence


def _privacy(run: Run) -> Iterator[str]:
    if run.not_private:
        yield f"none. NOT PRIVATE: {run.not_private}"
        if text := selective_text(run):
            yield text
    else:
        unit = str((run.guarantee or {}).get("unit", "")).removeprefix("group:")
        adjacency = (run.guarantee or {}).get("adjacency", "add_remove")
        what = {"add_remove": "added or removed", "zero_out": "zeroed out"}.get(str(adjacency), "replaced")
        yield privacy_text(run) + (f", for one {unit} {what}" if unit else "")
    done, planned = run.rounds[-1].round if run.rounds else 0, run.rounds_planned
    if planned != 0:  # phases without noise have none
        yield f"{done} rounds" if planned is None else f"{done} of {planned} rounds"


def _answers(run: Run) -> Iterator[tuple[str, str]]:
    """The first example in three lines with their labels; of a prompt the end, where the question is."""
    for example in examples(run)[:1]:
        yield "asked", _end(example.prompt)
        yield "before", _beginning(example.before)
        yield "after", _beginning(example.after)


def _beginning(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else f"{text[: SHORT - 3].rstrip()}..."


def _end(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else f"...{text[3 - SHORT :].lstrip()}"


def _next_steps(run: Run) -> Iterator[str]:
    yield REPORT_FILE
    if not (run.path / ADAPTER_FOLDER / "adapter_config.json").is_file():
        return
    if (run.results or {}).get("label_names"):
        yield f'lacquer predict {shell_quoted(run.shown_path)} "a text"'
    else:
        yield f'lacquer generate {shell_quoted(run.shown_path)} --prompt "a text"'


def plain_results(run_folder: Path) -> dict[str, Any]:
    """The results of a run that has ended, for a program: where it lies, its state, numbers and guarantee."""
    run = read_run(run_folder)
    pair = guaranteed_pair(run)
    return {
        "folder": str(run.path),
        "state": run.state,
        "epsilon": None if pair is None else pair[0],
        "delta": None if pair is None else pair[1],
        "not_private": run.not_private,
        "warnings": judgements(run),
        "results": {key: value for key, value in (run.results or {}).items() if key != "test_confusion"},
    }
