"""The one normal form of a name: of a client, of a unit of privacy, of a class.

Two cells that name the same person or class must be equal, whatever the format of the file and whoever wrote it. The
rules look at one cell by itself, so that no other row and no guess of a column's type decides who is who:

- Unicode NFC, without control characters and characters that nobody sees (zero-width blanks and joiners, variation
  selectors, marks of direction, soft hyphens); tabs and line ends are blanks; no blanks at the ends;
- a number as programs write one is written out: ``7.0`` and ``7.`` are ``7``, ``-0`` is ``0``, ``1e+16`` is
  ``10000000000000000``, ``1.0E7`` is ``10000000``. Leading and further trailing zeros make a code: ``07``, ``7.00`` and
  ``250.10`` stay, and so does ``1e3``, which may be hexadecimal;
- ``True`` and ``TRUE`` are ``true``; ``2024-01-01T00:00:00.000`` is ``2024-01-01 00:00:00``, and at midnight the date.

Case is kept: ``Ann`` and ``ann`` are two.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal

INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")

_BLANK = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")
_INVISIBLE = (
    "\0-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_UNSEEN = re.compile(f"[{_INVISIBLE}]")
_NOTHING = re.compile(rf"[\s{_INVISIBLE}]*")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0?")
_SCIENTIFIC = re.compile(r"-?[1-9](\.[0-9]+)?[eE]([+-]?[0-9]{1,3})")
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]*?)0*)?(Z|\+00:?00)?")


def normal_form(cell: object) -> str:
    """The name in a cell, the same for all spellings of it; empty for a missing one."""
    if cell is None:
        return ""
    text = str(cell)
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFC", _UNSEEN.sub("", _BLANK.sub(" ", text)))
    text = text.strip()
    if text in ("True", "TRUE", "False", "FALSE"):
        return text.lower()
    if text[:1].isdigit() or text[:1] == "-":
        return _number(text)
    return text


def _number(text: str) -> str:
    if written := _SCIENTIFIC.fullmatch(text):
        exponent = int(written[2])
        if written[1] or exponent >= 16 or exponent < -4:  # from where programs write numbers so
            text = format(Decimal(text), "f")
    if whole := _WHOLE.fullmatch(text):
        text = whole[1]
    if text == "-0":
        return "0"
    if time := _TIME.fullmatch(text):
        fraction, zone = f".{time[3]}" if time[3] else "", "Z" if time[4] else ""
        text = time[1] if f"{time[2]}{fraction}{zone}" == "00:00:00" else f"{time[1]} {time[2]}{fraction}{zone}"
    return text


def is_blank(text: str) -> bool:
    """Whether nobody sees anything of a text."""
    return _NOTHING.fullmatch(text) is not None


def differ_in_case(names: Iterable[str]) -> int:
    """Count the different names that are another one but for the case of their letters."""
    alike = Counter(name.casefold() for name in set(names))
    return sum(count for count in alike.values() if count > 1)
