"""``python -m simulations.tools.flwr_defaults``: writes the schema's defaults and the pins into pyproject.toml.

Plain ``flwr run .`` knows the keys and defaults of pyproject.toml only, and they must be those of the schema. It
installs the dependencies by ``uv sync``, which knows the pins of pyproject.toml only, and they must be those of
constraints.txt. A test holds the two against each other.
"""

import re
import textwrap
from pathlib import Path

import tomli_w

from server.config.load import flatten
from server.config.schema import RunConfig

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
CONSTRAINTS = PYPROJECT.with_name("constraints.txt")
HEADER = "[tool.flwr.app.config]"
PINS = "constraint-dependencies"
LAUNCHER_KEYS: dict[str, str | bool] = {"config-file": "", "run-folder": "", "resume": "", "other-code": False}


def flwr_defaults() -> dict[str, str | int | float | bool]:
    """The keys of a run with their defaults, flat, and the launcher's keys for where things are."""
    return {**LAUNCHER_KEYS, **flatten(RunConfig().to_table())}


def pins() -> list[str]:
    """The lines of constraints.txt, one a package."""
    return CONSTRAINTS.read_text(encoding="utf-8").split()


def rewrite_pyproject(pyproject: str) -> str:
    """The text of pyproject.toml with its table of defaults and its list of pins replaced."""
    table = f"{HEADER}\n{tomli_w.dumps(flwr_defaults())}"
    quoted = textwrap.fill(", ".join(f'"{pin}"' for pin in pins()), 116, break_on_hyphens=False, break_long_words=False)
    parts = {
        HEADER: (rf"^{re.escape(HEADER)}\n(?:(?!\[).*\n)*?(?=\n*(?:\[|\Z))", table),
        PINS: (rf"^{PINS} = \[[^]]*\]", f"{PINS} = [\n{textwrap.indent(quoted, '    ')},\n]"),
    }
    for name, (pattern, new) in parts.items():
        pyproject, count = re.subn(pattern, new.replace("\\", r"\\"), pyproject, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{name} must stand in pyproject.toml once, found {count} times")
    return pyproject


if __name__ == "__main__":
    PYPROJECT.write_text(rewrite_pyproject(PYPROJECT.read_text(encoding="utf-8")), encoding="utf-8")
