"""What is different about a recipe's run: phases instead of rounds, and a guarantee that may be selective or none."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from server.config.load import parse
from server.config.schema import RunConfig
from simulations.report.notation import delta_text, duration_text, epsilon_text, number_text

_KINDS = {"ordinary": "without noise", "private": "with noise"}


@dataclass(frozen=True)
class RecipeRecord:
    """A recipe's settings, and how far it came.

    Attributes:
        run: settings of the data and the model.
        phases: `[[phases]]` of the file, in order.
        done: name, seconds and validation loss of those that have ended, in order.
    """

    run: RunConfig
    phases: tuple[Mapping[str, Any], ...]
    done: tuple[Mapping[str, Any], ...]

    @property
    def reads_without_noise(self) -> list[str]:
        """Phases that leave no guarantee at record level."""
        return [str(phase["name"]) for phase in self.phases if phase["kind"] != "private"]

    @property
    def names(self) -> str:
        """Of the phases, in order."""
        return ", ".join(str(phase["name"]) for phase in self.phases)

    def rows(self) -> list[tuple[str, str]]:
        """What each phase does and came to, as (label, text)."""
        ended = [
            f"{duration_text(told['seconds'])}, validation loss {number_text(told['validation_loss'])}"
            for told in self.done
        ]
        missing = ["not ended"] * (len(self.phases) - len(ended))
        return [
            (f"Phase {phase['name']}", f"{_KINDS[phase['kind']]}, {phase['text']} texts: {outcome}")
            for phase, outcome in zip(self.phases, [*ended, *missing], strict=True)
        ]

    def guarantee(self, written: dict[str, Any] | None, charged: dict[str, Any] | None) -> dict[str, Any] | None:
        """The recipe's guarantee in the form that other runs have theirs.

        Args:
            written: privacy.json, which holds the statement of the ledger inside; None before the recipe has ended.
            charged: the statement of the ledger alone: all there is to say if every phase has noise, else a part only.
        """
        if written is not None:
            of_ledger = written.get("ledger")
            terms = of_ledger if isinstance(of_ledger, dict) and written.get("kind") == "record" else {}
            epsilon = {"epsilon": written.get("record_epsilon")} if terms else {}
            return {**terms, **written, **epsilon}
        if not self.reads_without_noise:
            return charged
        reason = f"phase {' and '.join(map(repr, self.reads_without_noise))} trains without noise"
        return {"sentence": f"This run is NOT PRIVATE: {reason}.", "not_private": reason}


def read_recipe(file: Path) -> RecipeRecord:
    """The recipe in a run folder.

    Raises:
        ConfigError, ValueError, OSError: it is no recipe, or a phase's file is damaged.
    """
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    phases = table.pop("phases", None)
    known = isinstance(phases, list) and all(
        isinstance(phase, dict) and {"name", "text"} <= set(phase) and phase.get("kind") in _KINDS for phase in phases
    )
    if not phases or not known:
        raise ValueError("it must have [[phases]] with kind, name and text, as the run wrote them; restore it")
    done: list[Mapping[str, Any]] = []
    for number in range(1, len(phases) + 1):
        ended = file.parent / "phases" / str(number) / "done.safetensors"
        if not ended.is_file():
            break
        done.append(_told(ended))
    return RecipeRecord(parse(table), tuple(phases), tuple(done))


def _told(ended: Path) -> dict[str, Any]:
    """What :meth:`server.run_folder.phase_progress.PhaseFolder.finish` keeps beside the adapter."""
    try:
        with safe_open(ended, "np") as adapter:
            told = json.loads(adapter.metadata()["phase"])
        return {"name": told["name"], **{key: float(told[key]) for key in ("seconds", "validation_loss")}}
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{ended} is not of this run: {type(error).__name__}: {error}; restore it") from error


def selective_text(guarantee: Mapping[str, Any]) -> str:
    """What holds besides where there is no guarantee at record level; "" if nothing does."""
    if guarantee.get("kind") != "selective":
        return ""
    epsilon, delta = float(guarantee["selective_epsilon"]), float(guarantee["delta"])
    return f"at record level; selective-DP: ε ≤ {epsilon_text(epsilon)} at δ = {delta_text(delta)}"


def noise_rows(guarantee: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the private phases cost by themselves, where that is not the guarantee, as (label, text)."""
    if guarantee.get("kind") == "record" or not guarantee.get("noise_epsilon"):
        return []
    return [("ε of the private phases alone", f"{epsilon_text(guarantee['noise_epsilon'])}; no guarantee of the run")]
