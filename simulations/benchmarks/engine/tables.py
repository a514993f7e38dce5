"""Tables of docs/results/engine.md: columns over the results of this folder."""

from collections.abc import Callable, Mapping
from typing import Any

from simulations.benchmarks.harness.markdown import RATIO, Columns, Row, table

GOALS = {
    ("tiny, 4 x 16", "engine", "plain PEFT in place"): 6.0,
    ("tiny, 10 x 64", "engine", "plain PEFT in place"): 2.0,
    ("tiny, 4 x 16", "engine", "plain PEFT rebuilt"): 10.0,
    ("MiniLM, ragged SST-2", "engine fp32", "plain PEFT in place"): 3.3,
    ("MiniLM, ragged SST-2", "engine bf16", "plain PEFT in place"): 5.0,
    ("MiniLM, ragged SST-2", "engine bf16", "plain PEFT rebuilt"): 2.5,
    ("MiniLM, top 2 layers", "engine bf16, prefix cache", "plain PEFT in place"): 4.0,
    ("tiny, 4 x 16, fp32", "engine, record-level", "Opacus hooks"): 6.0,
    ("MiniLM, 16 x 64, fp32", "engine, record-level", "Opacus hooks"): 1.8,
    ("MiniLM, 16 x 64, bf16", "engine, record-level", "Opacus hooks"): 2.8,
    ("tiny, 8 x 16, batches of 4", "engine fp32", "pfl-research"): 6.0,
    ("tiny, 20 x 64, batches of 10", "engine fp32", "pfl-research"): 1.6,
    ("MiniLM, ragged SST-2", "engine bf16", "pfl-research"): 1.8,
}
"""Ratios that were set before anything was measured."""
RECORD_LEVEL_GOAL = 0.95


def goal(row: Row) -> str:
    """The ratio that was wanted of a row; empty where none was."""
    wanted = GOALS.get((row["job"], row["variant"], row["reference"]))
    if (row["variant"], row["reference"]) == ("engine, record-level", "engine"):
        wanted = RECORD_LEVEL_GOAL
    return "" if wanted is None else f"{wanted:g}"


def mebibytes(key: str) -> Any:
    """A column of bytes."""
    return lambda row: f"{row[key] / 2**20:.0f} MiB"


COMPARED: Columns = {
    "job": "{job}",
    "variant": "{variant}",
    "times as fast as": "{reference}",
    "ratio": RATIO,
    "goal": goal,
}
CLIENTS: Columns = {"clients/s": "{clients_per_second:.1f}"}


def machine(results: Mapping[str, Any]) -> str:
    """Processor, threads, load and commit, as one sentence under a table."""
    found = results["environment"]
    torch = found["packages"]["torch"]
    load = f"; load {found['load'][1]:.0f} on {found['cores']} cores" if "load" in found else ""
    return f"\n{found['processor']}, {found['threads']} thread, torch {torch}{load}; commit `{found['commit']}`.\n"


def compared(results: Mapping[str, Any], columns: Columns) -> str:
    """The ratios of all variants to others, and what they were on other processors."""
    rows = [row for row in results["ratios"] if row["variant"] != row["reference"]]
    return f"{table(rows, {**columns, **elsewhere(results)})}{commits_elsewhere(results)}"


def elsewhere(results: Mapping[str, Any]) -> Columns:
    """A column for every other processor."""

    def ratio(kept: Mapping[str, Any]) -> Callable[[Row], str]:
        found = {_which(row): f"{row['ratio']:.2f}" for row in kept["ratios"]}
        return lambda row: found.get(_which(row), "")

    return {f"on {name}": ratio(kept) for name, kept in results.get("elsewhere", {}).items()}


def _which(row: Row) -> tuple[str, ...]:
    return row["job"], row["variant"], row.get("reference", "")


def commits_elsewhere(results: Mapping[str, Any]) -> str:
    """Of what commit the numbers of other processors are."""
    return "".join(f"\nOn {name}: commit `{kept['commit']}`.\n" for name, kept in results.get("elsewhere", {}).items())


def speed(results: Mapping[str, Any]) -> str:
    """Clients per CPU second beside plain PEFT; the range over rounds in brackets."""
    columns: Columns = {
        **COMPARED,
        **CLIENTS,
        "relative difference of updates": lambda row: f"{row['difference']:.1g}" if row["difference"] else "0",
    }
    return compared(results, columns) + machine(results)


