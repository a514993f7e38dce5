"""A check of what a run folder proves of its guarantee: its ledger, against every file that speaks of it.

:func:`verify_run` is the one way in for whatever shows, ships, adds up or resumes a run. A file that is damaged, gone,
rolled back or says something else than the ledger is named, and nothing is said of the guarantee.

The chain of a ledger has no key. Whoever writes every line of it anew, and everything else in the folder to fit, or
puts the whole folder back to an earlier day, is not found out here: :attr:`VerifiedRun.head`, kept elsewhere, shows it.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.accountants import composition
from privacy.commitment import Commitment
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement, rounded_up, sentence
from server.config.load import ConfigError, load
from server.config.schema import RunConfig
from server.lineage import with_lineage
from server.run_folder import names
from server.run_folder.checkpoint import Mark, checkpoint_folder, read_mark
from server.run_folder.data_facts import data_digest
from server.run_folder.origin import check_settings
from server.run_folder.phase_progress import ended_phases
from server.run_folder.progress import SiteGuarantee, read_noted
from server.run_folder.round_record import RoundRecord
from server.run_folder.seal import check_seal
from server.run_folder.telemetry import Status, read_metrics, read_status

Json = dict[str, Any]

STARTED_WITH = (names.CONFIG_FILE, names.STATUS_FILE, names.METRICS_FILE, names.LEDGER_FILE, names.PHASES_FILE)
ENDED = ("completed", "stopped-budget")
WORDS = ("trust_model", "not_covered", "nodes")
"""Entries of privacy.json beside those that its ledger decides."""
NUMBERS = ("private", "unit", "adjacency", "population", "delta", "mode", "rounds", "noise_multipliers", "epsilon",
    "epsilon_target", "epsilon_spent", "order", "rho", "rho_spent")  # fmt: skip
"""Entries of privacy.json that repeat the ledger, in every version."""
_STATEMENTS: dict[tuple[str, ...], Json] = {}
_CLOSE = 1e-3
"""Relative difference that two versions of an accountant may have; what is shown is the ledger's value."""


@dataclass(frozen=True)
class VerifiedRun:
    """The files of a run folder that speak of its guarantee, in agreement with each other.

    Attributes:
        config: None before the run has written its settings.
        phases: tables of a run in phases, else none.
        ended: whether the run has come to its end.
        ledger: verified, and open no more; None where the server keeps none, or nothing was committed to yet.
        sites: what sites with ledgers of their own guarantee, by number.
        written: privacy.json as it lies there; None before the end. Show :meth:`statement` instead.
        results: results.json; None before the end.
    """

    folder: Path
    config: RunConfig | None
    phases: tuple[Json, ...]
    status: Status | None
    metrics: list[RoundRecord]
    ended: bool
    ledger: Ledger | None
    sites: Mapping[int, SiteGuarantee]
    written: Json | None
    results: Json | None

    @property
    def head(self) -> str | None:
        """The mark of the ledger's last line; None without a ledger."""
        return None if self.ledger is None else self.ledger.head

    def statement(self, **words: Any) -> Json | None:
        """The guarantee of the run, every number derived from the ledger; None where there is nothing to say.

        Args:
            words: of :func:`privacy.ledger.statement.privacy_statement`, for a run that has not ended.

        Raises:
            CorruptRun: privacy.json says something else.
        """
        path = self.folder / names.PRIVACY_FILE
        try:
            if self.written is None:
                return None if self.ledger is None else run_lineage(self.folder, _accounted(self.ledger, **words))
            if self.phases:
                said = self._of_phases(self.written, path)
            elif self.ledger is not None:
                said = _agreed(self.written, self.ledger, path)
            else:
                said = self._of_sites(self.written, path)
            found = run_lineage(self.folder, said)
            if "lineage" in {*found, *self.written} or (self.config is not None and self.config.model.adapter):
                _agree(self.written, {key: found[key] for key in ("lineage", "together")}, path)
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptRun(f"{path} is not what a run writes ({error!r}); restore it") from error

    def _of_phases(self, written: Json, path: Path) -> Json:
        """The statement of a run in phases. Its guarantee depends on what the phases without noise have read."""
        without = [phase["text"] for phase in self.phases if phase["kind"] != "private"]
        kind = "record" if not without else "selective" if set(without) == {"redacted"} else "none"
        _agree(written, {"kind": kind, "private": kind == "record"}, path)
        if self.ledger is None:
            return written
        commitment, known = self.ledger.commitment, {"noise_epsilon": self.ledger.commitment.epsilon}
        inner = _agreed(written["ledger"], self.ledger, path)
        if kind == "record":
            known["record_epsilon"] = max(inner["epsilon"], commitment.epsilon)
        if kind == "selective":
            replaced, _ = composition.tightest_bound(commitment.floor, commitment.delta, adjacency="replace_one")
            known["selective_epsilon"] = rounded_up(replaced, 4)
        _agree(written, {**known, "delta": commitment.delta}, path)
        said = written["record_epsilon"] if kind == "record" else written["selective_epsilon"]
        if kind != "none" and f"epsilon at most {said:g} at delta {commitment.delta:g}" not in written["sentence"]:
            raise CorruptRun(
                f"{path}: its sentence does not say epsilon at most {said:g}, as its ledger does; restore it"
            )
        return {**written, **known, "ledger": inner}

    def _of_sites(self, written: Json, path: Path) -> Json:
        """The statement of a run whose sites have ledgers of their own, as they describe them."""
        assert self.config is not None
        own = {str(number): vars(site) for number, site in sorted(self.sites.items())}
        known = {"epsilon": rounded_up(max((site.epsilon for site in self.sites.values()), default=0.0), 4)}
        _agree(written, {**known, "silos": own, "delta": self.config.privacy.delta}, path)
        stated = f"epsilon at most {rounded_up(known['epsilon'], 2):.2f} "
        if written["not_private"] is None and stated not in written["sentence"]:
            raise CorruptRun(f"{path}: its sentence does not say {stated.strip()}, as its sites do; restore it")
        return {**written, **known}


