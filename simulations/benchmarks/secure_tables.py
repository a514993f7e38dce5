"""Table of docs/trust.md: what a secure sum costs."""

from collections.abc import Mapping
from typing import Any


def secure_sums(result: Mapping[str, Any]) -> str:
    """One line per number of clients, length and dropouts."""
    head = (
        "| clients | of them gone | length | client: protocol | client: noise | server | client sends | without secure "
        "sums | client receives beside the model |\n| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    )
    lines = [
        f"| {row['clients']} | {row['gone']} | {row['dimension']:,} | {row['client_seconds']:.3f} s | "
        f"{row['noise_seconds']:.3f} s | {row['server_seconds']:.2f} s | {_size(row['client_bytes_up'])} | "
        f"{_size(row['plain_bytes_up'])} | {_size(row['client_bytes_down'])} |"
        for row in result["rows"]
    ]
    environment = result["environment"]
    machine = f"{environment['system']}, {environment['cores']} cores"
    told = f"CPU time of one thread; {machine}; commit `{environment['commit']}`."
    return head + "\n".join(lines) + f"\n\n{told}\n"


def _size(count: int) -> str:
    return f"{count / 1000:,.0f} kB" if count >= 10_000 else f"{count / 1000:.1f} kB"
