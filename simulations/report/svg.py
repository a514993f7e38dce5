"""A figure as SVG: inside a page, whose theme it follows, or as one file for each theme.

The same figure gives the same bytes every time.
"""

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from simulations.report.plots import DARK, LIGHT, Palette

THEMES = {"light": LIGHT, "dark": DARK}


Reading = tuple[float, float, str]
"""A point of a figure in the units of its axes, and what is said of it."""

MOST_READINGS = 150


def inline_svg(figure: Figure, name: str, description: str, readings: Sequence[Reading] = ()) -> str:
    """The `<svg>` element of a figure drawn in the LIGHT palette.

    Colours become the page's CSS variables `--plot-ROLE` (with the light colour as fallback), text stays text.
    Readings appear where a page's style makes the group inside a `.reading` visible, under the pointer.

    Args:
        figure: drawn with ``LIGHT``.
        name: prefix of every id, so that several figures may share one page.
        description: what a reader who cannot see it is told.
        readings: of its first axes, from left to right; of very many every second, third ... is kept.
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
    head = f'<svg {size.group()} role="img" aria-label="{escape(description)}" stroke-linejoin="round">'
    shown = _readings(figure, readings[:: len(readings) // MOST_READINGS + 1])
    return f"{head}{svg[len(opening) :].removesuffix('</svg>')}{shown}</svg>"


def _readings(figure: Figure, readings: Sequence[Reading]) -> str:
    """Draw a band for each reading of a laid-out figure, with what shows under the pointer."""
    if not readings:
        return ""
    axes, (width, height) = figure.axes[0], 72.0 * figure.get_size_inches()
    box, within = axes.get_position(), axes.transData + axes.transAxes.inverted()
    left, right, top, bottom = box.x0 * width, box.x1 * width, (1 - box.y1) * height, (1 - box.y0) * height
    points = [within.transform((x, y)) for x, y, _ in readings]
    at = [(left + x * (right - left), bottom - y * (bottom - top)) for x, y in points]
    edges = [left, *((one + other) / 2 for (one, _), (other, _) in pairwise(at)), right]
    parts = []
    for (x, y), (start, end), (_, _, text) in zip(at, pairwise(edges), readings, strict=True):
        share = (x - left) / (right - left)
        anchor = "start" if share < 0.3 else "end" if share > 0.7 else "middle"
        parts.append(
            f'<g class="reading"><rect x="{start:.1f}" y="{top:.1f}" width="{end - start:.1f}" '
            f'height="{bottom - top:.1f}" fill="none" pointer-events="all"/><g visibility="hidden">'
            f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
            f'<text x="{x:.1f}" y="{top + 9:.1f}" text-anchor="{anchor}">{escape(text)}</text></g></g>'
        )
    return f'<g class="readings">{"".join(parts)}</g>'


def write_themes(draw: Callable[[Palette], Figure], stem: Path) -> list[Path]:
    """Write ``STEM-light.svg`` and ``STEM-dark.svg``; returns their paths.

    Text is drawn as outlines, because the page that shows the picture may lack the font.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, palette in THEMES.items():
        target = stem.with_name(f"{stem.name}-{theme}.svg")
        with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": "lacquer"}):
            draw(palette).savefig(target, metadata={"Date": None, "Creator": None})
        written.append(target)
    return written
