"""The messages of docs/troubleshooting.md are those of the program, up to the values that are filled in."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("privacy", "strategies", "client", "server", "simulations")
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `(.+?)` \| ", PAGE, re.MULTILINE)
VALUE = "\0"
"""Where a text of the program fills in a value."""


def texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def said() -> str:
    """All texts of the packages, one a line."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    found = (text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8"))))
    return "\n".join(text.replace("\n", " ") for text in found)


def is_said(message: str) -> bool:
    """Whether one text has the parts between "..." in their order; a quoted word may be a value."""
    parts = (re.escape(part.strip()) for part in message.split("..."))
    wanted = re.sub(r"'[\w-]+'", lambda word: f"(?:{word[0]}|'?{VALUE}'?)", ".*".join(parts))
    return re.search(wanted, said()) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_program(message: str) -> None:
    assert is_said(message)


def test_the_check_finds_a_message_that_nothing_says() -> None:
    assert len(MESSAGES) > 15
    assert is_said("must be below 1/clients")
    assert not is_said("must be below 2/clients")
    assert not is_said("what to do ... must be below 1/clients")
