"""The file of a run in phases: the tables of a run, and ``[[phases]]``.

[privacy]            # unit = "record" or "group"; epsilon and delta of all private phases together
[model]  [data]      # as in any run; data.detector is the policy of phases that name none

[[phases]]
kind = "ordinary"    # or "private"
name = "redacted"
text = "redacted"    # or "original", "weighted"
...                  # the attributes of server.runs.phase_plan.NonPrivatePhase or DpPhase, in kebab-case
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.config.load import ConfigError, flatten, parse, read, unflatten
from server.runs.phase_plan import Phase, PhasesConfig
from strategies.plugins import build

KINDS = {"ordinary": "server.runs.phase_plan:NonPrivatePhase", "private": "server.runs.phase_plan:DpPhase"}

_ONE_SITE = {"privacy.unit": "record", "clients": 1, "sampling-rate": 1.0}

_READ = (
    *("name", "seed", "output", "clients", "sampling-rate", "model.", "data."),
    *("privacy.unit", "privacy.epsilon", "privacy.delta", "privacy.account", "site.records-per-unit", "site.combine"),
    *("engine.sequential", "engine.precision", "engine.token-budget", "engine.device", "engine.quantisation"),
    *("engine.checkpoint-blocks", "engine.attention", "evaluation.rouge-", "evaluation.examples"),
)
"""Keys, and how tables and groups of keys begin, that a run in phases reads; the others are for the phases to say."""


def load_phases(path: Path, overrides: Mapping[str, Any] | None = None) -> PhasesConfig:
    """Read a file of phases, with dotted keys of the run's tables on top.

    Raises:
        ConfigError: naming what is wrong and what to do.
    """
    return parse_phases(read(path), overrides)


def parse_phases(table: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> PhasesConfig:
    """Check a nested table of settings and phases and return the run that it describes.

    Overrides and errors as for :func:`load_phases`.
    """
    phases = table.get("phases")
    if not isinstance(phases, list) or not phases or not all(isinstance(phase, Mapping) for phase in phases):
        raise ConfigError("a run in phases needs [[phases]], tables of kind 'ordinary' or 'private'; there are none")
    base = {key: value for key, value in table.items() if key != "phases"}
    given = {**flatten(base), **(overrides or {})}
    run = parse(unflatten({**_ONE_SITE, **given}))
    if not run.is_single_site:
        raise ConfigError(
            f"privacy.unit = {run.privacy.unit!r}, clients = {run.clients}: a run in phases trains at one site, whose "
            "records are protected; set privacy.unit to 'record' or 'group' and clients = 1"
        )
    _refuse_idle(given)
    if run.data.sensitive != "none":
        raise ConfigError("data.sensitive must be left out of a run in phases; every phase says what text it reads")
    if run.audit.canaries:
        raise ConfigError(f"audit.canaries = {run.audit.canaries} must be 0 in a run in phases")
    if run.data.least_words and any(phase.get("text") == "redacted" for phase in phases):
        raise ConfigError(
            f"data.least-words = {run.data.least_words} must be 0 in a run with redacted phases: it counts the "
            "words of the original texts, so whether a record takes part would tell of its sensitive spans"
        )
    made = tuple(_phase(number, phase) for number, phase in enumerate(phases, start=1))
    try:
        return PhasesConfig(run, made)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _refuse_idle(given: Mapping[str, Any]) -> None:
    """Refuse settings that no phase reads, so that nobody thinks they hold; a default may be written down."""
    default = flatten(parse(unflatten(_ONE_SITE)).to_table())
    idle = [
        f"{key} = {value!r} has no effect in a run in phases, which say how they train; leave it out"
        for key, value in given.items()
        if not key.startswith(_READ) and default.get(key) != value
    ]
    if idle:
        raise ConfigError("\n".join(idle))


def _phase(number: int, table: Mapping[str, Any]) -> Phase:
    options = {key: value for key, value in table.items() if key != "kind"}
    options.setdefault("name", f"phase {number}")
    nested = {key for key in options if key in ("controller-options", "optimizer-options")}
    for key in nested:
        if not isinstance(options[key], Mapping):
            raise ConfigError(f"phases[{number}].{key} must be a table of options")
    try:
        phase: Phase = build(f"phases[{number}].kind", KINDS, str(table.get("kind", "")), options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return phase
