"""``lacquer evaluate``: how good a run's adapter is beside its base model, on public records."""

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulations.cli.exits import refusals, say
from simulations.cli.progress import say_working

if TYPE_CHECKING:
    from client.data.records import Records
    from server.evaluation.finished import FinishedRun

PUBLIC = (
    "The records are taken to be public: nothing is charged for these numbers. Of private records they would be a "
    "release without noise."
)


def evaluate_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Public records in the run's columns: .jsonl, .parquet, .csv.", show_default="test set"),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Only the first records; 0 takes all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    lm_eval: Annotated[
        str,
        typer.Option(
            "--lm-eval", metavar="TASKS", help="Tasks of lm-evaluation-harness instead: names or .yaml files."
        ),
    ] = "",
) -> None:
    """Evaluate a run's adapter beside its base model, on its public test set or on other public records.

    Perplexity, token accuracy and ROUGE-L of its answers; of a classifier its accuracy.
    """
    with refusals(ValueError), say_working("evaluating the adapter"):
        from server.evaluation.finished import read_finished

        run = read_finished(run_folder)
        if lm_eval:
            found = harness(run, [task.strip() for task in lm_eval.split(",") if task.strip()], limit)
        else:
            found = evaluate(run, data, limit)
    if data is not None and not lm_eval:
        say(PUBLIC, style="dim")
    typer.echo(json.dumps(found, indent=2) if as_json else _table(found))


def evaluate(run: "FinishedRun", data: Path | None, limit: int) -> dict[str, Any]:
    """Measure the adapter and the base model alone on a test set or on other public records.

    A classifier's base model has no head that was trained: beside it stands the share of the most frequent class.

    Raises:
        ValueError: the data cannot be read or does not fit the run.
    """
    import numpy as np
    import torch

    records = _test_set(run) if data is None else read_records(run, data)
    if 0 < limit < len(records):
        records = records.select(np.arange(limit))
    engine, vector = run.engine()
    found: dict[str, Any] = {
        "data": "the run's test set" if data is None else str(data),
        "records": len(records),
        "adapter": _numbers(engine.evaluate(vector, records)),
    }
    if records.labels is not None:
        found["most_frequent_class"] = float(np.bincount(np.asarray(records.labels)).max() / len(records))
    else:
        found["base"] = _numbers(engine.evaluate(torch.zeros_like(vector), records))  # B = 0 changes nothing
        del engine
        _add_rouge(found, run, records)
    return found


def read_records(run: "FinishedRun", path: Path) -> "Records":
    """Read the records of a file in the run's columns, prepared as its test set was.

    Raises:
        ValueError: another kind of file, a column that is missing, a label that the run does not know.
    """
    from client.data import sources
    from client.data.columns.labels import class_ids
    from client.data.columns.tables import SUFFIXES
    from client.data.splits import public_reading
    from client.data.tokenise import tokenise
    from server.runs.assembly import data_spec

    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"--data {path}: its ending must be one of {', '.join(SUFFIXES)}")
    spec = data_spec(run.config)
    texts = sources.read(f"{kind}:{path}", public_reading(spec), "--data", task=spec.task)
    names = run.label_names
    labels = class_ids(texts.labels or [], names, f"--data {path}") if names else None
    model = run.config.model
    return tokenise(
        texts, labels, run.tokenizer(), run.task, model.max_length, chat_template=model.chat_template
    ).records


def harness(run: "FinishedRun", tasks: list[str], limit: int) -> dict[str, Any]:
    """Run lm-evaluation-harness on the merged model. Tasks are names that it knows or files of its format.

    Raises:
        ValueError: the harness is not installed, or the run has trained a classifier.
    """
    if run.label_names:
        raise ValueError("--lm-eval is for language models; this run has trained a classifier")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--lm-eval needs lm-evaluation-harness: pip install lm-eval")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from client.models.export import merged_model

    files = [Path(task) for task in tasks if task.endswith(".yaml")]
    names = [_task_name(Path(task)) if task.endswith(".yaml") else task for task in tasks]
    known = TaskManager(include_path=[str(file.parent) for file in files] or None)
    model = merged_model(run.config.model.name, run.task, None, run.adapter)
    whole = HFLM(pretrained=model, tokenizer=run.tokenizer())
    chat = run.task == "instruction"
    found = lm_eval.simple_evaluate(
        model=whole, tasks=names, task_manager=known, limit=limit or None, apply_chat_template=chat
    )
    return {"tasks": found["results"]}


def _task_name(file: Path) -> str:
    """The name of a task in a file of lm-evaluation-harness.

    Raises:
        ValueError: there is no such file, or it has no name.
    """
    if not file.is_file():
        raise ValueError(f"--lm-eval: there is no file {file}")
    named = re.search(r"^task:\s*(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        raise ValueError(f"--lm-eval: {file} has no line 'task: NAME'")
    return named[1]


def _test_set(run: "FinishedRun") -> "Records":
    from client.data.prepare import prepare
    from server.runs.assembly import data_spec

    return prepare(data_spec(run.config)).test


def _numbers(metrics: Any) -> dict[str, float]:
    values = {**asdict(metrics), "macro_f1": metrics.macro_f1}
    return {name: value for name, value in values.items() if value is not None and name != "confusion"}


def _add_rouge(found: dict[str, Any], run: "FinishedRun", records: "Records") -> None:
    """ROUGE-L of the first answers, as many as at the end of the run, where there are answers."""
    import numpy as np

    from client.data.spec import ANSWERS
    from client.generation import answer_scores

    count = min(run.config.evaluation.rouge_records, len(records))
    if run.task not in ANSWERS or not count:
        return
    some, tokenizer = records.select(np.arange(count)), run.tokenizer()
    model = run.language_model()
    found["answers"] = count
    found["adapter"]["rougeL"] = answer_scores(model, tokenizer, some, run.most_tokens, run.task).rouge["rougeL"]
    with model.disable_adapter():
        found["base"]["rougeL"] = answer_scores(model, tokenizer, some, run.most_tokens, run.task).rouge["rougeL"]


_SHOWN = {
    "perplexity": ("perplexity", "{:.3f}"),
    "accuracy": ("accuracy", "{:.4f}"),
    "macro_f1": ("macro-F1", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
    "rougeL": ("ROUGE-L", "{:.3f}"),
}


def _table(found: Mapping[str, Any]) -> str:
    """The numbers for a person: one line each, the adapter's beside the base model's."""
    if "tasks" in found:
        return json.dumps(found["tasks"], indent=2)
    lines = [f"{found['records']} records, {found['data']}"]
    if "answers" in found:
        lines[0] += f"; ROUGE-L of the first {found['answers']} answers"
    has_base = "base" in found
    lines.append(f"{'':16}{'adapter':>10}{'base model' if has_base else '':>12}".rstrip())
    for key, (name, form) in _SHOWN.items():
        if key in found["adapter"]:
            beside = form.format(found["base"][key]) if has_base else ""
            tokens = key == "accuracy" and "perplexity" in found["adapter"]
            label = "token accuracy" if tokens else name
            lines.append(f"{label:16}{form.format(found['adapter'][key]):>10}{beside:>12}".rstrip())
    if "most_frequent_class" in found:
        lines.append(f"always the most frequent class: {found['most_frequent_class']:.4f}")
    return "\n".join(lines)
