"""What `lacquer run` says last: how good, how private, how long, where it lies, what to do next."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from server.evaluation.answers import rouge_terms, rouge_text
from server.run_folder.names import REPORT_FILE
from simulations.report.examples import shortened
from simulations.report.notation import WIDEST, number_text, percent_text
from simulations.report.outcome import guarantee_sentence, privacy_text, resumed_text, state_text, training_time
from simulations.report.page import loading_code
from simulations.report.read_run import Run, read_run

_STYLES = {"completed": "green", "stopped-budget": "yellow"}


def print_summary(run_folder: Path, console: Console | None = None) -> None:
    """Print the summary of a run; plain text where colours and boxes have no place.

    Raises:
        NoRunFolder: if the folder is none.
    """
    console = console or Console()
    run = read_run(run_folder)
    if console.is_terminal and not console.options.ascii_only:
        console.print(summary_panel(run, console.width))
        steps = Table.grid(padding=(0, 2, 0, 0))
        steps.add_column(style="dim", no_wrap=True)
        steps.add_column(overflow="fold")
        for label, text in _next_steps(run):
            steps.add_row(label, Text(text))
        console.print(Padding(steps, (1, 0, 1, 2)))
        return
    facts = [f"{label}: {value}" for label, value in _facts(run)]
    further = [f"{label.lower()}: {text}" for label, text in _next_steps(run) if "\n" not in text]
    for line in (*facts, *filter(None, [resumed_text(run)]), guarantee_sentence(run), *further):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_panel(run: Run, width: int) -> RenderableType:
    """The numbers of a run and its guarantee, in a frame."""
    color = "red" if run.not_private else _STYLES.get(run.state, "red")
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(style="bold")
    for label, value in _facts(run):
        facts.add_row(label, Text(value, "bold red" if label == "privacy" and run.not_private else ""))
    parts: list[RenderableType] = [facts, Text(), Text(guarantee_sentence(run))]
    if run.not_private:
        parts.insert(0, Padding(Text(f"NOT PRIVATE: {run.not_private}", "bold red"), (0, 0, 1, 0)))
    if text := resumed_text(run):
        parts += [Text(), Text(text)]
    if run.state not in _STYLES and run.status:
        parts += [Text(), Text(run.status.message, "red")]
    return Panel(
        Group(*parts),
        title=Text.assemble((run.name, "bold"), f" {state_text(run).lower()}"),
        title_align="left",
        border_style=color,
        padding=(1, 2),
        width=min(width, WIDEST),
    )


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    majority = run.result("majority_accuracy")
    baseline = f" (most frequent class {percent_text(majority)})" if majority is not None else ""
    for key, label, form in (
        ("test_perplexity", "test perplexity", number_text),
        ("test_accuracy", "test accuracy", lambda value: percent_text(value) + baseline),
        ("test_loss", "test loss", number_text),
        ("validation_accuracy", "validation accuracy", percent_text),
    ):
        value = run.result(key)
        if value is not None:
            yield label, form(value)
    if rouge := rouge_text(run.results or {}):
        yield "rouge", f"{rouge} ({rouge_terms(run.results or {})})"
    yield from shortened(run)
    yield "privacy", privacy_text(run)
    done = run.rounds[-1].round if run.rounds else 0
    planned = run.rounds_planned
    if planned != 0:  # phases without noise have none
        yield "rounds", str(done) if planned is None else f"{done} of {planned}"
    time = training_time(run)
    if time is not None:
        yield "time", time
    yield "run folder", str(run.shown_path)


def _next_steps(run: Run) -> Iterator[tuple[str, str]]:
    yield "Report", str(run.shown_path / REPORT_FILE)
    code = loading_code(run)
    if code is not None:
        yield "Load", code
    else:
        yield "Again", f"lacquer report {run.shown_path}"
