"""Tables of docs/faults.md: bad replies tried, faults survived."""

from collections.abc import Mapping
from typing import Any

from simulations.report.notation import duration_text

_KINDS = {
    "absent": "a record, a setting or everything is missing",
    "broken_bytes": "array cut off, or its header changed",
    "failed": "error replies whose text quotes data",
    "huge": "megabytes where bytes belong, hundreds of names",
    "mutated": "random bytes of the whole message changed",
    "norm_above_one": "more than one clipped update, up to the largest integers",
    "not_finite": "NaN and infinities, as floats or as their bits",
    "other_code": "of a client that runs other code",
    "replayed": "an honest reply of the round before",
    "surplus": "further records, arrays, settings, metrics",
    "unasked": "sent twice, in another node's name, to a message of before",
    "wrong_dtype": "other number types, undeclared types, pickles",
    "wrong_names": "arrays under other names",
    "wrong_round": "another round, or none",
    "wrong_shape": "other shapes, and shapes that are declared but not there",
}


def bad_replies(result: Mapping[str, Any]) -> str:
    """One line per kind of bad reply."""
    lines = [f"| {_KINDS[kind]} | {count:,} |" for kind, count in sorted(result["kinds"].items())]
    lines.append(f"| **all** | **{result['replies']:,}** |")
    told = (
        f"{result['refused']:,} were refused, {result['unparsable']} had no form that Flower can read, "
        f"{result['honest_looking']} of the randomly changed ones had become possible replies and were counted within "
        f"their bound; {result['crashes']} crashes in {result['rounds']} rounds. "
        f"Seed {result['seed']}; machine: {result['machine']}; commit `{result['commit']}`."
    )
    return "| kind of reply | tried |\n| --- | ---: |\n" + "\n".join(lines) + f"\n\n{told}\n"


def soak(result: Mapping[str, Any]) -> str:
    """One column per leg of the soak run."""
    legs = result["legs"]

    def row(label: str, *cells: str) -> str:
        return f"| {label} | {' | '.join(cells)} |"

    def each(key: str) -> list[str]:
        return [f"{leg[key]:,}" if isinstance(leg.get(key), int) else str(leg.get(key, "none")) for leg in legs]

    def epsilon(key: str) -> list[str]:
        return [f"{leg[key]:.4f}" for leg in legs]

    def faults(leg: Mapping[str, Any], part: str) -> str:
        told = (name + (f" ×{count}" if count > 1 else "") for name, count in leg.get(part, {}).items())
        return ", ".join(told) or "none"

    memory = [
        f"{leg['rss_first_mb']} MB after 1, {leg['rss_middle_mb']} after {leg['rss_rounds'] // 2}, "
        f"{leg['rss_last_mb']} after {leg['rss_rounds']} rounds"
        f" ({leg['rss_growth_mb_per_100_rounds']:+.2f} MB per 100 rounds in the second half)"
        if "rss_rounds" in leg
        else "not followed"
        for leg in legs
    ]
    rows = [
        row("", *(leg["engine"] for leg in legs)),
        row("---", *("---:" for _ in legs)),
        row("rounds planned and paid for", *each("rounds_planned")),
        row("rounds released", *each("rounds_released")),
        row("kill -9", *(faults(leg, "kills") for leg in legs)),
        row("faults of nodes", *(faults(leg, "faults") for leg in legs)),
        row("ended by a failed round", *each("ended_by_a_fault")),
        row("resumes", *each("resumes")),
        row("charges in the ledger", *each("charges")),
        row("charged, and lost with the process", *each("charged_and_lost")),
        row("rounds released without a charge (lost in the ledger)", *each("lost_rounds_in_the_ledger")),
        row("ε that the ledger states", *epsilon("epsilon_stated")),
        row("ε of all its charges, computed anew", *epsilon("epsilon_of_all_charges")),
        row("ε of the released rounds alone", *epsilon("epsilon_of_the_rounds_kept")),
        row("adapter loads with PEFT", *("yes" if leg["adapter_loads"] else "no" for leg in legs)),
        row("memory of the longest-lived process", *memory),
        row("time", *(duration_text(leg["seconds"]) for leg in legs)),
    ]
    machines = "; ".join(sorted({leg["machine"] for leg in legs}))
    commits = ", ".join(f"`{commit}`" for commit in sorted({leg["commit"] for leg in legs}))
    return "\n".join(rows) + f"\n\nMachine: {machines}; commit {commits}.\n"
