"""Which pictures a run has to show, with what they mean in words: for those who read them and those who hear them.

A figure as SVG that is part of a page: its colours follow the page's light or dark theme, its ids stay its own.

`python -m simulations.report.figures RUN docs/quickstart`: a run in one strip, as the README shows it.

Writes `docs/quickstart-light.svg` and `docs/quickstart-dark.svg` from a run folder, same run, same bytes. Text is drawn
as outlines, because the page that shows the picture may lack the font.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from simulations.report import plots
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text
from simulations.report.plots import DARK, LIGHT, SIZE, Palette, draw_figure
from simulations.report.read_run import Run, read_run


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The `<svg>` element of a figure drawn in the LIGHT palette.

    Colours become the page's CSS variables `--plot-ROLE` (with the light colour as fallback), text stays text.

    Args:
        figure: drawn with :data:`~simulations.report.plots.LIGHT`.
        name: prefix of every id, so that several figures may share one page.
        description: what a reader who cannot see it is told.
    """
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    svg = text[text.index("<svg ") :].rstrip()
    for unwanted in (r"<metadata>.*?</metadata>\s*", r"<!--.*?-->\s*", r"<defs>\s*<style.*?</style>\s*</defs>\s*"):
        svg = re.sub(unwanted, "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg).replace("url(#", f"url(#{name}-")
    svg = svg.replace("'DejaVu Sans'", "var(--plot-font, sans-serif)")
    for role, color in vars(LIGHT).items():
        svg = svg.replace(color, f"var(--plot-{role}, {color})")
    opening = svg[: svg.index(">") + 1]
    size = re.search(r'viewBox="[^"]*"', opening)
    if size is None:
        raise ValueError("matplotlib wrote an SVG without a viewBox")
    head = f'<svg {size.group()} role="img" aria-labelledby="{name}-title" stroke-linejoin="round">'
    return f'{head}<title id="{name}-title">{escape(description)}</title>{svg[len(opening) :]}'


@dataclass(frozen=True)
class ReportFigure:
    """A figure as a page shows it. `meaning` says how to read it, `description` what it shows in this run."""

    name: str
    title: str
    meaning: str
    description: str
    svg: str


def report_figures(run: Run) -> list[ReportFigure]:
    """The figures for which the run has values, in the order of a report."""
    figures: list[ReportFigure] = []

    def add(name: str, title: str, meaning: str, description: str, figure: Figure) -> None:
        svg = inline_svg(figure, name, f"{title}. {description}")
        figures.append(ReportFigure(name, title, meaning, description, svg))

    if run.recipe and run.recipe.done:
        losses = [float(told["validation_loss"]) for told in run.recipe.done]
        add(
            "phases",
            "Loss",
            "Mean cross-entropy on the server's public validation records, in nats, after every phase.",
            "; ".join(
                f"{number_text(loss)} after {told['name']}" for told, loss in zip(run.recipe.done, losses, strict=True)
            )
            + ".",
            _phase_losses([str(told["name"]) for told in run.recipe.done], losses),
        )
    test, majority = run.result("test_accuracy"), run.result("majority_accuracy")
    if values := _known(run, "validation_accuracy"):
        add(
            "accuracy",
            "Accuracy",
            "On the server's public validation records, after every round."
            + (" The test set was used once, at the end." if test is not None else ""),
            f"From {percent_text(values[0])} to {percent_text(values[-1])}, best {percent_text(max(values))}."
            + (f" Test: {percent_text(test)}." if test is not None else ""),
            plots.accuracy(run.metrics, test_accuracy=test, majority_accuracy=majority),
        )
    if values := _known(run, "validation_loss"):
        add(
            "loss",
            "Loss",
            "Mean cross-entropy on the same records, in nats.",
            f"From {number_text(values[0])} to {number_text(values[-1])}, lowest {number_text(min(values))}.",
            plots.loss(run.metrics),
        )
    if run.rounds and not run.not_private and math.isfinite(run.metrics[-1].epsilon_spent):
        last = run.metrics[-1]
        add(
            "epsilon",
            "Privacy spent",
            "An upper bound after every release; the run stops before it would pass the budget.",
            f"{epsilon_text(last.epsilon_spent)} of {number_text(last.epsilon_budget)} after round {last.round}.",
            plots.epsilon_spent(run.metrics),
        )
    if values := _known(run, "clip_bound"):
        add(
            "clip",
            "Clip threshold",
            "The largest L2 norm one client's update may have; longer ones are scaled down to it. The noise is "
            "proportional to it.",
            f"From {number_text(values[0])} to {number_text(values[-1])}.",
            plots.clip_threshold(run.metrics),
        )
    if values := _known(run, "update_norm"):
        add(
            "norms",
            "Signal and noise",
            "Norm of the released update, and what of it noise alone explains. Learning is possible with a signal far "
            "below the noise, because the noise points elsewhere every round.",
            f"The released norm goes from {number_text(values[0])} to {number_text(values[-1])}.",
            plots.update_norm(run.metrics),
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


def _phase_losses(names: Sequence[str], losses: Sequence[float]) -> Figure:
    def draw(axes: Axes, palette: Palette) -> None:
        axes.plot(names, losses, color=palette.first, marker="o", markersize=3.5)
        axes.set(ylabel="validation loss")
        axes.margins(x=0.15)

    return draw_figure([draw], LIGHT, SIZE)


def _known(run: Run, name: str) -> list[float]:
    values: Sequence[float | None] = [getattr(record, name) for record in run.rounds]
    return [value for value in values if value is not None and math.isfinite(value)]


def _curve(run: Run) -> list[tuple[float, float]]:
    """(delta, epsilon) pairs of the guarantee."""
    points = (run.guarantee or {}).get("curve", []) if not run.not_private else []
    return [(float(point["delta"]), float(point["epsilon"])) for point in points]


THEMES = {"light": LIGHT, "dark": DARK}


def write_overview(run_folder: Path, stem: Path) -> list[Path]:
    """Write one picture per theme and return their paths.

    Raises:
        ValueError: if the folder is no run folder (NoRunFolder), or the run has no training round to show.
    """
    run = read_run(run_folder)
    if not run.rounds:
        raise ValueError(f"{run_folder} has no training round to show; give the folder of a run that trained")
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, palette in THEMES.items():
        figure = plots.overview(run.metrics, palette, test_accuracy=run.result("test_accuracy"))
        target = stem.with_name(f"{stem.name}-{theme}.svg")
        with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "overview"}):
            figure.savefig(target, metadata={"Date": None, "Creator": None})
        written.append(target)
    return written


def main(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    stem: Annotated[Path, typer.Argument(help="where to write, without -light.svg and -dark.svg")],
) -> None:
    """Draw the run as the README shows it."""
    for path in write_overview(run, stem):
        Console().print(str(path))


if __name__ == "__main__":
    typer.run(main)
