"""``lacquer sweep --private``: choose settings and train under one guarantee; what choosing costs is a number."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console

from privacy.commitment import POISSON, Tries
from privacy.randomness.tries import chance_of_at_most
from server.config.load import ConfigError
from server.run_folder.errors import CannotResume
from simulations.cli.exits import FAILED, INTERRUPTED, end_on_signals, refusals, say
from simulations.cli.progress import say_working
from simulations.history.earlier import planned_costs, warn_together
from simulations.preflight import Checked, check_candidates
from simulations.report.budget import Cost
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text, plain_table, table_console
from simulations.sweep.candidates import CANDIDATES, PrivateSweep, Released
from simulations.sweep.cells import Cell
from simulations.sweep.tuning import NoiseOf, TuningPlan, every_cell_once
from strategies.calibration import Calibrated

LAWS = {"poisson": POISSON, "geometric": 1.0, "logarithmic": 0.0}


def tries_of(mean: float | None, law: str, cells: int) -> Tries:
    """Read the law of the number of tries as it was asked for; ConfigError names the option."""
    try:
        shape = LAWS[law] if law in LAWS else float(law)
    except ValueError:
        raise ConfigError(
            f"--draw {law}: must be one of {', '.join(LAWS)}, or the shape of a truncated negative binomial, >= 0"
        ) from None
    try:
        return Tries(float(cells) if mean is None else mean, shape)
    except ValueError as error:
        raise ConfigError(f"--tries and --draw: {error}") from None


def private_sweep(
    name: str, cells: list[Cell], folder: Path, tries: Tries, jobs: int, plugins: Path, *, dry_run: bool
) -> None:
    """Say what it would cost, or run what is missing of it and release the best; ends the command where that fails."""
    console = table_console()
    with refusals(CannotResume):
        with say_working("calibrating candidates"):
            plan, single, noise_of = check_candidates(cells, tries)
            warnings = _together(single, plan, folder)
        for warning in warnings:
            console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
        if dry_run:
            with say_working("calibrating the alternatives", console):
                print_plan(console, cells, plan, single, noise_of)
            return
        sweep = PrivateSweep(name, folder, cells, plan)
    console.print(plan.statement, markup=False, highlight=False, soft_wrap=True)
    with closing(sweep), refusals(CannotResume):
        try:
            with (
                end_on_signals(),
                say_working("tuning; how many candidates there are, and how they do, is not shown"),
            ):
                sweep.run(jobs, plugins, lambda: None)
                released, failures = sweep.release(), sweep.failures
        except KeyboardInterrupt:
            say("Interrupted. The budget stays charged, once; the same command goes on as it was drawn.", "yellow")
            raise typer.Exit(INTERRUPTED) from None
    _print_released(console, released, failures, folder)


def _together(single: Mapping[str, Checked], plan: TuningPlan, folder: Path) -> list[str]:
    """Warn of what this sweep and earlier runs cost together.

    It is one event, charged once however often it goes on.
    """
    one = next(iter(single.values()))
    event = Cost(folder, plan.total, plan.delta, None, None, None)
    new = [replace(run, cost=event) for run in planned_costs(one.config, one.source, one.noise)]
    return warn_together(new, [folder.parent, Path(one.config.output)], "this private sweep", but=folder)


def print_plan(
    console: Console,
    cells: Sequence[Cell],
    plan: TuningPlan,
    single: Mapping[str, Checked],
    noise_of: NoiseOf,
) -> None:
    """Print a private sweep's dry run: a candidate's noise beside that of one run and of running every cell."""
    tries, count = plan.tries, len(cells)
    at = f"epsilon at most {epsilon_text(plan.epsilon)} at delta {delta_text(plan.delta)}"

    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    line(f"Private sweep, {count} cell{'s' * (count > 1)}: tuning and training together cost {at}.")
    chance = f"at most one with a chance of {percent_text(chance_of_at_most(1, tries))}"
    if none := chance_of_at_most(0, tries):
        chance += f", none (and so no model) with {percent_text(none, 2)}"
    line(f"Tries: {number_text(tries.mean)} expected ({tries.name} law); {chance}.")
    line(
        f"A candidate by itself costs epsilon {epsilon_text(plan.alone)} (PLD); choosing the best of them brings that "
        f"to {epsilon_text(plan.total)} (RDP, order {plan.order:g})."
    )
    columns: dict[str, Mapping[str, Calibrated]] = {}
    try:
        each, columns["every cell once, composed"] = every_cell_once(cells, noise_of)
        line(f"Instead, every cell once and all released: epsilon {epsilon_text(each)} each, composed by PLD.")
    except ConfigError as error:
        line(f"Every cell once and all released cannot be: {error}")
    try:
        columns["epsilon / cells"] = {cell.key: noise_of(cell, plan.epsilon / count) for cell in cells}
    except ConfigError as error:
        line(f"An equal share of epsilon for every cell cannot be: {error}")
    table = plain_table()
    for title in ("Noise multiplier", "one run, untuned", "candidate", *columns):
        table.add_column(
            title, justify="left" if title == "Noise multiplier" else "right", no_wrap=title == "Noise multiplier"
        )
    for cell in cells:
        found = [
            single[cell.key].multipliers,
            *(column[cell.key].multipliers for column in (plan.noise, *columns.values())),
        ]
        table.add_row(cell.key, *(_noise(multipliers) for multipliers in found))
    console.print(table)
    line("Nothing was drawn or started (--dry-run).")


def _print_released(console: Console, released: Released, failures: Sequence[str], folder: Path) -> None:
    if released.cell is None or released.row is None:
        if failures:
            say("Every candidate failed; nothing is released, and the budget is spent. Why, for you alone:")
            say(failures[0])
            say(f"Their folders are left in {folder / CANDIDATES}; neither they nor their number may leave this host.")
            raise typer.Exit(FAILED)
        say("The draw gave no candidate: nothing is released, and the budget is spent (see --dry-run for the chance).")
        raise typer.Exit(FAILED)
    entry = released.row
    accuracy = entry["validation_accuracy"]
    text = f"chosen: {released.cell.key}, epsilon {epsilon_text(entry['epsilon_stated'])} for tuning and training"
    if entry.get("validation_perplexity") is not None:
        text += f", perplexity {number_text(entry['validation_perplexity'])} on public records"
    elif accuracy is not None:
        text += f", accuracy {percent_text(accuracy)} on public records, {percent_text(entry['test_accuracy'])} on test"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"run: {released.folder}", markup=False, highlight=False, soft_wrap=True)


def _noise(multipliers: Sequence[float]) -> str:
    first, last = number_text(multipliers[0]), number_text(multipliers[-1])
    return first if first == last else f"{first} to {last}"
