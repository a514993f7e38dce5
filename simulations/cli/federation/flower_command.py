"""Flower's command ``flwr`` as a process that stays, so that each call costs no import of Flower.

The import takes one to five seconds of a processor, and whoever follows a run asks every five seconds. The process
imports once and forks for every call; it imports nothing of ours.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

IMPORTED_WITHIN = 300.0
"""Seconds that the import may take on a busy machine."""


class NoAnswerError(RuntimeError):
    """Flower's command has not answered, or not with JSON; the message says which."""


class FlowerCommand:
    """The command ``flwr``, which starts with the first call and ends with :meth:`close`.

    Args:
        folder: the calls' working directory.
        environment: the calls'.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._server: subprocess.Popen[bytes] | None = None

    def ask(self, *arguments: str, patience: float) -> dict[str, Any]:
        """The JSON that ``flwr ARGUMENTS --format json`` answers with.

        Args:
            arguments: of the command.
            patience: seconds until it is given up.

        Raises:
            NoAnswerError: it answers with none, or not in time.
        """
        server = self._server or self._started()
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its answer says
            server.stdin.write(json.dumps([*arguments, "--format", "json"]).encode() + b"\n")
            server.stdin.flush()
        line = self._line(patience, arguments[0])
        called = json.loads(line)
        start = called["output"].find("{")  # Flower prints other lines before it
        if start < 0:
            said = f"flwr {arguments[0]} ended with exit code {called['code']}:\n{called['output']}{called['errors']}"
            raise NoAnswerError(said)
        answer: dict[str, Any] = json.JSONDecoder().raw_decode(called["output"][start:])[0]
        return answer

    def close(self) -> None:
        """End the process, and a call that has not come back."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate()
            self._server = None

    def _started(self) -> "subprocess.Popen[bytes]":
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=self._folder,
            env=dict(self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a call that hangs ends with it, and Ctrl-C is its caller's
        )
        self._line(IMPORTED_WITHIN, "--version")
        return self._server

    def _line(self, patience: float, call: str) -> bytes:
        """The next line of the process."""
        assert self._server is not None
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], patience)
        line = self._server.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise NoAnswerError(f"flwr {call} " + ("has ended" if ready else f"did not answer in {patience:g} s"))
        return line


def serve_calls(requests: IO[str], answers: IO[str]) -> None:
    """Say that calls are taken, and answer them until their writer is gone.

    Args:
        requests: a line of arguments in JSON for each call.
        answers: gets a line of exit code and output in JSON for each.
    """
    app: Any = importlib.import_module("flwr.cli.app").app
    answers.write("ready\n")
    answers.flush()
    for line in requests:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                _call(app, json.loads(line), output, errors)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = {name: _text(file) for name, file in (("output", output), ("errors", errors))}
        answers.write(json.dumps({"code": code, **said}) + "\n")
        answers.flush()


def _call(app: Any, arguments: list[str], output: IO[bytes], errors: IO[bytes]) -> None:
    """In a fork: call Flower's command as its own script does, and end."""
    code: object = 1
    try:
        with Path(os.devnull).open("rb") as nothing:
            for number, file in enumerate((nothing, output, errors)):
                os.dup2(file.fileno(), number)
        sys.argv = ["flwr", *arguments]
        code = app()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    serve_calls(sys.stdin, sys.stdout)
