"""``python -m simulations.tools.flwr_defaults``: writes the schema's defaults into ``[tool.flwr.app.config]``.

Plain ``flwr run .`` knows the keys and defaults of pyproject.toml only, and they must be those of the schema. A
test holds the two against each other.
"""

import re
from pathlib import Path

import tomli_w

from server.config.load import flatten
from server.config.schema import RunConfig

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
HEADER = "[tool.flwr.app.config]"
LAUNCHER_KEYS: dict[str, str | bool] = {"config-file": "", "run-folder": "", "resume": "", "other-code": False}


def flwr_defaults() -> dict[str, str | int | float | bool]:
    """Every key of a run with its default, flat, and the keys with which a launcher says where things are."""
    return {**LAUNCHER_KEYS, **flatten(RunConfig().to_table())}


def rewritten(pyproject: str) -> str:
    """The text of pyproject.toml with its table of defaults replaced."""
    table = f"{HEADER}\n{tomli_w.dumps(flwr_defaults())}"
    pattern = re.compile(rf"^{re.escape(HEADER)}\n(?:(?!\[).*\n)*?(?=\n*(?:\[|\Z))", re.MULTILINE)
    text, count = pattern.subn(lambda _: table, pyproject)
    if count != 1:
        raise ValueError(f"{HEADER} must stand in pyproject.toml once, found {count} times")
    return text


if __name__ == "__main__":
    PYPROJECT.write_text(rewritten(PYPROJECT.read_text(encoding="utf-8")), encoding="utf-8")
