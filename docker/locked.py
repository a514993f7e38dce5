"""Print a lock's lines of packages, with their hashes: locked.py LOCK NAME..., or locked.py LOCK < REQUIREMENTS."""

import re
import sys
from pathlib import Path


def locked_lines(lock: str, requirements: list[str]) -> str:
    """The pins and hashes of the packages that are required by name; SystemExit if the lock does not hold one."""
    known = {re.split("==", block)[0]: block for block in re.split(r"(?m)^(?=[A-Za-z0-9])", lock)}
    names = [re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0] for line in requirements if line.strip()]
    names = [re.sub(r"[-_.]+", "-", name).lower() for name in names]
    if missing := [name for name in names if name not in known]:
        raise SystemExit(f"the lock holds no {', '.join(missing)}: run make lock")
    return "".join(known[name] for name in names)


if __name__ == "__main__":
    path, *given = sys.argv[1:]
    sys.stdout.write(locked_lines(Path(path).read_text(encoding="utf-8"), given or list(sys.stdin)))
