"""The diagrams of the documentation, light and dark: `python docs/diagrams.py` writes them beside this file."""

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

LIGHT = {"ink": "#1f2933", "soft": "#52606d", "line": "#9aa5b1", "box": "#f5f7fa", "mark": "#dbeafe", "edge": "#2563eb"}
DARK = {"ink": "#e4e7eb", "soft": "#9aa5b1", "line": "#616e7c", "box": "#1f2933", "mark": "#1e3a5f", "edge": "#60a5fa"}
LINE = 17
"""Height of a line of text."""


@dataclass(frozen=True)
class Box:
    """A rounded box with centred lines of text; the first line of a marked box stands out.

    Attributes:
        x, y: of its centre.
        text: lines.
        width: of the box.
        marked: an answer, or what the guarantee rests on.
    """

    x: float
    y: float
    text: tuple[str, ...]
    width: float = 180
    marked: bool = False

    @property
    def height(self) -> float:
        """Room for the lines and a margin."""
        return LINE * len(self.text) + 18

    def svg(self, colours: dict[str, str]) -> str:
        fill, edge = (colours["mark"], colours["edge"]) if self.marked else (colours["box"], colours["line"])
        left, top = self.x - self.width / 2, self.y - self.height / 2
        parts = [
            f'<rect x="{left:g}" y="{top:g}" width="{self.width:g}" height="{self.height:g}" rx="8" '
            f'fill="{fill}" stroke="{edge}"/>'
        ]
        for number, line in enumerate(self.text):
            y = top + 9 + LINE * (number + 0.76)
            weight = ' font-weight="600"' if number == 0 else ""
            colour = colours["ink"] if number == 0 else colours["soft"]
            parts.append(
                f'<text x="{self.x:g}" y="{y:g}" fill="{colour}" text-anchor="middle"{weight}>{escape(line)}</text>'
            )
        return "".join(parts)


@dataclass(frozen=True)
class Arrow:
    """A line along points with a head at its end and a word at its start.

    Attributes:
        points: corners.
        word: the answer that it stands for.
    """

    points: tuple[tuple[float, float], ...]
    word: str = ""

    def svg(self, colours: dict[str, str]) -> str:
        corners = " ".join(f"{x:g},{y:g}" for x, y in self.points)
        line = f'<polyline points="{corners}" fill="none" stroke="{colours["line"]}" marker-end="url(#head)"/>'
        if not self.word:
            return line
        (x0, y0), (x1, y1) = self.points[-2:]
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        width = 7.2 * len(self.word) + 8
        return line + (
            f'<rect x="{x - width / 2:g}" y="{y - 9:g}" width="{width:g}" height="18" rx="4" class="page"/>'
            f'<text x="{x:g}" y="{y + 4:g}" fill="{colours["soft"]}" text-anchor="middle">{escape(self.word)}</text>'
        )


def down(top: Box, bottom: Box, word: str = "") -> Arrow:
    """From the lower edge of one box to the upper edge of another, with corners halfway."""
    start, end = (top.x, top.y + top.height / 2), (bottom.x, bottom.y - bottom.height / 2 - 4)
    middle = start[1] + 22
    return Arrow((start, (start[0], middle), (end[0], middle), end), word)


def choose() -> tuple[tuple[float, float], list[Box | Arrow]]:
    """Which setting fits."""
    where = Box(440, 34, ("Where are the data?",))
    here = Box(240, 150, ("All on one machine.", "What is protected?"), 190)
    there = Box(660, 150, ("With several parties.", "What is protected?"), 190)
    record = Box(85, 290, ("record level", "unit = record", "clients = 1"), 140, marked=True)
    group = Box(240, 290, ("group level", "unit = group", "clients = 1"), 140, marked=True)
    simulated = Box(395, 290, ("simulation", "partition =", "natural"), 140, marked=True)
    sites = Box(560, 290, ("cross-silo", "unit = record", "or group"), 140, marked=True)
    trust = Box(760, 281, ("Is the server", "trusted?"), 150)
    server = Box(680, 412, ("client level", "trust = server"), 140, marked=True)
    secagg = Box(840, 412, ("secure sums", "trust = secagg"), 140, marked=True)
    boxes: list[Box | Arrow] = [where, here, there, record, group, simulated, sites, trust, server, secagg]
    arrows: list[Box | Arrow] = [
        down(where, here),
        down(where, there),
        down(here, record, "a row"),
        down(here, group, "a person"),
        down(here, simulated, "a client"),
        down(there, sites, "their people"),
        down(there, trust, "each party"),
        down(trust, server, "yes"),
        down(trust, secagg, "no"),
    ]
    return (920, 450), arrows + boxes


