"""The numbers in the documentation, rewritten from results.

Run: `python -m simulations.benchmarks.harness.tables [--check]`.

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

from simulations.benchmarks.engine import tables as engine
from simulations.benchmarks.faults import message_overhead
from simulations.benchmarks.faults import tables as faults
from simulations.benchmarks.harness import markdown as harness_markdown
from simulations.benchmarks.harness.markdown import RESULTS, mean_text
from simulations.benchmarks.papers import atdp_tables, diabetes, dp_lac_claims, dp_lac_tables, pe_sgd, rl_overhead
from simulations.benchmarks.privacy import published_accounting, secure_sums
from simulations.report.notation import duration_text, number_text

ROOT = Path(__file__).resolve().parents[3]

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
    "flower-dp-control": harness_markdown.flower_dp_control,
    "mechanism-audit": harness_markdown.mechanism_audit,
    "audit-power": harness_markdown.audit_power,
    "noise_throughput": harness_markdown.noise_throughput,
    "engine-speed": engine.engine_speed,
    "engine-peak": engine.engine_peak,
    "company": engine.company,
    "engine-record-level": engine.engine_record_level,
    "engine-profile": engine.engine_profile,
    "engine-pfl": engine.engine_pfl,
    "engine-flower": engine.engine_flower,
    "engine-population": engine.engine_population,
    "engine-gpu": engine.engine_gpu,
    "engine-full-run": engine.engine_full_run,
    "controllers": dp_lac_tables.comparisons,
    "controllers.choices": dp_lac_tables.choices,
    "controllers.claims": dp_lac_claims.claims,
    "lora": dp_lac_tables.lora,
    "targets": dp_lac_tables.comparisons,
    "bad-replies": faults.bad_replies,
    "soak": faults.soak,
    "secure-sums": secure_sums.secure_sums,
    "containers": message_overhead.containers,
    "message-overhead": message_overhead.message_overhead,
    "silo_accounting.adam-ac": published_accounting.adam_ac,
    "silo_accounting.rldp": published_accounting.rldp,
    "dp-sgd-step": published_accounting.step_cost,
    "records-diabetes": diabetes.comparison,
    "records-diabetes.choices": diabetes.choices,
    "records-diabetes.claims": diabetes.claims,
    "rl_overhead": rl_overhead.overhead,
    "rl_pretraining": rl_overhead.pretraining,
    "atdp": atdp_tables.comparison,
    "pesgd": pe_sgd.losses,
    "pesgd.claims": pe_sgd.claims,
    "pesgd-tuning": pe_sgd.tuning,
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---:"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