def verify_run(folder: Path) -> VerifiedRun:
    """Read the files of a run folder that speak of its guarantee, and hold them against each other.

    Every epsilon is accounted anew in :meth:`VerifiedRun.statement` only, which may take seconds.

    Raises:
        CorruptRun: naming the file that is damaged, gone, or says something else than the others, and the remedy.
    """
    # Of a run at work, what is written last is read first: each file is then as old as the next or older.
    status, results = read_status(folder), read_object(folder / names.RESULTS_FILE)
    ended = results is not None or (status is not None and status.state in ENDED)
    check_seal(folder, ended=ended)
    written = read_object(folder / names.PRIVACY_FILE)
    config, phases = _settings(folder)
    mark = _mark(folder, len(phases))
    noted = read_noted(folder)
    metrics = read_metrics(folder, noted.records if mark is None else mark.records)
    ledger = _ledger(folder, mark)
    sites = noted.guarantees
    if (folder / names.PUBLISHED_FILE).is_file():
        sites = {number: _guarantee_of_site(own) for number, own in site_ledgers(folder).items()}
    run = VerifiedRun(folder, config, phases, status, metrics, ended, ledger, sites, written, results)
    _refuse_missing(run)
    if ledger is not None and config is not None:
        _check_commitment(folder, config, ledger.commitment, in_phases=bool(phases))
    if ledger is not None and written is not None and head_of(written) != ledger.head:
        raise CorruptRun(
            f"{folder / names.PRIVACY_FILE} was not made from {names.LEDGER_FILE} as it is now: it names line "
            f"{str(head_of(written))[:24]}, the last one is {ledger.head[:24]}; restore the one that was changed"
        )
    if config is not None and config.several_sites and not config.is_deployed:
        for number, said in noted.guarantees.items():
            _check_site(folder / names.SITES_FOLDER / str(number), said, folder / names.SITES_FILE)
    return run


def run_lineage(folder: Path, statement: Json) -> Json:
    """The statement of a run with what it went on from, see :func:`server.lineage.with_lineage`.

    Raises:
        CorruptRun: a file that tells of that is damaged.
    """
    own = _ledger(folder, None)
    return with_lineage(statement, folder / names.START_FOLDER, own, data_digest(folder))


def site_ledgers(folder: Path) -> dict[int, Ledger]:
    """Read the ledgers of the sites that keep theirs in a run's folder, by the sites' numbers; verified, open no more.

    Raises:
        CorruptRun: one of them is damaged.
    """
    found: dict[int, Ledger] = {}
    for path in sorted(folder.glob(f"{names.SITES_FOLDER}/*/{names.LEDGER_FILE}")):
        with Ledger.open(path, read_only=True) as ledger:
            found[int(path.parent.name)] = ledger
    return found


def traces(folder: Path) -> list[str]:
    """List the files here that a run writes only once it has committed to spending."""
    after = (names.LEDGER_FILE, names.SITES_FILE, names.METRICS_FILE, names.PRIVACY_FILE, names.RESULTS_FILE,
        names.SAMPLING_SECRET, names.SITES_FOLDER, f"{names.PHASES_FOLDER}/*/{names.SAMPLING_SECRET}")  # fmt: skip
    found = [str(path.relative_to(folder)) for pattern in after for path in sorted(folder.glob(pattern))]
    checkpoint = checkpoint_folder(folder)
    return found if checkpoint is None else [*found, checkpoint.name]


