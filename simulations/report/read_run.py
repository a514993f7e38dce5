"""Everything a run has left in its folder, read once: whole or not, finished or not.

A missing file is an absent value; a file that is there but cannot be read is a problem with a name, so that whoever
shows the run can say so instead of failing or staying silent.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from privacy.errors import CorruptRun
from privacy.ledger.ledger import Charge, Ledger
from privacy.ledger.statement import privacy_statement
from server.config.load import ConfigError, load
from server.config.schema import RunConfig
from server.run_folder.data_facts import DataFacts, read_facts
from server.run_folder.names import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    FACTS_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    PHASES_FILE,
    PHASES_FOLDER,
    PRIVACY_FILE,
    RESULTS_FILE,
    RESUMES_FILE,
    STATUS_FILE,
)
from server.run_folder.phase_progress import ended_phases
from server.run_folder.resume import Resumed, read_resumed
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Status, read_metrics, read_status
from server.runs.guarantee import TRUST, not_covered

STARTED_WITH = (CONFIG_FILE, STATUS_FILE, METRICS_FILE, LEDGER_FILE, PHASES_FILE)

_T = TypeVar("_T")
Json = dict[str, Any]


class NoRunFolder(ValueError):
    """A folder that no run has written to."""


@dataclass(frozen=True)
class Account:
    """A verified ledger: its charges, the statement they amount to, and the mark of its last line."""

    charges: tuple[Charge, ...]
    statement: Json
    head: str


@dataclass(frozen=True)
class Phase:
    """One phase of a run.

    Attributes:
        steps: private steps; 0 without noise.
        ended: its seconds and validation loss among other numbers; None before it has ended.
    """

    name: str
    text: str
    steps: int
    ended: Mapping[str, Any] | None


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        config, status, results, environment: None if the file is missing or unreadable.
        facts: of the data set; None if there are none.
        phases: of a run in phases, in order; else empty.
        guarantee: privacy.json, or the statement of the ledger if the run did not get to writing it, or None.
        account: what the verified ledger says; None if there is none, or if it is damaged.
        problems: one sentence for every file that is there but cannot be read.
    """

    path: Path
    config: RunConfig | None
    phases: tuple[Phase, ...]
    status: Status | None
    metrics: list[RoundRecord]
    guarantee: Json | None
    results: Json | None
    environment: Json | None
    account: Account | None
    facts: DataFacts | None
    resumed: tuple[Resumed, ...]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        """The configured name, or the folder's."""
        return self.config.name if self.config else self.path.name

    @property
    def state(self) -> str:
        """The state the run reported last, "unknown" if it never did."""
        if self.status is None:
            return "unknown"
        if self.status.state == "running" and self.results is not None:  # killed before it could say that it has ended
            return "stopped-budget" if self.results.get("stopped") else "completed"
        return self.status.state

    @property
    def not_private(self) -> str | None:
        """Why the run gives no guarantee, from whichever file says so; None only if none does."""
        reasons = [
            self.guarantee.get("not_private") if self.guarantee else None,
            self.account.statement["not_private"] if self.account else None,
            *(record.not_private for record in reversed(self.metrics)),
            "privacy.non-private is set" if self.config and self.config.privacy.non_private else None,
        ]
        return next((str(reason) for reason in reasons if reason), None)

    @property
    def shown_path(self) -> Path:
        """The folder as one would type it here: relative if it lies below the current folder."""
        here, there = Path.cwd(), self.path.resolve()
        return there.relative_to(here) if there.is_relative_to(here) else self.path

    @property
    def short_path(self) -> Path:
        """Its last two parts, as one would type it beside the folder of runs, on whichever machine."""
        return Path(*self.path.resolve().parts[-2:])

    @property
    def start(self) -> RoundRecord | None:
        """The model before the first release; None where it was not measured."""
        return next((record for record in self.metrics if record.phase == "start"), None)

    @property
    def rounds(self) -> list[RoundRecord]:
        """The training rounds among the releases."""
        return [record for record in self.metrics if record.phase == "round"]

    @property
    def rounds_planned(self) -> int | None:
        """Training rounds that were planned, of all phases together; None if the settings cannot be read."""
        if self.phases:
            return sum(phase.steps for phase in self.phases)
        return self.config.rounds if self.config else None

    def result(self, name: str) -> float | None:
        """A number of results.json, or None."""
        value = (self.results or {}).get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        NoRunFolder: if it is none: it does not exist, or holds not one of the files a run starts with.
    """
    path = Path(path)
    if not any((path / name).is_file() for name in STARTED_WITH):
        raise NoRunFolder(
            f"{path} is no run folder: it holds none of {', '.join(STARTED_WITH)}; give the folder that `lacquer "
            "run` named at its end"
        )
    problems: list[str] = []

    def attempt(name: str, read: Callable[[Path], _T]) -> _T | None:
        if not (path / name).exists():
            return None
        try:
            return read(path / name)
        except (ConfigError, CorruptRun, ValueError, OSError) as error:
            problems.append(f"{name} cannot be read: {error}")
            return None

    config = attempt(CONFIG_FILE, load)
    ended = attempt(PHASES_FOLDER, lambda folder: ended_phases(folder.parent)) or ()
    phases = attempt(PHASES_FILE, lambda file: _phases(file, ended)) or ()
    account = attempt(LEDGER_FILE, lambda file: _account(file, config))
    written = attempt(PRIVACY_FILE, _json_object)
    if account and written and _head(written) != account.head:
        problems.append(f"{PRIVACY_FILE} was not made from {LEDGER_FILE} as it is now; trust the ledger")
    charged = account.statement if account else None
    return Run(
        path=path,
        config=config,
        phases=phases,
        status=attempt(STATUS_FILE, lambda file: read_status(file.parent)),
        metrics=attempt(METRICS_FILE, lambda file: read_metrics(file.parent)) or [],
        guarantee=_guarantee_of_phases(phases, written, charged) if phases else written or charged,
        results=attempt(RESULTS_FILE, _json_object),
        environment=attempt(ENVIRONMENT_FILE, _json_object),
        account=account,
        facts=attempt(FACTS_FILE, lambda file: read_facts(file.parent)),
        resumed=attempt(RESUMES_FILE, lambda file: read_resumed(file.parent)) or (),
        problems=tuple(problems),
    )


def _phases(file: Path, ended: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    """The phases of a run; read as they stand, since the methods they name need not be installed here."""
    try:
        return tuple(
            Phase(
                str(table["name"]),
                str(table["text"]),
                int(table["steps"]) if table["kind"] == "private" else 0,
                ended[number] if number < len(ended) else None,
            )
            for number, table in enumerate(tomllib.loads(file.read_text(encoding="utf-8"))["phases"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it must have the [[phases]] that the run wrote ({error}); restore it") from None


def _guarantee_of_phases(phases: Sequence[Phase], written: Json | None, charged: Json | None) -> Json | None:
    """The guarantee of a run in phases in the form that other runs have theirs.

    Args:
        written: privacy.json, which holds the statement of the ledger inside; None before the run has ended.
        charged: the statement of the ledger alone: all there is to say if every phase has noise, else a part only.
    """
    if written is not None:
        terms = written.get("ledger")
        if isinstance(terms, dict) and written.get("kind") == "record":
            return {**terms, **written, "epsilon": written.get("record_epsilon")}
        return written
    without = [repr(phase.name) for phase in phases if not phase.steps]
    if not without:
        return charged
    reason = f"phase {' and '.join(without)} trains without noise"
    return {"sentence": f"This run is NOT PRIVATE: {reason}.", "not_private": reason}


def _head(statement: Json) -> object:
    """The mark of the ledger that a privacy.json was made from; that of phases holds the whole statement inside."""
    ledger = statement.get("ledger")
    while isinstance(ledger, dict) and "ledger" in ledger:
        ledger = ledger["ledger"]
    return ledger.get("head") if isinstance(ledger, dict) else None


def _json_object(file: Path) -> Json:
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _account(file: Path, config: RunConfig | None) -> Account:
    said: Json = {}
    if config is not None and config.alone:  # what a site says of itself, also where it did not come to its end
        said = {"trust_model": TRUST, "not_covered": not_covered(config, steered=False)}
    with Ledger.open(file, read_only=True) as ledger:
        return Account(ledger.charges, privacy_statement(ledger, **said), ledger.head)
