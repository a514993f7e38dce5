"""The numbers in the documentation, rewritten from results.

Run: `python -m simulations.benchmarks harness.tables [--check]`.

A document holds a marked block for every table,

    <!-- table:sst2 -->
    (generated)
    <!-- end table:sst2 -->

and one function of the benchmark makes its text from `results/NAME.json` (for a table FILE.PART, `results/FILE.json`).
No number in such a block is typed by hand; `--check` changes nothing and fails if a block is not what the results say.
A new table is a function and a line in :data:`TABLES`; only the modules of the tables asked for are imported.
"""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.benchmarks.harness.markdown import NOT_MEASURED
from simulations.benchmarks.harness.results import RESULTS, ROOT, say

TABLES = {
    "sst2": "papers.sst2:accuracies",
    "flower-dp-control": "privacy.flower_dp:table",
    "mechanism-audit": "privacy.mechanism_audit:audits",
    "mutation": "privacy.mutation:page",
    "audit": "privacy.audit:attacks",
    "audit.tpr": "privacy.audit:rates",
    "audit-power": "privacy.mechanism_audit:powers",
    "private-evaluation": "privacy.evaluation:estimates",
    "company": "privacy.batch_invariance:table",
    "company-gpu": "privacy.batch_invariance:gpu_table",
    "engine-speed": "engine.tables:speed",
    "engine-smollm2": "engine.tables:smollm2",
    "engine-record-level": "engine.tables:record_level",
    "engine-pfl": "engine.tables:against_pfl",
    "engine-flower": "engine.tables:against_flower",
    "engine-memory": "engine.tables:memory",
    "scale-populations": "scale.populations:table",
    "scale-start-up": "scale.start_up:table",
    "engine-gpu": "engine.tables:gpu",
    "controllers": "papers.dp_lac:comparisons",
    "controllers.choices": "papers.dp_lac:choices",
    "lora": "papers.dp_lac:lora",
    "methods": "papers.dp_lac:comparisons",
    "targets": "papers.dp_lac:comparisons",
    "bad-replies": "faults.tables:bad_replies",
    "soak": "faults.tables:soak",
    "soak-containers": "faults.tables:soak_containers",
    "deployment-cost": "faults.tables:deployment_cost",
    "organisations": "faults.tables:organisations",
    "containers": "faults.tables:containers",
    "correlated-training": "privacy.correlated_training:comparison",
    "correlated-training.choices": "privacy.correlated_training:choices",
    "site_accounting.adam-ac": "privacy.published_accounting:adam_ac",
    "site_accounting.rldp": "privacy.published_accounting:rldp",
    "voted-settings": "privacy.voted_settings:prices",
    "voted-settings.choices": "privacy.voted_settings:choices",
    "engine-models": "engine.models:table_of_models",
    "records-diabetes": "papers.diabetes:comparison",
    "records-diabetes.choices": "papers.diabetes:choices",
    "records-diabetes.claims": "papers.diabetes:claims",
    "records-diabetes-why.rl-1": "papers.diabetes:noise_or_agent",
    "records-diabetes-why.clip-rate": "papers.diabetes:clip_rates",
    "records-diabetes-why.ternary": "papers.diabetes:ternary",
    "records-diabetes-why.registered": "papers.diabetes:registered",
    "records-diabetes-why.sigma": "papers.diabetes:noise_levels",
    "rldp": "papers.diabetes:fair_chance",
    "rldp.pairs": "papers.diabetes:fair_chance_pairs",
    "dp-lac-diabetes": "papers.dp_lac_language:comparison",
    "dp-lac-diabetes.adam": "papers.dp_lac_language:comparison_under_adam",
    "dp-lac-diabetes.choices": "papers.dp_lac_language:choices",
    "dp-lac-diabetes.patients": "papers.dp_lac_language:comparison_by_patient",
    "dp-lac-diabetes.price": "papers.dp_lac_language:price_of_tuning",
    "dp-lac-diabetes.ranks": "papers.dp_lac_language:comparison_of_ranks",
    "planner": "planning.validation:correlations",
    "agreement": "planning.agreement:agreements",
    "worth": "planning.worth:shares",
    "worth.prediction": "planning.worth:prediction",
    "worth.headline": "planning.worth:headline",
    "preference": "planning.preference:accuracies",
    "further.going-on": "planning.further:going_on",
    "further.heads": "planning.further:own_heads",
    "further.votes": "planning.further:votes",
    "synthetic": "planning.synthetic:perplexities",
    "summaries": "lacquer_small.summaries:quality",
    "rl_overhead": "papers.rldp_pretraining:overhead_table",
    "rl_pretraining": "papers.rldp_pretraining:comparison_table",
    "atdp": "papers.atdp.chains:comparison",
    "atdp-frontier": "papers.atdp.curves:exposures",
    "atdp-frontier.differences": "papers.atdp.curves:differences",
    "detectors": "papers.detectors:table",
    "pesgd": "papers.pe_sgd.tables:losses",
    "pesgd.claims": "papers.pe_sgd.tables:claims",
    "pesgd-tuning": "papers.pe_sgd.tables:tuning",
    "pesgd-smollm2": "papers.pe_sgd.tables:losses",
    "pesgd-smollm2.claims": "papers.pe_sgd.tables:claims",
    "pesgd-smollm2-tuning": "papers.pe_sgd.tables:tuning",
    "pesgd-step": "papers.pe_sgd.step:steps",
    "pesgd-step.pairs": "papers.pe_sgd.step:pairs",
    "pesgd-step.smollm2": "papers.pe_sgd.step:pairs_of_smollm2",
    "pesgd-step.varied": "papers.pe_sgd.step:varied",
    "pesgd-sites": "papers.pe_sgd.sites:comparison",
    "pesgd-sites.choices": "papers.pe_sgd.sites:choices",
    "pesgd-rates": "papers.pe_sgd.tables:common",
    "pesgd-rates.claims": "papers.pe_sgd.tables:common_claims",
}
"""Name -> the function of the results that writes the table, by its module below ``simulations.benchmarks``."""

_BLOCK = re.compile(r"<!-- table:(?P<name>[\w.-]+) -->\n(?P<text>.*?)<!-- end table:(?P=name) -->", re.DOTALL)


def block(name: str, results: Path = RESULTS) -> str:
    """The text of one table; a sentence that says so where nothing has been measured yet.

    Raises:
        ValueError: if there is no table of that name.
    """
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; known are {', '.join(sorted(TABLES))}")
    file = results / f"{name.partition('.')[0]}.json"
    if not file.is_file():
        return NOT_MEASURED
    module, _, function = TABLES[name].partition(":")
    write: Callable[[Any], str] = getattr(importlib.import_module(f"simulations.benchmarks.{module}"), function)
    return write(json.loads(file.read_text(encoding="utf-8")))


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
    """The Markdown files at the root, in docs/ and in the packages."""
    folders = ("docs", "privacy", "client", "strategies", "server", "simulations", "docker")
    return sorted([*root.glob("*.md"), *(path for folder in folders for path in (root / folder).rglob("*.md"))])


def main(
    check: Annotated[bool, typer.Option("--check", help="change nothing; fail if a table is stale")] = False,
) -> None:
    """Rewrite the generated tables of all documents."""
    stale = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale += 1
            say(f"{path.relative_to(ROOT)}: {'stale' if check else 'rewritten'}")
            if not check:
                path.write_text(filled, encoding="utf-8")
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