def refusal_of_no_run(folder: Path) -> str:
    """The reason why a folder is no run's, with the remedy; empty if it holds a file that a run starts with."""
    if any((folder / name).is_file() for name in STARTED_WITH):
        return ""
    if (folder / names.PRIVACY_FILE).is_file() and not traces(folder)[1:]:
        return (
            f"{folder} is an export: it holds no {names.LEDGER_FILE}, so what its {names.PRIVACY_FILE} says cannot be "
            "verified here; give the run's folder"
        )
    return (
        f"{folder} is no run folder: it holds none of {', '.join(STARTED_WITH)}; give the folder that `lacquer run` "
        "named at its end"
    )


def head_of(statement: Mapping[str, Any]) -> object:
    """The mark of the ledger that a privacy.json was made from. That of phases holds a whole statement inside."""
    ledger = statement.get("ledger")
    while isinstance(ledger, dict) and "ledger" in ledger:
        ledger = ledger["ledger"]
    return ledger.get("head") if isinstance(ledger, dict) else None


def read_object(path: Path) -> Json | None:
    """Read the JSON object in a file; None where there is no file.

    Raises:
        CorruptRun: it holds something else.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptRun(f"{path} cannot be read: {error}; restore it") from error
    if not isinstance(value, dict):
        raise CorruptRun(f"{path} holds no JSON object; restore it")
    return value


def _settings(folder: Path) -> tuple[RunConfig | None, tuple[Json, ...]]:
    """Read the settings and the phases as they stand; the methods that phases name need not be installed here."""
    path, phases = folder / names.CONFIG_FILE, folder / names.PHASES_FILE
    if not path.is_file():
        return None, ()
    try:
        config = load(path)
    except ConfigError as error:
        raise CorruptRun(f"{path} cannot be read: {'; '.join(str(error).splitlines())}; restore it") from error
    check_settings(folder, config, path)
    if not phases.is_file():
        return config, ()
    try:
        tables = tomllib.loads(phases.read_text(encoding="utf-8"))["phases"]
        for table in tables:
            str(table["name"]), str(table["text"]), int(table.get("steps", 0)), str(table["kind"])
        return config, tuple(tables)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRun(f"{phases} must have the [[phases]] that the run wrote ({error}); restore it") from error


def _mark(folder: Path, phases: int) -> Mark | None:
    """The mark of the last checkpoint, be it that of a phase."""
    if phases:
        ended_phases(folder)
    places = [folder, *(folder / names.PHASES_FOLDER / str(number) for number in range(phases, 0, -1))]
    return next((mark for place in places if (mark := read_mark(place)) is not None), None)


def _ledger(folder: Path, mark: Mark | None) -> Ledger | None:
    path = folder / names.LEDGER_FILE
    if not path.is_file():
        return None
    with Ledger.open(path, None if mark is None else mark.ledger_head, read_only=True) as ledger:
        return ledger


def _refuse_missing(run: VerifiedRun) -> None:
    """Raise CorruptRun for a file that must be there, by what else is."""
    folder, config, found = run.folder, run.config, traces(run.folder)
    if (folder / names.PUBLISHED_FILE).is_file():  # it shows a ledger, and is not the run
        ledgers = () if run.sites else (names.LEDGER_FILE,)
        for name in (names.CONFIG_FILE, *ledgers, names.PRIVACY_FILE):
            if not (folder / name).is_file():
                raise CorruptRun(f"{folder / name} is missing; ask whoever published the run for it")
        return
    if run.results is not None and run.results.get("public_only") is True and found == [names.RESULTS_FILE]:
        return  # training on public records alone keeps no account, as nothing is spent
    noted = (folder / names.ORIGIN_FILE).is_file()

    def demand(name: str, why: str) -> None:
        if not (folder / name).exists():
            raise CorruptRun(f"{folder / name} is missing, though {why}; restore it")

    if config is None:
        if found:  # else it was interrupted while it wrote down what it was started with
            demand(names.CONFIG_FILE, f"the run has begun, as {found[0]} shows")
        return
    others = [name for name in found if name not in (names.LEDGER_FILE, names.SITES_FILE)]
    if others:
        private = not run.phases or any(phase["kind"] == "private" for phase in run.phases)
        if config.several_sites:
            demand(names.SITES_FILE, f"sites have been asked, as {others[0]} shows")
        elif private:
            demand(names.LEDGER_FILE, f"the run has begun to spend, as {others[0]} shows")
        demand(names.STATUS_FILE, f"the run has begun, as {found[0]} shows")
    if run.ledger is not None and run.ledger.charges:
        demand(names.METRICS_FILE, "releases were charged")
        if noted:
            demand(names.COMMITMENT_FILE, "releases were charged")
        if noted and not run.ended and not run.phases and checkpoint_folder(folder) is None:
            demand(names.CHECKPOINT_FOLDER, "releases were charged")
    begun = [int(place.name) for place in (folder / names.PHASES_FOLDER).glob("[0-9]*")]
    for number in range(1, max(begun, default=0) + run.ended):  # of what is not given to others, all of it or nothing
        demand(f"{names.PHASES_FOLDER}/{number}/{names.PHASE_FILE}", "the phase has ended")
    if (folder / names.ADAPTER_FOLDER).is_dir():
        demand(names.PRIVACY_FILE, "it is written before the adapter, which is there")
    if run.ended:
        for name in (names.PRIVACY_FILE, names.RESULTS_FILE):
            demand(name, "the run has ended")


def _check_commitment(folder: Path, config: RunConfig, commitment: Commitment, *, in_phases: bool) -> None:
    """Check that the settings and the handed-on noise are those that the ledger's first line commits to."""
    pairs = {"privacy.delta": (config.privacy.delta, commitment.delta), "privacy.unit": (config.unit, commitment.unit)}
    if not in_phases:  # which say how they spend
        pairs["privacy.epsilon"] = config.privacy.epsilon, commitment.epsilon
        pairs["privacy.mode"] = config.privacy.mode, commitment.mode
    if not config.is_single_site:
        pairs["clients"] = config.clients, commitment.population
    for key, (said, committed) in pairs.items():
        if said != committed:
            raise CorruptRun(
                f"{folder / names.CONFIG_FILE}: {key} is {said!r}, but {names.LEDGER_FILE} commits to {committed!r}; "
                "restore the file"
            )
    path = folder / names.COMMITMENT_FILE
    if (document := read_object(path)) is None:
        return
    try:
        noise = document["noise"]
        floor = commitment.to_json()["floor"]
        floors = [step for steps in noise["floors"] for step in steps] if in_phases else None
        same = floors == floor if in_phases else noise["commitment"] == commitment.to_json()
    except (KeyError, TypeError) as error:
        raise CorruptRun(f"{path} holds no calibrated noise ({error!r}); restore it") from error
    if not same:
        raise CorruptRun(f"{path} is not what {names.LEDGER_FILE} commits to in its first line; restore it")


