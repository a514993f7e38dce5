"""The plan of a run before it starts: its data, likely faults, what earlier runs have spent, its noise."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from server.config.load import flatten
from server.config.schema import RunConfig
from simulations.report.notation import delta_text, epsilon_text, number_text

if TYPE_CHECKING:
    from simulations.preflight import Checked


def say_known(checked: "Checked", console: Console) -> None:
    """Print what is known before a run's progress: the data, warnings, the guarantee where it is not obvious."""
    from simulations.report.data_block import data_rows, data_table
    from simulations.report.judgement import foresee_problems

    if checked.facts is not None and console.is_terminal:
        console.print(data_table(checked.facts, checked.config))
    elif checked.facts is not None:
        for label, text in data_rows(checked.facts, checked.config):
            console.print(f"{label.lower()}: {text}", markup=False, highlight=False, soft_wrap=True)
    for warning in [*foresee_problems(checked.config, checked.facts), *earlier_runs(checked)]:
        console.print(f"Warning: {warning}", style="yellow", markup=False, highlight=False)
    if checked.sentence:
        console.print(checked.sentence, markup=False, highlight=False, soft_wrap=True)


def say_plan(checked: "Checked", *, as_json: bool, time: str = "") -> None:
    """Print what would be run: settings that are not defaults, data, noise; nothing is started.

    Args:
        time: that it takes here, in words; empty where it is not known.
    """
    from simulations.report.judgement import foresee_problems

    config, noise = checked.config, _noise(checked)
    changed = _changed(config)
    if as_json:
        facts = None if checked.facts is None else asdict(checked.facts)
        warnings = [*foresee_problems(config, checked.facts), *earlier_runs(checked)]
        typer.echo(
            json.dumps(
                {"settings": changed, "data": facts, "noise": noise, "warnings": warnings, "time": time}, indent=2
            )
        )
        return
    console = Console()
    console.print(f"{config.name}: {config.rounds} rounds, {config.members_text}", style="bold", highlight=False)
    for key, value in changed.items():
        console.print(f"  {key} = {json.dumps(value)}", markup=False, highlight=False)
    if noise:
        text = f"noise multiplier {number_text(noise['first'])}"
        if noise["last"] != noise["first"]:
            text += f" to {number_text(noise['last'])}"
        text += f" on the sum over {number_text(noise['expected_cohort'])} expected in a round: on their mean "
        text += f"{number_text(noise['on_mean'])} C per value, C the clip threshold"
        console.print(f"  {text}", markup=False, highlight=False)
    console.print(
        f"  epsilon at most {epsilon_text(config.privacy.epsilon)} at delta {delta_text(config.privacy.delta)}",
        highlight=False,
    )
    if time:
        console.print(f"  {time}", highlight=False)
    say_known(checked, console)
    console.print("Nothing was started (--dry-run).", style="dim")


def earlier_runs(checked: "Checked") -> list[str]:
    """Warn of what this run and earlier ones on the same data have cost together.

    The earlier ones are those in its output folder, sweeps included.
    """
    from simulations.history.earlier import planned_costs, warn_together

    config = checked.config
    return warn_together(planned_costs(config, checked.source, checked.noise), [Path(config.output)], "this run")


def _noise(checked: "Checked") -> dict[str, float] | None:
    """The noise of the first and the last round, and on a cohort's mean; None where sites calibrate for themselves."""
    found: Any = checked.noise
    multipliers = found.get("multipliers") if isinstance(found, dict) else None
    if not multipliers or not isinstance(multipliers[0], int | float):
        return None
    config = checked.config
    cohort = float(config.site.batch_size) if config.is_single_site else config.expected_cohort
    return {
        "first": multipliers[0],
        "last": multipliers[-1],
        "expected_cohort": cohort,
        "on_mean": multipliers[0] / cohort,
    }


def _changed(config: RunConfig) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    defaults = flatten(RunConfig().to_table())
    return {key: value for key, value in flatten(config.to_table()).items() if value != defaults.get(key)}
