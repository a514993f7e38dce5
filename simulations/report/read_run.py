"""Everything a run has left in its folder, read once: finished or not, and verified.

What the run has not come to writing is absent; a file that is damaged, or gone, is named instead of shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.commitment import Commitment
from privacy.ledger.ledger import Charge
from server.config.schema import RunConfig
from server.run_folder.data_facts import DataFacts, read_facts
from server.run_folder.names import ENVIRONMENT_FILE
from server.run_folder.phase_progress import ended_phases
from server.run_folder.resume import Resumed, read_resumed
from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import Status
from server.run_folder.verify import VerifiedRun, read_object, refusal_of_no_run, verify_run
from server.runs.commitment import not_private_reason
from server.runs.guarantee import TRUST, not_covered, sites_statement

Json = dict[str, Any]


class NoRunFolder(ValueError):
    """A folder that no run has written to."""


@dataclass(frozen=True)
class Account:
    """A verified ledger: its charges, what it commits to, and why the run gives no guarantee at all, or None."""

    charges: tuple[Charge, ...]
    commitment: Commitment
    not_private: str | None


@dataclass(frozen=True)
class Phase:
    """A phase of a run as its folder describes it.

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
    """The content of a run's folder, as far as the run has come.

    Attributes:
        config, status, results, environment: None before the run has written the file.
        facts: of the data set; None if there are none.
        phases: of a run in phases, in order; else empty.
        guarantee: every number as the verified ledger says it, beside the words of privacy.json where there is one;
            None where nothing can be said.
        account: of the verified ledger; None if there is none.
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

    @property
    def name(self) -> str:
        """The configured name of the run, or that of its folder."""
        return self.config.name if self.config else self.path.name

    @property
    def accuracy_name(self) -> str:
        """The name of the share of public records that the model gets right, as its task has it."""
        return "preference accuracy" if self.config and self.config.model.task == "preference" else "accuracy"

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
        """The reason why the run gives no guarantee, from whichever file says so; None only if none does."""
        reasons = [
            self.guarantee.get("not_private") if self.guarantee else None,
            self.account.not_private if self.account else None,
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
        """The folder's last two parts, as one types it beside the folder of runs, on whichever machine."""
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
        """Read a number of results.json; None where there is none."""
        value = (self.results or {}).get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_run(path: Path) -> Run:
    """Read and verify a run folder.

    Raises:
        NoRunFolder: if it is none: it does not exist, or holds not one of the files a run starts with.
        CorruptRun: naming the file that is damaged, gone, or says something else than the others.
    """
    path = Path(path)
    if refusal := refusal_of_no_run(path):
        raise NoRunFolder(refusal)
    found = verify_run(path)
    phases = _phases(found)
    ledger = found.ledger
    return Run(
        path=path,
        config=found.config,
        phases=phases,
        status=found.status,
        metrics=found.metrics,
        guarantee=_guarantee_of_phases(phases, found) if phases else _guarantee(found),
        results=found.results,
        environment=read_object(path / ENVIRONMENT_FILE),
        account=None if ledger is None else Account(ledger.charges, ledger.commitment, ledger.not_private),
        facts=read_facts(path),
        resumed=read_resumed(path),
    )


def _guarantee(run: VerifiedRun) -> Json | None:
    if run.written is None and run.sites and run.config is not None:  # what they have said before the end
        return sites_statement(run.config, not_private_reason(run.config), run.sites, steered=False)
    return run.statement(**_words(run))


def _phases(run: VerifiedRun) -> tuple[Phase, ...]:
    ended = ended_phases(run.folder) if run.phases else ()
    return tuple(
        Phase(
            str(table["name"]),
            str(table["text"]),
            int(table["steps"]) if table["kind"] == "private" else 0,
            ended[number] if number < len(ended) else None,
        )
        for number, table in enumerate(run.phases)
    )


def _guarantee_of_phases(phases: Sequence[Phase], run: VerifiedRun) -> Json | None:
    """The guarantee of a run in phases in the form that other runs have theirs."""
    said = run.statement(**_words(run))
    if run.written is not None and said is not None:
        terms = said.get("ledger")
        if isinstance(terms, dict) and said.get("kind") == "record":
            return {**terms, **said, "epsilon": said.get("record_epsilon")}
        return said
    without = [repr(phase.name) for phase in phases if not phase.steps]
    if not without:
        return said  # the ledger's own: all there is to say if every phase has noise, else a part only
    reason = f"phase {' and '.join(without)} trains without noise"
    return {"sentence": f"This run is NOT PRIVATE: {reason}.", "not_private": reason}


def _words(run: VerifiedRun) -> Json:
    """The words of a site on its guarantee, also where its run did not come to its end."""
    if run.written is not None or run.config is None or not run.config.is_single_site:
        return {}
    return {"trust_model": TRUST, "not_covered": not_covered(run.config, steered=False)}