def _check_site(site: Path, said: SiteGuarantee, file: Path) -> None:
    """Check that a site's own ledger, where it lies beside the run, guarantees what the run notes of it."""
    from client.record_level.state import site_ledger  # with all that trains a site, which no other run needs

    ledger = site_ledger(site)
    if ledger.commitment.not_private is None and not _alike(ledger.epsilon_guaranteed(), said.epsilon):
        raise CorruptRun(
            f"{file} notes epsilon {said.epsilon:.4f} of a site whose {ledger.path} guarantees "
            f"{ledger.epsilon_guaranteed():.4f}; restore the one that was changed"
        )


def _guarantee_of_site(ledger: Ledger) -> SiteGuarantee:
    """The guarantee of a site as its ledger gives it; its noise is that of its first step."""
    noise = next((charge.noise_multiplier for charge in ledger.charges if charge.event.round > 0), 0.0)
    return SiteGuarantee(ledger.epsilon_guaranteed(), ledger.commitment.population, noise)


def _agreed(written: Json, ledger: Ledger, path: Path) -> Json:
    """Merge a privacy.json with its ledger: everything that the ledger decides is as the ledger says it."""
    derived = _accounted(ledger)
    _agree(written, {key: derived[key] for key in NUMBERS if key in derived}, path)
    kept = {key: value for key, value in written.items() if key in WORDS or key not in derived}
    merged = {**derived, **kept}
    return {**merged, "sentence": sentence(merged)}


def _accounted(ledger: Ledger, **words: Any) -> Json:
    """The statement of a ledger, accounted once a process; its head names every line of it."""
    key = (ledger.head, *sorted(words))
    if key not in _STATEMENTS:
        _STATEMENTS[key] = privacy_statement(ledger, **words)
    return _STATEMENTS[key]


def _agree(written: Mapping[str, Any], known: Mapping[str, Any], path: Path) -> None:
    for key, value in known.items():
        if not _alike(written[key], value):
            raise CorruptRun(
                f"{path}: {key} is {_short(written[key])}, by the ledger it is {_short(value)}; restore it: the ledger "
                "is what holds"
            )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if {type(one), type(other)} in ({float}, {float, int}):
        return math.isclose(one, other, rel_tol=_CLOSE)
    return bool(one == other)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
