"""Numbers as they are written for people. Epsilon is always rounded up: a guarantee must not shrink in print."""

import math
import re
from decimal import ROUND_CEILING, Decimal

from rich.console import Console
from rich.table import Table

WIDEST = 88
"""Characters of the widest line that suits the eye."""


def table_console() -> Console:
    """A console for standard output; where it is no terminal, wide enough that no cell is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def plain_table(gap: int = 3) -> Table:
    """Make a table without lines, ``gap`` blanks between its columns."""
    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")


def is_drawable(console: Console) -> bool:
    """Whether a table can be drawn again and again: on a terminal that is not dumb and knows more than ASCII."""
    return console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only


def epsilon_text(epsilon: float, digits: int = 2) -> str:
    """Epsilon with `digits` decimals, rounded UP."""
    if not math.isfinite(epsilon):
        return "infinite"
    return str(Decimal(repr(float(epsilon))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING))


def delta_text(delta: float) -> str:
    """Delta in short scientific form: 1e-05 as "1e-5"."""
    mantissa, exponent = f"{delta:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def percent_text(share: float, digits: int = 1) -> str:
    """A share in per cent: 0.8125 as "81.3 %" (no-break space)."""
    return f"{100 * share:.{digits}f}\u00a0%"


def number_text(value: float) -> str:
    """A number with at most four digits, thousands separated, no exponent between 0.0001 and a million."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-4 <= abs(value) < 1e6:
        decimals = max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:.3g}"


def duration_text(seconds: float) -> str:
    """A duration as 58 s, 4:05 (minutes and seconds) or 1:02:03 (hours, minutes and seconds)."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_FOLDERS = re.compile(r"(?<![\w./…-])/(?:[^\s/'\"]+/)+")


def without_folders(text: str) -> str:
    """Cut absolute paths in a text to their last part. Where things lie on one machine is nobody else's concern."""
    return _FOLDERS.sub("…/", text)
