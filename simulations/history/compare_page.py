"""A comparison as a table for a terminal, and as one page that needs nothing else: the table and the curves."""

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.table import Table
from rich.text import Text

from privacy import durable
from simulations.history.compare import Comparison
from simulations.history.paired import Estimate
from simulations.report.notation import epsilon_text, number_text, plain_table
from simulations.report.plots import LIGHT as LIGHT_PALETTE
from simulations.report.plots import Palette, draw_figure
from simulations.report.svg import inline_svg
from simulations.report.templating import render_template

MOST_DRAWN = 6
"""Lines that can be told from each other in one picture; further groups are in the table."""

PAGE = "compare.html"
_DASHES: tuple[object, ...] = ("-", (0, (4, 1.5)))


def comparison_table(found: Comparison) -> Table:
    """Draw one row for each group.

    Where it is too wide, the measures are broken into lines and the names stay whole.
    """
    table = plain_table(gap=2)
    table.add_column("Runs", no_wrap=True)
    table.add_column("Seeds", justify="right")
    for _, label, _ in found.measures:
        table.add_column(label, justify="right")
    table.add_column("Epsilon", justify="right")
    for group in found.groups:
        cells = [estimate_text(group.estimate(name), form).replace("± ", "±\u00a0") for name, _, form in found.measures]
        table.add_row(Text(group.label, "cyan"), str(len(group.runs)), *cells, _epsilon(group.epsilon))
    return table


def estimate_text(estimate: Estimate | None, form: Callable[[float], str]) -> str:
    """The mean and half of its interval in the measure's form; of two seeds both, whose interval says nothing."""
    if estimate is None:
        return ""
    if len(estimate.values) == 2:
        return " and ".join(dict.fromkeys(form(value) for value in estimate.values))
    return form(estimate.mean) if estimate.half is None else f"{form(estimate.mean)} ± {_bare(form(estimate.half))}"


def difference_text(estimate: Estimate | None, form: Callable[[float], str]) -> str:
    """The text of a difference, with its sign."""
    if estimate is None:
        return ""
    sign = "+" if estimate.mean >= 0 else "−"
    text = f"{sign}{_bare(form(abs(estimate.mean)))}"
    return text if estimate.half is None or len(estimate.values) == 2 else f"{text} ± {_bare(form(estimate.half))}"


def write_comparison(found: Comparison, target: Path) -> Path:
    """Write the page and return its path."""
    differences = {name: found.differences(name) for name, _, _ in found.measures}
    rows = []
    for place, group in enumerate(found.groups):
        measured = []
        for name, _, form in found.measures:
            difference, told, smallest = differences[name][place]
            measured.append(
                {
                    "text": estimate_text(group.estimate(name), form),
                    "difference": difference_text(difference, form),
                    "told_apart": told,
                    "smallest": "" if told or not smallest else _bare(form(smallest)),
                }
            )
        rows.append(
            {"label": group.label, "seeds": group.seeds, "measured": measured, "epsilon": _epsilon(group.epsilon)}
        )
    page = render_template(
        PAGE,
        title=_title(found),
        unlike=found.unlike,
        columns=[label for _, label, _ in found.measures],
        rows=rows,
        figures=_figures(found),
        omitted=max(0, len(found.groups) - MOST_DRAWN),
    )
    durable.write(target, page)
    return target


def _title(found: Comparison) -> str:
    runs = sum(len(group.runs) for group in found.groups)
    settings = len(found.groups)
    return f"{settings} setting{'s' * (settings > 1)}, {runs} run{'s' * (runs > 1)}"


def _figures(found: Comparison) -> list[tuple[str, str]]:
    """The title and SVG of the curves that the runs have."""
    texts = any(group.curve("validation_perplexity") for group in found.groups)
    wanted = [
        ("validation_perplexity" if texts else "validation_accuracy", "Perplexity" if texts else "Accuracy", texts),
        ("validation_loss", "Loss", True),
        ("epsilon_spent", "Epsilon spent", True),
        ("clip_bound", "Clip threshold", True),
    ]
    drawn = []
    for name, title, number in wanted:
        if any(len(group.curve(name)) > 1 for group in found.groups):
            figure = overlay(found, name, number_text if number else lambda value: f"{round(100 * value, 2):g}\u00a0%")
            drawn.append(
                (title, inline_svg(figure, name.replace("_", "-"), f"{title} over rounds, one line a setting."))
            )
    return drawn


def overlay(found: Comparison, name: str, form: Callable[[float], str]) -> Figure:
    """Draw one line for each group, the mean over seeds, with the range of the seeds behind it."""

    def draw(axes: Axes, palette: Palette) -> None:
        colors = [palette.first, palette.second, palette.third]
        for number, group in enumerate(found.groups[:MOST_DRAWN]):
            curve = group.curve(name)
            rounds, color = list(curve), colors[number % 3]
            dash = _DASHES[number // 3]
            label = shorten(group.label, 60)
            axes.plot(rounds, [each.mean for each in curve.values()], color=color, linestyle=dash, label=label)
            if len(group.runs) > 1:
                low, high = ([pick(each.values) for each in curve.values()] for pick in (min, max))
                axes.fill_between(rounds, low, high, color=color, alpha=0.12, linewidth=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.set_xlabel("round")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), fontsize=8, handlelength=1.8)

    return draw_figure([draw], LIGHT_PALETTE, (5.0, 3.4))


def _epsilon(value: float | None) -> str:
    return "none" if value is None else epsilon_text(value)


def _bare(text: str) -> str:
    return text.replace("\u00a0%", "")
