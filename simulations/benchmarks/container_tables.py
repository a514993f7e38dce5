"""Tables of docker/README.md: sizes of the image, what its test took, and the cost of a process per message."""

from collections.abc import Mapping
from typing import Any

PARTS = {
    "flower": "Flower's part is imported",
    "import": "torch, transformers and the ClientApp are imported",
    "open": "records and base model are opened (memory-mapped)",
    "train": "training, first time",
    "again": "training, if the process had stayed",
}
HANDED_PARTS = {
    "flower": "Flower's part is imported",
    "hand over": "our part of it is imported, the message is read",
    "fork": "the resident process forks; the fork opens records and model, trains, answers",
}


def containers(result: Mapping[str, Any]) -> str:
    """Sizes and the container test."""
    base, image = (result[key] / 1e6 for key in ("base_bytes", "image_bytes"))
    return (
        "| image | size |\n| --- | ---: |\n"
        f"| base: Debian 12 with Python 3.11 | {base:,.0f} MB |\n"
        f'| Lacquer with torch for CPUs and the model "minilm" | {image:,.0f} MB |\n\n'
        f"`docker/container_test.sh` took {result['seconds'] // 60}:{result['seconds'] % 60:02d} at load "
        f"{result['load']:.0f} on {result['cores']} cores ({result['how']}); commit `{result['commit']}`.\n"
    )


def message_overhead(result: Mapping[str, Any]) -> str:
    """One line for every part of a message."""
    lines = ["| a message to a client | CPU | wall |", "| --- | ---: | ---: |"]
    for title, parts, words in (
        ("one process does everything", result["parts"], PARTS),
        ("with the resident process", result["handed_parts"], HANDED_PARTS),
    ):
        lines.append(f"| **{title}** | | |")
        lines += [
            f"| {text} | {parts[name]['cpu_seconds']:.2f} s | {parts[name]['wall_seconds']:.1f} s |"
            for name, text in words.items()
        ]
    environment = result["environment"]
    return (
        "\n".join(lines) + "\n\n"
        f'{result["records"]} records, model "{result["model"]}"; median of {result["repetitions"]} messages each way; '
        f"load {result['load'][0]:.0f} on {environment['cores']} cores; commit `{environment['commit']}`.\n"
    )
