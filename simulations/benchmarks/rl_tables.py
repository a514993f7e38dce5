"""Tables of the controller ``rl``: what it costs in seconds, and what it is worth on federations made of numbers."""

from collections.abc import Mapping
from typing import Any


def overhead(result: Mapping[str, Any]) -> str:
    """One line per adapter and controller, in milliseconds."""
    lines = ["| adapter | values | controller | server, most rounds | server, when it acts | clipping of 50 clients |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    for row in result["rows"]:
        times = (row[key] for key in ("seconds_round", "seconds_round_of_action", "seconds_clients"))
        cells = " | ".join(f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2f} s" for seconds in times)
        lines.append(f"| {row['adapter']} | {row['values']:,} | {row['controller']} | {cells} |")
    return "\n".join(lines) + f"\n\n{_where(result)}\n"


def pretraining(result: Mapping[str, Any]) -> str:
    """One line per way: log final loss less that of the user's own fixed threshold."""
    lines = ["| way | mean log loss at the end, less that of fixed C_0 | standard error | better on |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, row in result["test"].items():
        lines.append(f"| {name} | {row['mean']:+.2f} | {row['standard_error']:.2f} | {row['better']} of {row['of']} |")
    return "\n".join(lines) + f"\n\n{_where(result)}\n"


def _where(result: Mapping[str, Any]) -> str:
    place = result["environment"]
    return f"Machine: {place['cores']} cores, {place['system']}; commit `{place['commit']}`."
