"""The tables of docs/engine.md, made from results/engine-*.json by ``tables.py``."""

from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.privacy_tables import markdown

Results = Mapping[str, Any]


def engine_speed(results: Results) -> str:
    """Clients per CPU second beside plain PEFT; the range over rounds in brackets."""
    lines = [
        (
            row["job"],
            row["variant"],
            row["reference"],
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f})",
            f"{row['clients_per_second']:.1f}",
            f"{row['difference']:.1g}" if row["difference"] else "0",
        )
        for row in results["ratios"]
        if row["variant"] != row["reference"]
    ]
    header = ("job", "variant", "times as fast as", "ratio", "clients/s", "relative difference of updates")
    return markdown(header, lines) + machine(results)


def engine_peak(results: Results) -> str:
    """Share of the matrix-product peak that training reaches."""
    lines = [
        (
            row["job"],
            row["precision"],
            f"{row['product_gflops']:.0f}",
            f"{row['training_gflops']:.0f}",
            f"{100 * row['share']:.0f} %",
            f"{100 * row['share_with_padding']:.0f} %",
        )
        for row in results["peak"]
    ]
    header = ("job", "precision", "product alone, GFLOP/s", "in training", "share", "share, padding counted")
    return markdown(header, lines) + machine(results)


def engine_record_level(results: Results) -> str:
    """Record-level privacy beside the same step without it, and beside Opacus; then peak memory."""
    lines = [
        (
            row["job"],
            row["variant"],
            row["reference"],
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f})",
        )
        for row in results["ratios"]
        if row["variant"] != row["reference"]
    ]
    memory = ((row["variant"], f"{row['peak_bytes'] / 2**20:.0f} MiB") for row in results["memory"])
    speed = markdown(("job", "variant", "times as fast as", "ratio"), lines)
    return f"{speed}\n{markdown(('one step of MiniLM, 32 x 64', 'peak memory'), memory)}{machine(results)}"


def engine_profile(results: Results) -> str:
    """Where the time of a round goes, by precision."""
    shares = {name: {row["part"]: row["share"] for row in rows} for name, rows in results["parts"].items()}
    parts = [row["part"] for row in results["parts"]["fp32"]]
    lines = [(part, *(f"{100 * share.get(part, 0.0):.1f} %" for share in shares.values())) for part in parts]
    return markdown(("part", *shares), lines) + machine(results)


def machine(results: Results) -> str:
    """Processor, threads and commit, as one sentence under a table."""
    found = results["environment"]
    torch = found["packages"]["torch"]
    return f"\n{found['processor']}, {found['threads']} thread, torch {torch}; commit `{found['commit']}`.\n"
