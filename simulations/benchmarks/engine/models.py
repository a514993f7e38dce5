"""Base models that were run here: form of chats, licence and memory, from a table that lists no others.

`results/engine-models.json` names each model and the measurement that its memory is read from.
A shape is a model of that size with random weights, where the weights themselves could not be had.
"""

import json
from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import Columns, table
from simulations.benchmarks.harness.results import RESULTS


def table_of_models(results: Mapping[str, Any]) -> str:
    """One line per model."""
    columns: Columns = {
        "`model.name`": "{name}",
        "model": "{model}",
        "parameters": "{parameters}",
        "tasks that were run": "{tasks}",
        "chat template": "{template}",
        "licence of the weights": "{licence}",
        "memory": memory,
    }
    return table(results["models"], columns)


def memory(row: Mapping[str, Any]) -> str:
    """The largest memory of a step and what it was measured with; empty where it was not."""
    found = []
    for where in row["memory"]:
        rows = json.loads((RESULTS / f"{where['file']}.json").read_text())[where["list"]]
        for part in where.get("below", ()):
            rows = next(each for each in rows if each["model"] == part)["budgets"]
        wanted = where["row"]
        (one,) = [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]
        found.append(f"{one[where['bytes']] / 2**30:.1f} GiB ({where['with']})")
    return "; ".join(found)
