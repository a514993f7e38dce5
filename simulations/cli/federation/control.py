"""Flower's Control API of a running SuperLink: register clients, start a run, ask how it stands, stop it.

Flower's own command does the talking. It is given a configuration of its own folder, so that neither the caller's
``~/.flwr`` nor what stands in it matters. ``flwr run`` ends with 0 when the run fails; what a run came to is what the
SuperLink says of it afterwards.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from simulations.cli.federation.flower_command import FlowerCommand, NoAnswerError
from simulations.engines.flower import RunFailed, clean_environment, scripts

CONNECTION = "federation"
SUCCESS = "finished:completed"
_PATIENCE, _QUICK = 300.0, 10.0
"""Seconds that a call may take on a busy machine, and one that only asks how a run stands: silence is to be noticed."""


@dataclass(frozen=True)
class Control:
    """A SuperLink that is reached at ``address``.

    Attributes:
        home: empty folder for Flower's files.
        address: HOST:PORT.
        ca: certificate that signed the SuperLink's; None speaks without TLS (a test on one host).
    """

    home: Path
    address: str
    ca: Path | None

    @contextmanager
    def open(self) -> Iterator["Control"]:
        """Write the configuration that the command reads; ends what was started for calls."""
        trust = {"insecure": True} if self.ca is None else {"root-certificates": str(self.ca)}
        table = {"superlink": {"default": CONNECTION, CONNECTION: {"address": self.address, **trust}}}
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
        try:
            yield self
        finally:
            self._command.close()

    @cached_property
    def _command(self) -> FlowerCommand:
        return FlowerCommand(self.home, self._environment())

    def ask(self, *arguments: str, patience: float = _PATIENCE) -> dict[str, Any]:
        """The JSON that ``flwr ARGUMENTS --format json`` answers with, within ``patience`` seconds.

        Raises:
            RunFailed: it answers with none, or not in time.
        """
        try:
            return self._command.ask(*arguments, patience=patience)
        except NoAnswerError as error:
            raise RunFailed(str(error)) from error

    def _environment(self) -> dict[str, str]:
        environment = {**clean_environment(os.environ), "FLWR_HOME": str(self.home), "FLWR_TELEMETRY_ENABLED": "0"}
        return environment | {"FLWR_DISABLE_UPDATE_CHECK": "1", "NO_PROXY": "*", "no_proxy": "*"}

    def start(self, app: Path) -> str:
        """Hand over an app; the number of its run."""
        answer = self.ask("run", str(app), CONNECTION)
        if not answer.get("success"):
            raise RunFailed(f"the SuperLink did not accept the run: {answer.get('error-message', answer)}")
        return str(answer["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """How a run stands ("finished:completed" is the good end) and the details."""
        answer = self.ask("ls", CONNECTION, "--run-id", run, patience=_QUICK)
        if not answer.get("runs"):
            raise RunFailed(f"run {run} was not found: {answer.get('error-message', answer)}")
        known = answer["runs"][0]
        return str(known["status"]), str(known.get("status-details") or "")

    def known(self, run: str) -> str | None:
        """How a run stands, of which the SuperLink need not know; None if it does not."""
        answer = self.ask("ls", CONNECTION)
        if "runs" not in answer:
            raise RunFailed(f"the runs were not listed: {answer.get('error-message', answer)}")
        return next((str(one["status"]) for one in answer["runs"] if str(one["run-id"]) == run), None)

    def stop(self, run: str) -> None:
        """End a run."""
        answer = self.ask("stop", run, CONNECTION)
        if not answer.get("success"):
            raise RunFailed(f"run {run} was not stopped: {answer.get('error-message', answer)}")

    def show_log(self, run: str, *, as_it_comes: bool) -> None:
        """Print what the ServerApp of a run has logged, or go on until the run ends."""
        command = [str(scripts() / "flwr"), "log", run, CONNECTION, "--stream" if as_it_comes else "--show"]
        if subprocess.run(command, cwd=self.home, env=self._environment(), check=False).returncode:
            raise RunFailed(f"the log of run {run} was not given")

    def nodes(self) -> list[dict[str, Any]]:
        """The registered clients, as Flower lists them."""
        answer = self.ask("supernode", "ls", CONNECTION)
        if "nodes" not in answer:
            raise RunFailed(f"the clients were not listed: {answer.get('error-message', answer)}")
        nodes: list[dict[str, Any]] = answer["nodes"]
        return nodes

    def register(self, key: Path) -> str | None:
        """Let the client with this public key in; None if it was in already, else what Flower says."""
        answer = self.ask("supernode", "register", str(key), CONNECTION)
        if answer.get("success"):
            return str(answer.get("node-id", ""))
        if "already" in str(answer.get("error-message", "")).lower():
            return None
        raise RunFailed(f"{key.name} was not registered: {answer.get('error-message', answer)}")

    def unregister(self, node: str) -> None:
        """Let a client in no longer."""
        answer = self.ask("supernode", "unregister", node, CONNECTION)
        if not answer.get("success"):
            raise RunFailed(f"node {node} was not unregistered: {answer.get('error-message', answer)}")