def a_round() -> tuple[tuple[float, float], list[Box | Arrow]]:
    """How a round works."""
    plan = Box(105, 60, ("1  Plan", "controller: clip", "threshold, noise"), 160)
    draw = Box(300, 60, ("2  Draw", "every client joins", "with rate q"), 160)
    train = Box(495, 60, ("3  Train", "locally; clip each", "update; add up"), 160)
    charge = Box(690, 60, ("4  Charge", "the ledger,", "on disk"), 160, marked=True)
    noise = Box(690, 190, ("5  Add noise, once", "divide by the", "expected cohort"), 160, marked=True)
    step = Box(495, 190, ("6  Step", "server optimizer,", "checkpoint"), 160)
    look = Box(300, 190, ("7  Evaluate", "on public records;", "tell the controller"), 160)
    order = [plan, draw, train, charge]
    arrows: list[Box | Arrow] = [
        Arrow(((a.x + a.width / 2, a.y), (b.x - b.width / 2 - 4, b.y))) for a, b in pairwise(order)
    ]
    arrows.append(down(charge, noise))
    arrows += [
        Arrow(((a.x - a.width / 2, a.y), (b.x + b.width / 2 + 4, b.y))) for a, b in ((noise, step), (step, look))
    ]
    arrows.append(Arrow(((look.x - 80, look.y), (plan.x, look.y), (plan.x, plan.y + plan.height / 2 + 4))))
    return (795, 240), [*arrows, *order, noise, step, look]


def crossing(x: float, top: float, bottom: float, word: str, *, up: bool = False) -> Arrow:
    """What crosses a border between two boxes, down or up."""
    return Arrow(((x, bottom), (x, top + 4)) if up else ((x, top), (x, bottom - 4)), word)


def packages() -> tuple[tuple[float, float], list[Box | Arrow]]:
    """The five packages, each above all that it may import, and what crosses the borders between them."""
    simulations = Box(420, 40, ("simulations", "the lacquer command, engines, reports, Python"), 330)
    server = Box(420, 170, ("server", "the ServerApp: settings, rounds, checkpoints, evaluation"), 800)
    client = Box(635, 300, ("client", "where the data lie: records, base model, training"), 370)
    strategies = Box(180, 385, ("strategies", "controllers, optimizers, aggregations"), 320)
    privacy = Box(420, 515, ("privacy", "clipping, ledger, the noise, accountants, secure sums"), 800, marked=True)
    half = server.height / 2
    arrows: list[Box | Arrow] = [
        crossing(320, 40 + half, 170 - half, "settings"),
        crossing(520, 40 + half, 170 - half, "run folder: released and public values", up=True),
        crossing(550, 170 + half, 300 - half, "adapter, plan"),
        crossing(720, 170 + half, 300 - half, "sums of clipped updates", up=True),
        crossing(100, 170 + half, 385 - half, "sums, public loss"),
        crossing(260, 170 + half, 385 - half, "plan, next adapter", up=True),
        crossing(100, 385 + half, 515 - half, "plan, sum"),
        crossing(260, 385 + half, 515 - half, "release", up=True),
        crossing(620, 300 + half, 515 - half, "updates"),
        crossing(740, 300 + half, 515 - half, "their clipped sum", up=True),
        Arrow(((340, 385), (500, 385), (500, 300 + half + 4)), "adapter's layout"),
    ]
    return (840, 555), [*arrows, simulations, server, client, strategies, privacy]


def svg(size: tuple[float, float], parts: list[Box | Arrow], colours: dict[str, str], page: str) -> str:
    """A whole file; `page` is the colour that words on lines stand on."""
    width, height = size
    head = (
        f'<marker id="head" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colours["line"]}"/></marker>'
    )
    body = "\n".join(part.svg(colours) for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'font-family="system-ui, sans-serif" font-size="13">\n<style>.page {{ fill: {page}; }}</style>\n'
        f"<defs>{head}</defs>\n{body}\n</svg>\n"
    )


DIAGRAMS = {"choose": choose, "round": a_round, "packages": packages}


def drawn() -> dict[str, str]:
    """All files by their name."""
    looks = {"light": (LIGHT, "#ffffff"), "dark": (DARK, "#131416")}
    return {
        f"{name}-{look}.svg": svg(*diagram(), colours, page)
        for name, diagram in DIAGRAMS.items()
        for look, (colours, page) in looks.items()
    }


if __name__ == "__main__":
    for name, text in drawn().items():
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")
