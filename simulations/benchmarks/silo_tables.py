"""Tables of docs/record-level.md: what the papers' own accounting leaves out, and what a private step costs."""

from collections.abc import Mapping
from typing import Any

from simulations.benchmarks.privacy_tables import markdown, provenance

Results = Mapping[str, Any]


def adam_ac(results: Results) -> str:
    """DP-Adam-AC: stated, by its formula, by PLD, and what its clipping really allows."""
    lines = [
        (
            f"{line['noise_multiplier']:g}",
            f"about {line['stated']:g}",
            f"{line['paper_formula']:.2f}",
            f"{line['rdp']:.2f}",
            f"{line['pld']:.2f}",
            f"{line['one_pass']:.2f}",
            *(f"{value:.1f}" for value in line["micro_batch"].values()),
        )
        for line in results["adam_ac"]["lines"]
    ]
    micro = [f"micro-batches of {m}" for m in results["adam_ac"]["lines"][0]["micro_batch"]]
    header = ("σ", "paper states", "its formula", "RDP", "PLD (ours)", "one shuffled pass", *micro)
    return markdown(header, lines) + provenance(results)


def rldp(results: Results) -> str:
    """RLDP: the noise its accountant asks for, the noise that is needed, and what n blocks at that noise cost."""
    pairs = list(results["rldp"]["lines"][0]["true"]["pld"])
    lines = []
    for line in results["rldp"]["lines"]:
        for name, how in (("central_limit", "its own"), ("pld", "PLD")):
            cost = line["true"][name]
            epsilons = [f"{cost[n]:.2f}" if n == "1" else f"{cost[n]:.0f}" for n in pairs]
            lines.append((f"{line['target']:g}", how, f"{line[f'sigma_{name}']:.3f}", *epsilons))
    header = ("ε meant", "σ by", "σ", *(f"true ε, {n} block{'' if n == '1' else 's'}" for n in pairs))
    return markdown(header, lines) + provenance(results)


def step_cost(results: Results) -> str:
    """A private step beside the same step without privacy: time and the parts of it."""
    lines = [
        (
            row["job"],
            row["variant"],
            f"{row['ratio']:.2f} ({row['lowest_ratio']:.2f}-{row['highest_ratio']:.2f})",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
        )
        for row in results["rows"]
    ]
    table = markdown(("batch", "variant", "time against non-private training", "peak memory"), lines)
    load = results["environment"]["load"][1]
    how = f"CPU time of one thread; load of the machine over the five minutes before the end: {load:g}."
    return f"{table}\n{how}\n{provenance(results)}"
