"""`python -m simulations.benchmarks.tables [--check]`: the numbers in the documentation, rewritten from results.

A document holds a marked block for every table,

    <!-- table:sst2 -->
    (generated)
    <!-- end table:sst2 -->

and one function here makes the text of each from `results/NAME.json` (of a table FILE.PART from `results/FILE.json`).
No number in such a block is typed by hand; `--check` changes nothing and fails if a block is not what the results say.
A new table is a function and a line in :data:`TABLES`.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from simulations.benchmarks import (
    atdp_tables,
    comparison_claims,
    comparison_tables,
    container_tables,
    engine_tables,
    fault_tables,
    pesgd_tables,
    privacy_tables,
    records_tables,
    rl_tables,
    secure_tables,
    silo_tables,
)
from simulations.notation import duration_text, number_text

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"

Row = Mapping[str, Any]
Table = Callable[[Any], str]

_BLOCK = re.compile(r"<!-- table:(?P<name>[\w.-]+) -->\n(?P<text>.*?)<!-- end table:(?P=name) -->", re.DOTALL)


def sst2(results: Sequence[Row]) -> str:
    """SST-2 over seeds: one line per privacy level, mean and standard deviation of the test accuracy."""
    lines = []
    settings = ("epsilon", "rounds", "dimension")
    ordered = sorted(results, key=lambda row: tuple(row[name] for name in settings))
    for (epsilon, rounds, dimension), group in groupby(ordered, key=lambda row: tuple(row[name] for name in settings)):
        runs = list(group)
        lines.append(
            (
                number_text(epsilon),
                mean_text([row["test_accuracy"] for row in runs]),
                mean_text([row["validation_accuracy"] for row in runs]),
                number_text(rounds),
                number_text(dimension),
                duration_text(statistics.mean(row["seconds"] for row in runs)),
                str(len(runs)),
            )
        )
    header = ("ε", "test accuracy", "validation accuracy", "rounds", "values trained", "time", "seeds")
    return markdown(header, lines) + provenance(results)


TABLES: dict[str, Table] = {
    "sst2": sst2,
    "flower-dp-control": privacy_tables.flower_dp_control,
    "mechanism-audit": privacy_tables.mechanism_audit,
    "audit-power": privacy_tables.audit_power,
    "noise_throughput": privacy_tables.noise_throughput,
    "engine-speed": engine_tables.engine_speed,
    "engine-peak": engine_tables.engine_peak,
    "company": engine_tables.company,
    "engine-record-level": engine_tables.engine_record_level,
    "engine-profile": engine_tables.engine_profile,
    "engine-pfl": engine_tables.engine_pfl,
    "engine-flower": engine_tables.engine_flower,
    "engine-population": engine_tables.engine_population,
    "engine-gpu": engine_tables.engine_gpu,
    "engine-full-run": engine_tables.engine_full_run,
    "controllers": comparison_tables.comparisons,
    "controllers.choices": comparison_tables.choices,
    "controllers.claims": comparison_claims.claims,
    "lora": comparison_tables.lora,
    "targets": comparison_tables.comparisons,
    "bad-replies": fault_tables.bad_replies,
    "soak": fault_tables.soak,
    "secure-sums": secure_tables.secure_sums,
    "containers": container_tables.containers,
    "message-overhead": container_tables.message_overhead,
    "silo_accounting.adam-ac": silo_tables.adam_ac,
    "silo_accounting.rldp": silo_tables.rldp,
    "dp-sgd-step": silo_tables.step_cost,
    "records-diabetes": records_tables.comparison,
    "records-diabetes.choices": records_tables.choices,
    "records-diabetes.claims": records_tables.claims,
    "rl_overhead": rl_tables.overhead,
    "rl_pretraining": rl_tables.pretraining,
    "atdp": atdp_tables.comparison,
    "pesgd": pesgd_tables.losses,
    "pesgd.claims": pesgd_tables.claims,
    "pesgd-tuning": pesgd_tables.tuning,
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---:"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mean_text(shares: Sequence[float]) -> str:
    """Mean of percentages, with the sample standard deviation where there are several."""
    mean = f"{100 * statistics.mean(shares):.1f} %"
    return mean if len(shares) < 2 else f"{mean} ± {100 * statistics.stdev(shares):.1f}"


def provenance(results: Sequence[Row]) -> str:
    """Seeds, machines and commits of the rows, as one sentence under a table."""
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in results}))
    machines = "; ".join(sorted({row["machine"] for row in results}))
    commits = ", ".join(f"`{commit}`" for commit in sorted({row["commit"] for row in results}))
    return f"\nSeeds {seeds}; machine: {machines}; commit {commits}.\n"


def block(name: str, results: Path = RESULTS) -> str:
    """The text of one table; a sentence that says so where nothing has been measured yet.

    Raises:
        ValueError: if there is no table of that name.
    """
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; known are {', '.join(sorted(TABLES))}")
    file = results / f"{name.partition('.')[0]}.json"
    if not file.is_file():
        return "*Not measured yet.*\n"
    return TABLES[name](json.loads(file.read_text(encoding="utf-8")))


def fill(text: str, results: Path = RESULTS) -> str:
    """A document with every marked block made anew.

    Raises:
        ValueError: for an unknown table, or a marker without its end.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table:{name} -->\n{block(name, results)}<!-- end table:{name} -->"

    filled, count = _BLOCK.subn(replace, text)
    opened = len(re.findall(r"<!-- table:[\w.-]+ -->", text))
    if opened != count:
        raise ValueError(f"{opened} tables are opened but {count} are closed by <!-- end table:NAME -->")
    return filled


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files at the root, in docs/ and in the rooms."""
    folders = ("docs", "privacy", "client", "strategies", "server", "simulations", "docker")
    return sorted([*root.glob("*.md"), *(path for folder in folders for path in (root / folder).rglob("*.md"))])


def main(
    check: Annotated[bool, typer.Option("--check", help="change nothing; fail if a table is stale")] = False,
) -> None:
    """Rewrite the generated tables of all documents."""
    console = Console()
    stale = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale += 1
            console.print(f"{path.relative_to(ROOT)}: {'stale' if check else 'rewritten'}")
            if not check:
                path.write_text(filled, encoding="utf-8")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
