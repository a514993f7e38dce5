"""Small runs that have ended, of every task, on random models in folders."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from client.models.base import load_base
from server.config.load import flatten, parse, unflatten
from server.config.schema import RunConfig
from server.runs.start import run_in_folder

SETTINGS: dict[str, Any] = {
    "rounds": 2, "clients": 1, "sampling-rate": 1.0,
    "privacy.unit": "record", "privacy.epsilon": 10.0, "privacy.delta": 1e-3,
    "strategy.controller": "fixed", "strategy.controller-options": {"clip-norm": 0.5},
    "strategy.optimizer-options": {"learning-rate": 0.5},
    "site.batch-size": 8,
    "model.rank": 2, "model.max-length": 60,
    "data.partition": "iid", "data.validation-records": 8, "data.test-records": 6,
    "evaluation.rouge-records": 3, "evaluation.rouge-tokens": 8, "evaluation.examples": 2,
    "engine.kind": "inprocess", "engine.workers": 1,
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "instruction": {},
    "preference": {},
    "causal-lm": {"data.text-column": "prompt"},
    "summarisation": {"data.text-column": "prompt", "data.text-pair-column": "completion"},
    "classification": {"data.text-column": "prompt", "data.label-column": "side"},
}  # fmt: skip


def base_model(folder: Path, name: str, task: str) -> Path:
    """A random model as a folder of transformers."""
    model, tokenizer = load_base(f"random:{name}", "causal-lm" if task != "classification" else task, 2)
    whole: Any = model if task != "classification" else model.encoder
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def records(path: Path, count: int = 40) -> Path:
    """Questions with answers, the first of two preferred, and a side that the question tells."""
    rows = [
        {
            "prompt": f"{'ab'[number % 2] * 4} number {number}?",
            "completion": "Yes." * (1 + number % 3),
            "chosen": "Yes." * (1 + number % 3),
            "rejected": "No, never.",
            "side": number % 2,
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(place: Path, task: str, base: str, **changed: Any) -> RunConfig:
    """The settings of a small run on the records in `place`."""
    own = {"model.name": base, "model.task": task, "data.cache": str(place / "cache")}
    source = {"data.source": f"jsonl:{records(place / 'records.jsonl')}"}
    return parse(unflatten({**flatten(SETTINGS), **own, **source, **TASKS[task], **changed}))


def finished_run(place: Path, task: str, architecture: str, **changed: Any) -> Path:
    """The folder of a run of `task`."""
    base = base_model(place / f"base-{architecture}", architecture, task)
    targets = "query,value" if architecture in ("bert", "roberta") else "q_proj,v_proj"
    folder = place / f"run-{task}-{architecture}"
    folder.mkdir()
    run_in_folder(settings(place, task, str(base), **{"model.targets": targets, **changed}), folder)
    return folder


def run_of_every_task(place: Path, **changed: Any) -> Callable[[str], Path]:
    """A finished run of a task, made in `place` when it is first asked for, with settings changed."""

    @cache
    def make(task: str) -> Path:
        (place / task).mkdir()
        return finished_run(place / task, task, "bert" if task == "classification" else "llama", **changed)

    return make
