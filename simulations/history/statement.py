"""The statement of a run for those who must sign, such as data protection officers: one page, in plain words.

It follows the layers that NIST SP 800-226 (2025) asks about: data, unit, adjacency, trust, mechanism, parameters, what
is not covered. All of it is the verified ledger's, or the words of privacy.json; the name of the data is a setting, and
is said to be one. The risks are upper bounds for every attacker (:mod:`privacy.accountants.attack_rates`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privacy import durable
from privacy.accountants.attack_rates import AttackBound, attack_bound, bound_of_pairs
from privacy.errors import CorruptRun
from server.lineage import together_with_start
from server.run_folder import names
from server.run_folder.provenance import own_version
from server.run_folder.verify import read_object
from simulations.history.statement_pdf import find_fpdf, write_pdf
from simulations.report.audit import level_name
from simulations.report.notation import epsilon_text, percent_text
from simulations.report.outcome import guarantee_sentence, guaranteed_pair, state_text
from simulations.report.read_run import Run, read_run
from simulations.report.tables import facts_rows
from simulations.report.templating import render_template

Json = dict[str, Any]

FALSE_POSITIVE_RATES = (0.01, 0.001)
TIGHT = "They follow from the privacy loss distribution of all releases that the ledger commits to, not from ε."
PAIRS = (
    "No privacy loss distribution is valid here (noise was chosen on the way, candidates were compared, or sites keep "
    "their own ledgers), so they follow from (ε, δ): valid limits, but larger than the truth."
)
FOR_A_LAWYER = (
    "Whether what the run releases counts as personal data or as anonymous under the law that applies.",
    "Whether the records might be used for training at all. The guarantee is about what is released, not about that.",
    "Whether the protected unit is the person whom the law protects, and what follows where it is not.",
    "Whether those who are trusted here may see what they see, and which contracts bind them.",
    "Whether what is not covered needs other safeguards, and whether an impact assessment is due.",
    "How large the risk may be for data this sensitive, together with all other runs on the same data.",
    "Who keeps the run folder, which holds more than may be released, and when it is deleted.",
)
CHANGES = {
    "add_remove": (
        "One unit more or less in the data: whether it is there at all is protected.",
        "was it in the data?",
    ),
    "replace_one": (
        "One unit replaced by another: what it holds is protected, not how many units there are.",
        "was it this one, and not that one?",
    ),
    "zero_out": (
        "All that one unit contributes replaced by zero: that it takes part is seen, and not protected.",
        "did it contribute this, and not nothing?",
    ),
}
"""How neighbouring data sets differ, and what an attacker asks then."""


def write_statement(run_folder: Path, prior: float = 0.5, *, pdf: bool = False) -> tuple[list[Path], Json]:
    """Write the statement of a run into its folder; of an audited run another one, with what was measured.

    Args:
        prior: probability, in (0, 1), that an attacker gives to the unit's being there before anything is released.
        pdf: also write each page as PDF.

    Returns:
        The files, and what they say as plain JSON values.

    Raises:
        ValueError: a bad prior, no run's folder (NoRunFolder), or a run that has committed to nothing.
        CorruptRun: naming a file of the run that is damaged or gone.
        ConfigError: PDF is asked for, and fpdf2 is not installed; nothing is written.
    """
    if pdf:
        find_fpdf()
    if not 0.0 < prior < 1.0:
        raise ValueError(f"--prior must lie between 0 and 1, got {prior:g}; 0.5 says that nothing is known before")
    run = read_run(run_folder)
    said = officer_statement(run, prior)
    pages = [run.path / names.STATEMENT_FILE]
    durable.write(pages[0], _page(run, said))
    if said["risks"] and (measured := _measured(run.path / names.AUDIT_FOLDER / names.AUDIT_FILE)):
        said |= {"audit": measured}
        pages.append(run.path / names.AUDIT_FOLDER / names.STATEMENT_FILE)
        durable.write(pages[1], _page(run, said), mode=0o600)
    if pdf:
        pages += [write_pdf(page) for page in list(pages)]
    return pages, said


def officer_statement(run: Run, prior: float) -> Json:
    """What the statement of a run says, as plain JSON values; risks are None where nothing is guaranteed.

    Raises:
        ValueError: the run has committed to nothing, so there is nothing to state.
    """
    if run.guarantee is None and run.not_private is None:
        raise ValueError(
            f"{run.path} has committed to no privacy budget, so nothing can be stated; a run does when it first reads "
            "private records: give the folder of such a run"
        )
    guarantee, bound = run.guarantee or {}, _bound(run)
    return {
        "sentence": guarantee_sentence(run),
        "not_private": run.not_private,
        "risks": None if bound is None else _risks(bound, prior),
        "layers": _layers(run, guarantee),
        "not_covered": [] if bound is None else list(guarantee.get("not_covered", [])),
        "for_a_lawyer": list(FOR_A_LAWYER),
        "ledger_head": guarantee.get("ledger", {}).get("head"),
    }


def _bound(run: Run) -> AttackBound | None:
    pair = guaranteed_pair(run)
    if pair is None:
        return None
    if (whole := together_with_start(run.guarantee or {})) is not None:  # what it releases holds what its start does
        return bound_of_pairs([whole])
    return bound_of_pairs([pair]) if run.account is None else attack_bound(run.account.commitment)


def _risks(bound: AttackBound, prior: float) -> Json:
    rates = [
        {
            "false_positive_rate": fpr,
            "true_positive_rate": bound.true_positive_rate(fpr),
            "posterior": bound.posterior(prior, fpr),
        }
        for fpr in FALSE_POSITIVE_RATES
    ]
    return {"tight": bound.tight, "prior": prior, "advantage": bound.advantage, "rates": rates}


def _layers(run: Run, guarantee: Json) -> dict[str, str]:
    """What the ledger says of each layer, and what the settings call the data; without a guarantee the first two."""
    if not guarantee.get("unit"):
        return {}
    facts, pair = dict(facts_rows(guarantee)), guaranteed_pair(run)
    unit, sites = _unit(guarantee), guarantee.get("silos", {}).values()
    held = f"{facts.get('Population')} {unit}s, a number that is taken as public"
    if sites:
        held = f"{len(sites)} sites, of {', '.join(format(site['population'], ',') for site in sites)} {unit}s"
    source = "" if run.config is None or run.config.is_deployed else run.config.data.source
    called = f" The settings, not the ledger, call the data {source}." if source else ""
    rows = {"Data": f"{held}.{called}", "Unit": f"One {unit}: all that it holds in these data."}
    if pair is None:
        return rows
    counted = ", ".join(f"{count:,} {what}" for what, count in guarantee.get("rounds", {}).items())
    noise = [f"{key}: {facts[key]}" for key in ("Sampling", "Noise multiplier") if key in facts]
    accountant = f", by {facts['Accountant']}" if "Accountant" in facts else ""
    return {
        **rows,
        "Adjacency": CHANGES[str(guarantee["adjacency"])][0],
        "Trust": _sentences(facts["Trust"]),
        "Mechanism": _sentences(facts["Mechanism"], *noise, *([f"Releases: {counted}"] if counted else [])),
        "Parameters": f"ε at most {epsilon_text(pair[0])} at δ = {facts['δ']}{accountant}.",
    }


def _sentences(*texts: str) -> str:
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)


def _unit(guarantee: Mapping[str, Any]) -> str:
    return str(guarantee.get("unit") or "unit").removeprefix("group:")


def _measured(path: Path) -> Json | None:
    """What attacks on the run reached at the same false positive rates, the best of each level; None without an audit.

    Raises:
        CorruptRun: the file is not what an audit writes.
    """
    found = read_object(path)
    if found is None:
        return None
    try:
        rows = [
            {"level": level_name(level), "rates": [_best(level, fpr) for fpr in FALSE_POSITIVE_RATES]}
            for level in found["membership"]
        ]
        return {"warning": found["not_covered_by_the_guarantee"], "verdict": found["verdict"], "levels": rows}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRun(f"{path} is not what an audit writes ({error!r}); audit the run anew") from error


def _best(level: Json, fpr: float) -> Json | None:
    """The attack of most success at a false positive rate, with its interval."""
    at = [entry for attack in level["attacks"] for entry in attack["tpr"] if entry["fpr"] == fpr]
    return max(at, key=lambda entry: float(entry["estimate"]), default=None)


def _page(run: Run, said: Json) -> str:
    risks, audit = said["risks"], said.get("audit")
    rates, guarantee = risks["rates"] if risks else [], run.guarantee or {}
    return render_template(
        names.STATEMENT_FILE,
        **{"audit": None, **said},
        name=run.name,
        state=run.state,
        state_text=state_text(run),
        version=own_version(),
        unit=_unit(guarantee),
        question=CHANGES[str(guarantee["adjacency"])][1] if risks else "",
        prior=percent_text(risks["prior"]) if risks else "",
        how=(TIGHT if risks["tight"] else PAIRS) if risks else "",
        heads=[percent_text(rate["false_positive_rate"]) for rate in rates],
        reached=[_upward(rate["true_positive_rate"]) for rate in rates],
        posterior=[_upward(rate["posterior"]) for rate in rates],
        advantage=_upward(risks["advantage"]) if risks else "",
        measured=[(level["level"], map(_ranged, level["rates"])) for level in audit["levels"]] if audit else [],
    )


def _upward(share: float) -> str:
    """A share in per cent, rounded up: a limit must not shrink in print."""
    return f"{epsilon_text(100.0 * share)}\u00a0%"


def _ranged(rate: Json | None) -> str:
    if rate is None:
        return "not measured"
    return f"{percent_text(rate['estimate'])} ({percent_text(rate['lower'])} to {percent_text(rate['upper'])})"
