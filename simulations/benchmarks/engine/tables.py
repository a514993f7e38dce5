"""The tables of docs/engine.md, made from results/engine-*.json by ``tables.py``."""

from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import markdown, provenance
from simulations.report.notation import duration_text

Results = Mapping[str, Any]

GOALS = {
    ("tiny, 4 x 16", "engine", "plain PEFT in place"): 5.0,
    ("tiny, 10 x 64", "engine", "plain PEFT in place"): 1.5,
    ("tiny, 4 x 16", "engine", "plain PEFT rebuilt"): 10.0,
    ("MiniLM, ragged SST-2", "engine bf16", "plain PEFT in place"): 1.8,
    ("MiniLM, ragged SST-2", "engine bf16", "plain PEFT rebuilt"): 2.5,
    ("MiniLM, top 2 layers", "engine bf16, prefix cache", "plain PEFT in place"): 4.0,
    ("tiny, 4 x 16, fp32", "engine, record-level", "Opacus hooks"): 6.0,
    ("MiniLM, 16 x 64, bf16", "engine, record-level", "Opacus hooks"): 1.5,
    ("tiny, 8 x 16, batches of 4", "engine fp32", "pfl-research"): 6.0,
    ("tiny, 20 x 64, batches of 10", "engine fp32", "pfl-research"): 1.6,
    ("MiniLM, ragged SST-2", "engine bf16", "pfl-research"): 1.8,
}
"""Ratios that were set before anything was measured."""
RECORD_LEVEL_GOAL = 0.9


def goal(row: Results) -> str:
    """The ratio that was wanted of a row; empty where none was."""
    wanted = GOALS.get((row["job"], row["variant"], row["reference"]))
    if (row["variant"], row["reference"]) == ("engine, record-level", "engine"):
        wanted = RECORD_LEVEL_GOAL
    return "" if wanted is None else f"{wanted:g}"


def engine_speed(results: Results) -> str:
    """Clients per CPU second beside plain PEFT; the range over rounds in brackets."""
    lines = [
        (
            row["job"],
            row["variant"],
            row["reference"],
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f})",
            goal(row),
            f"{row['clients_per_second']:.1f}",
            f"{row['difference']:.1g}" if row["difference"] else "0",
        )
        for row in results["ratios"]
        if row["variant"] != row["reference"]
    ]
    header = ("job", "variant", "times as fast as", "ratio", "goal", "clients/s", "relative difference of updates")
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


def company(results: Results) -> str:
    """How far one record more moves what the others contribute."""
    lines = [
        (
            row["model"],
            row["precision"],
            str(row["threads"]),
            f"{row['sum_moved_most']:.1g}",
            f"{row['alone_moved_most']:.1g}",
            f"{row['draws_with_other_bins']} of {row['draws']}",
        )
        for row in results["rows"]
    ]
    header = (
        "model",
        "arithmetic",
        "threads",
        "clipped sum of the others, / C",
        "a record, alone and not, / C",
        "another bin",
    )
    return markdown(header, lines) + provenance(results)


def engine_record_level(results: Results) -> str:
    """Record-level privacy beside the same step without it, and beside Opacus; then peak memory."""
    lines = [
        (
            row["job"],
            row["variant"],
            row["reference"],
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f})",
            goal(row),
        )
        for row in results["ratios"]
        if row["variant"] != row["reference"]
    ]
    memory = ((row["variant"], f"{row['peak_bytes'] / 2**20:.0f} MiB") for row in results["memory"])
    speed = markdown(("job", "variant", "times as fast as", "ratio", "goal"), lines)
    return f"{speed}\n{markdown(('one step of MiniLM, 32 x 64', 'peak memory'), memory)}{machine(results)}"


