"""Commands of Flower that import ahead of time.

Importing what they need takes most of their time. A process of :class:`Ahead` does it while a run is checked, on
another core, and then waits to be told what to do. If nobody tells it, or whoever started it is gone, it ends.
"""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from simulations.engines.processes import end_with_launcher
from simulations.engines.staging import packages_root

SUPERLINK, FLWR = "flwr.superlink.cli:flower_superlink", "flwr.cli.app:app"


class Ahead:
    """A process that has imported, or still imports, the function that it will call.

    Args:
        function: ``module:name``; it takes its arguments from ``sys.argv``.
    """

    def __init__(self, function: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simulations.engines.ahead", function],
            # Read by the interpreter and the import, before the environment of the run is known.
            cwd=packages_root(), env=inherited(os.environ) | {"FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"},
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def call(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        private: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Let it go.

        Args:
            arguments: ``sys.argv``, with the command's name first.
            folder: working folder.
            environment: all of it.
            output: file that everything printed is added to.
            errors: the same of what goes to stderr (default: ``output``).
            private: folder of the run; with it the process ends the whole run, and removes the folder, when this one is
                gone.
        """
        told = {
            "arguments": list(arguments),
            "folder": str(folder),
            "environment": dict(environment),
            "output": str(output),
            "errors": str(errors or output),
            "private": str(private) if private else "",
            "launcher": os.getpid(),
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, which the caller sees
        return self._process

    def close(self) -> None:
        """End it, unless it was told something."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.kill()
            self._process.stdin.close()
            self._process.wait()


class FlowerAhead:
    """What a run needs of Flower first: its SuperLink, and ``flwr run``. What was told nothing ends with the block."""

    def __init__(self) -> None:
        self.superlink, self.flwr = Ahead(SUPERLINK), Ahead(FLWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.superlink.close()
        self.flwr.close()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For large imports: collecting garbage, of which they leave little, slows them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, less what would bend a run, with our packages on the path."""
    kept = {key: value for key, value in environment.items() if not key.startswith(("FLWR_", "RAY_", "FLOWER_"))}
    path: Iterable[str] = [str(packages_root()), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    if packages_root().name in ("site-packages", "dist-packages"):
        path = list(path)[1:]
    return kept | {"PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in path)}


def _wait(function: str) -> None:
    module, _, name = function.partition(":")
    with contextlib.suppress(ImportError), importing():  # it fails again below, where the log is
        importlib.import_module(module)
    line = sys.stdin.readline()
    if not line:
        return
    told = json.loads(line)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, file in ((1, told["output"]), (2, told["errors"])):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), stream)
    if told["private"]:
        end_with_launcher(told["launcher"], Path(told["private"]))
    sys.argv = told["arguments"]
    getattr(importlib.import_module(module), name)()


if __name__ == "__main__":
    _wait(sys.argv[1])