def smollm2(results: Mapping[str, Any]) -> str:
    """Tokens per second of SmolLM2 beside plain PEFT, by both clocks."""
    columns: Columns = {
        "adapters on": "{job}",
        "variant": "{variant}",
        "clients/s": "{clients_per_second:.2f}",
        "tokens per CPU second": "{tokens_per_cpu_second:.0f}",
        "per second on the wall": "{tokens_per_wall_second:.0f}",
        "times plain PEFT, CPU": RATIO,
        "wall": "{wall_ratio:.2f} ({lowest_wall_ratio:.2f}-{highest_wall_ratio:.2f})",
        "first call, CPU": "{first_cpu_seconds:.1f} s",
        "later calls, CPU": "{cpu_seconds:.1f} s",
        "relative difference of updates": lambda row: f"{row['difference']:.1g}" if row["difference"] else "0",
    }
    how = f"Vector unit {results['capability']}; load before {results['load_before'][1]:.1f}."
    columns = {**columns, **elsewhere(results)}
    return f"{table(results['rows'], columns)}{commits_elsewhere(results)}\n{how}{machine(results)}"


def record_level(results: Mapping[str, Any]) -> str:
    """Record-level privacy beside the same step without it, and beside Opacus; then peak memory."""
    memory: Columns = {"one step of MiniLM, 32 x 64": "{variant}", "peak memory": mebibytes("peak_bytes")}
    return f"{compared(results, COMPARED)}\n{table(results['memory'], memory)}{machine(results)}"


def against_pfl(results: Mapping[str, Any]) -> str:
    """Rounds of DP-FedAvg beside pfl-research."""
    columns: Columns = {**COMPARED, **CLIENTS, "relative difference of the mean": "{difference:.1g}"}
    return compared(results, columns) + machine(results)


def against_flower(results: Mapping[str, Any]) -> str:
    """Whole rounds on Flower and Ray: one message per worker beside one per client."""
    columns: Columns = {
        "the usual way": "{reference}",
        "messages": "{reference_messages:.0f}",
        "its round": "{reference_wall_seconds:.1f} s",
        "our round": "{wall_seconds:.1f} s",
        "ratio, wall time": "{wall_ratio:.1f} ({lowest_wall_ratio:.1f}-{highest_wall_ratio:.1f})",
        "ratio, CPU time": "{cpu_ratio:.1f} ({lowest_cpu_ratio:.1f}-{highest_cpu_ratio:.1f})",
    }
    scale = f"{results['rows'][0]['clients']} clients a round, {results['workers']} workers."
    return f"{table(results['rows'], columns)}\n{scale}{machine(results)}"


def gpu(results: Mapping[str, Any]) -> str:
    """Models on one GPU: ratios, shares of the peak, and rates by token budget."""
    columns = {name: COMPARED[name] for name in ("job", "variant", "times as fast as", "ratio")}
    ratios = [row for model in results["models"] for row in model["ratios"] if row["variant"] != row["reference"]]
    shares: Columns = {
        "model": "{model}",
        "MFU": lambda row: f"{100 * row['mfu']:.0f} %",
        "no kernel runs": lambda row: f"{100 * row['idle']:.0f} %",
        "tokens in a micro-batch": "{token_budget:,}",
        "a client's slot": mebibytes("slot_bytes"),
    }
    budgets: Columns = {
        "model": "{model}",
        "tokens in a micro-batch": "{token_budget:,}",
        **CLIENTS,
        "peak memory": lambda row: f"{row['peak'] / 2**30:.1f} GiB",
    }
    tried = [{"model": model["model"], **row} for model in results["models"] for row in model["budgets"]]
    peak = results["models"][0]["product_tflops"]
    return (
        f"{table(ratios, {**columns, **CLIENTS})}\n{table(results['models'], shares)}\n{table(tried, budgets)}\n"
        f"{results['device']}, {peak:.0f} TFLOP/s in a large product.{machine(results)}"
    )


def peak_of_step(row: Row) -> str:
    """The middle peak of the processes, with their range; empty where no step was taken."""
    if row["step"] is None:
        return ""
    middle, lowest, highest = (row[key] / 2**20 for key in ("step", "lowest_step", "highest_step"))
    return f"{middle:.0f} MiB ({lowest:.0f}-{highest:.0f})"


def memory(results: Mapping[str, Any]) -> str:
    """What the frozen model and one step take."""
    columns: Columns = {
        "trained by": lambda row: row.get("way", "engine"),
        "precision": "{precision}",
        "quantisation": lambda row: row.get("quantisation", "none"),
        "blocks": lambda row: "computed again" if row.get("checkpoint_blocks") else "kept",
        "weights": mebibytes("weights"),
        "peak while loading": mebibytes("at_load"),
        "held by the engine": mebibytes("held"),
        "peak of a step": peak_of_step,
        "seconds": lambda row: "" if row["seconds"] is None else f"{row['seconds']:.0f}",
    }
    told = f"{results['model']}; a step of {results['records']} records of {results['tokens']} tokens."
    return f"{table(results['rows'], columns)}\n{told}{machine(results)}"