def engine_profile(results: Results) -> str:
    """Where the time of a round goes, by precision."""
    shares = {name: {row["part"]: row["share"] for row in rows} for name, rows in results["parts"].items()}
    parts = [row["part"] for row in results["parts"]["fp32"]]
    lines = [(part, *(f"{100 * share.get(part, 0.0):.1f} %" for share in shares.values())) for part in parts]
    return markdown(("part", *shares), lines) + machine(results)


def engine_pfl(results: Results) -> str:
    """Rounds of DP-FedAvg beside pfl-research."""
    lines = [
        (
            row["job"],
            row["variant"],
            row["reference"],
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f})",
            goal(row),
            f"{row['clients_per_second']:.1f}",
            f"{row['difference']:.1g}",
        )
        for row in results["ratios"]
    ]
    header = ("job", "variant", "times as fast as", "ratio", "goal", "clients/s", "relative difference of the mean")
    return markdown(header, lines) + machine(results)


def engine_flower(results: Results) -> str:
    """Whole rounds on Flower and Ray: one message per worker beside one per client."""
    lines = [
        (
            row["reference"],
            f"{row['reference_messages']:.0f}",
            f"{row['reference_wall_seconds']:.1f} s",
            f"{row['wall_seconds']:.1f} s",
            f"{row['wall_ratio']:.1f} ({row['lowest_wall_ratio']:.1f}-{row['highest_wall_ratio']:.1f})",
            f"{row['cpu_ratio']:.1f} ({row['lowest_cpu_ratio']:.1f}-{row['highest_cpu_ratio']:.1f})",
        )
        for row in results["rows"]
    ]
    header = ("the usual way", "messages", "its round", "our round", "ratio, wall time", "ratio, CPU time")
    table = markdown(header, lines)
    return f"{table}\n{results['rows'][0]['clients']} clients a round, {results['workers']} workers.{machine(results)}"


def engine_population(results: Results) -> str:
    """What the server takes for one round as the population grows."""
    lines = [
        (
            f"{row['population']:,}",
            f"{row['wall_ms']:.1f} ms ({row['highest_wall_ms']:.0f})",
            f"{row['cpu_ms']:.1f} ms",
            f"{row['draw_and_messages_ms']:.1f} ms",
            f"{row['growth_bytes'] / 2**20:.0f} MiB",
        )
        for row in results["rows"]
    ]
    header = ("logical clients", "a round (longest)", "CPU", "of it draw and messages, wall", "memory of the run")
    return markdown(header, lines) + machine(results)


def engine_gpu(results: Results) -> str:
    """The 1.1B model on a GPU."""
    lines = [
        (row["job"], row["variant"], row["reference"], f"{row['ratio']:.2f}", f"{row['clients_per_second']:.1f}")
        for row in results["ratios"]
        if row["variant"] != row["reference"]
    ]
    table = markdown(("job", "variant", "times as fast as", "ratio", "clients/s"), lines)
    return f"{table}\nMFU {100 * results['mfu']:.0f} % on {results['device']}.{machine(results)}"


def engine_full_run(results: Results) -> str:
    """One whole run, alone on the machine."""
    line = (
        f"{results['rounds']} rounds, {results['clients']:,} clients, {results['expected_cohort']:g} a round",
        f"{results['model']}, {results['parameters'] / 1e6:.1f} million parameters",
        duration_text(results["seconds"]),
        f"{results['workers']}",
        f"{100 * results['test_accuracy']:.1f} %",
    )
    table = markdown(("run", "model", "wall time", "workers", f"test accuracy at ε = {results['epsilon']:g}"), [line])
    return f"{table}\nLoad before the start {results['load_before']}.{machine(results)}"


def machine(results: Results) -> str:
    """Processor, threads, load and commit, as one sentence under a table."""
    found = results["environment"]
    torch = found["packages"]["torch"]
    load = f"; load {found['load'][1]:.0f} on {found['cores']} cores" if "load" in found else ""
    return f"\n{found['processor']}, {found['threads']} thread, torch {torch}{load}; commit `{found['commit']}`.\n"
