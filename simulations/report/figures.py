"""The figures of a report, each with what it means in words: for those who see it and those who have it read out.

`python -m simulations.report.figures RUN docs/quickstart` draws a run in one strip, as the README shows it, into
`docs/quickstart-light.svg` and `docs/quickstart-dark.svg`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from rich.console import Console

from simulations.report import plots
from simulations.report.judgement import sum_text
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text
from simulations.report.read_run import Run, read_run
from simulations.report.svg import Reading, inline_svg, write_themes


@dataclass(frozen=True)
class ReportFigure:
    """A figure as a page shows it. `meaning` says how to read it, `description` what it shows in this run."""

    name: str
    title: str
    meaning: str
    description: str
    svg: str


def report_figures(run: Run) -> list[ReportFigure]:
    """Draw the figures for which the run has values, in the order of a report."""
    figures: list[ReportFigure] = []

    def add(
        name: str, title: str, meaning: str, description: str, figure: Figure, readings: Sequence[Reading] = ()
    ) -> None:
        svg = inline_svg(figure, name, f"{title}. {description}", readings)
        figures.append(ReportFigure(name, title, meaning, description, svg))

    if ended := {phase.name: phase.ended["validation_loss"] for phase in run.phases if phase.ended}:
        add(
            "phases",
            "Loss after every phase",
            "Mean cross-entropy on the server's public validation records, in nats.",
            "; ".join(f"{number_text(loss)} after {name}" for name, loss in ended.items()) + ".",
            plots.phase_losses(ended),
        )
    test, majority = run.result("test_accuracy"), run.result("majority_accuracy")
    perplexities = _known(run, "validation_perplexity")
    if perplexities:
        tested = run.result("test_perplexity")
        add(
            "perplexity",
            "Perplexity",
            "Per token on the server's public validation records, after every round; lower is better.",
            f"From {number_text(perplexities[0])} to {number_text(perplexities[-1])}, lowest "
            f"{number_text(min(perplexities))}." + (f" Test: {number_text(tested)}." if tested is not None else ""),
            plots.over_rounds(plots.perplexity, run.metrics),
            _readings(run, "validation_perplexity", number_text),
        )
    if not perplexities and (values := _known(run, "validation_accuracy")):
        add(
            "accuracy",
            run.accuracy_name.capitalize(),
            (
                "Estimates of held-out clients, with noise that is paid for."
                if run.metrics and run.metrics[-1].validation_accuracy_within is not None
                else "On the server's public validation records, after every round."
            )
            + (" The test set was used once, at the end." if test is not None else ""),
            f"From {percent_text(values[0])} to {percent_text(values[-1])}, best {percent_text(max(values))}."
            + (f" Test: {percent_text(test)}." if test is not None else ""),
            plots.over_rounds(plots.accuracy, run.metrics, test_accuracy=test, majority_accuracy=majority),
            _readings(run, "validation_accuracy", percent_text),
        )
    if values := _known(run, "validation_loss"):
        add(
            "loss",
            "Loss",
            "Mean cross-entropy on the same records, in nats.",
            f"From {number_text(values[0])} to {number_text(values[-1])}, lowest {number_text(min(values))}.",
            plots.over_rounds(plots.loss, run.metrics),
            _readings(run, "validation_loss", number_text),
        )
    if run.rounds and not run.not_private and math.isfinite(run.metrics[-1].epsilon_spent):
        last = run.metrics[-1]
        add(
            "epsilon",
            "Privacy spent",
            "An upper bound after every release; the run stops before it would pass the budget.",
            f"ε {epsilon_text(last.epsilon_spent)} of {number_text(last.epsilon_budget)} after round {last.round}.",
            plots.over_rounds(plots.epsilon_spent, run.metrics),
            _readings(run, "epsilon_spent", epsilon_text),
        )
    if values := _known(run, "clip_bound"):
        add(
            "clip",
            "Clip threshold",
            f"The largest L2 norm one {_unit(run)}'s update may have; longer ones are scaled down to it. The noise is "
            f"proportional to it. {_noise_text(run)}".rstrip(),
            f"C goes from {number_text(values[0])} to {number_text(values[-1])}."
            if min(values) < max(values)
            else f"C is {number_text(values[0])} in every round.",
            plots.over_rounds(plots.clip_threshold, run.metrics),
            _readings(run, "clip_bound", number_text),
        )
    noises = _known(run, "noise_multiplier", start=False)
    if not _noise_text(run) and noises:
        add(
            "noise",
            "Noise multiplier",
            "Standard deviation of the noise on the sum, over what one unit may change it by.",
            f"From {number_text(noises[0])} to {number_text(noises[-1])}.",
            plots.over_rounds(plots.noise_multiplier, run.metrics),
            _readings(run, "noise_multiplier", number_text),
        )
    if values := _known(run, "update_norm"):
        add(
            "norms",
            "Signal and noise",
            "Norm of the released update, and what of it noise alone explains. "
            + (
                sum_text(run)
                or "Learning is possible with a signal far below the noise, because the noise points elsewhere every "
                "round."
            ),
            f"The released norm goes from {number_text(values[0])} to {number_text(values[-1])}.",
            plots.over_rounds(plots.update_norm, run.metrics),
            _readings(run, "update_norm", number_text, noise_norm="noise", signal_estimate="signal"),
        )
    curve = _curve(run)
    if curve:
        delta = float((run.guarantee or {}).get("delta", math.nan))
        add(
            "curve",
            "The same guarantee at other deltas",
            "One run satisfies all of these pairs at once.",
            "; ".join(f"epsilon {epsilon_text(e)} at delta {delta_text(d)}" for d, e in curve[:: len(curve) // 4 or 1]),
            plots.privacy_curve(curve, delta),
        )
    return figures


def _readings(run: Run, name: str, form: Callable[[float], str], **further: str) -> list[Reading]:
    """List a value of every round, and of the start if validated, with further values by their names."""
    start = [run.start] if run.start and name.startswith("validation_") else []
    readings = []
    for record in (*start, *run.rounds):
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            also = [f", {label} {form(other)}" for key, label in further.items() if (other := getattr(record, key))]
            place = f"round {record.round}" if record.round else "start"
            readings.append((float(record.round), value, f"{place}: {form(value)}{''.join(also)}"))
    return readings


def _unit(run: Run) -> str:
    """The unit whose updates are clipped, in the singular; at several sites it is what each of them protects."""
    if run.config is None:
        return "client"
    return run.config.unit.removeprefix("group:")


def _noise_text(run: Run) -> str:
    """The noise multiplier where every round has the same; else there is a figure of it."""
    noises = set(map(number_text, _known(run, "noise_multiplier", start=False)))
    return f"Its multiplier is {noises.pop()} in every round." if len(noises) == 1 else ""


def _known(run: Run, name: str, *, start: bool = True) -> list[float]:
    """The finite values of a field over the rounds; of the start too, if that was measured and is asked for."""
    records = [*([run.start] if run.start and start else []), *run.rounds] if run.rounds else []
    values: Sequence[float | None] = [getattr(record, name) for record in records]
    return [value for value in values if value is not None and math.isfinite(value)]


def _curve(run: Run) -> list[tuple[float, float]]:
    """The (delta, epsilon) pairs of the guarantee."""
    points = (run.guarantee or {}).get("curve", []) if not run.not_private else []
    return [(float(point["delta"]), float(point["epsilon"])) for point in points]


def write_overview(run_folder: Path, stem: Path) -> list[Path]:
    """Write one picture per theme of a run's rounds; returns their paths.

    Raises:
        ValueError: if the folder is no run folder (NoRunFolder), or the run has no training round to show.
    """
    run = read_run(run_folder)
    if not run.rounds:
        raise ValueError(f"{run_folder} has no training round to show; give the folder of a run that trained")
    test = run.result("test_accuracy")
    return write_themes(lambda palette: plots.overview(run.metrics, palette, test_accuracy=test), stem)


def main(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    stem: Annotated[Path, typer.Argument(help="where to write, without -light.svg and -dark.svg")],
) -> None:
    """Draw the run as the README shows it."""
    for path in write_overview(run, stem):
        Console().print(str(path))


if __name__ == "__main__":
    typer.run(main)
