"""A figure as SVG: inside a page, whose theme it follows, or as one file for each theme.

The same figure gives the same bytes every time.
"""

import io
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from simulations.report.plots import DARK, LIGHT, Palette

THEMES = {"light": LIGHT, "dark": DARK}


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The `<svg>` element of a figure drawn in the LIGHT palette.

    Colours become the page's CSS variables `--plot-ROLE` (with the light colour as fallback), text stays text.

    Args:
        figure: drawn with ``LIGHT``.
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


def write_themes(draw: Callable[[Palette], Figure], stem: Path) -> list[Path]:
    """Write ``STEM-light.svg`` and ``STEM-dark.svg``; their paths.

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
