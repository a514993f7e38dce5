"""``lacquer audit``: attack a finished run, and hold what is found against its ledger."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from simulations.cli.exits import refusals, say
from simulations.cli.progress import say_working


def audit_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    records: Annotated[
        int, typer.Option(min=40, help="Most records of members, and of held-out ones, that are attacked.")
    ] = 1000,
    shadows: Annotated[
        int, typer.Option(min=0, help="Shadow runs, an even number: each takes as long as the run did.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="audit.json on standard output.")] = False,
) -> None:
    """Attack a finished run: who was trained on? Lower bounds on epsilon beside the ledger's upper bound.

    It reads the private records, so what it finds is not covered by the guarantee and stays in RUN/audit.
    """
    with refusals(ValueError):
        from server.evaluation.finished import read_finished

        with say_working("reading the run"):
            run = read_finished(run_folder)
            from simulations.audit.findings import audit_run, write_findings
            from simulations.audit.shadows import refuse_shadows, shadow_cost

        if shadows:
            refuse_shadows(run, shadows)
            say(shadow_cost(run, shadows), style="yellow")
        with say_working("attacking the run"):
            found = audit_run(run, records, shadows)
            folder = write_findings(run_folder, found)
    say(found["not_covered_by_the_guarantee"], style="yellow")
    typer.echo(json.dumps(found, indent=1) if as_json else f"{_table(found)}\naudit: {folder}")


def _table(found: Mapping[str, Any]) -> str:
    """The findings for a person."""
    from simulations.report.audit import extraction_text, level_name  # it loads what draws figures

    lines = []
    if canaries := found["canaries"]:
        noise, presence, auc = canaries["noise"], canaries["presence"], canaries["auc"]["estimate"]
        lines += [
            f"canaries: {canaries['included']} of {canaries['canaries']} in",
            f"  epsilon >= {canaries['epsilon_lower']:.2f} (95 %), {canaries['correct']} of {canaries['guesses']} "
            f"guesses right; at most {canaries['ceiling']:.2f} could have been shown; AUC {auc:.3f}",
            f"  noise {noise['estimate']:.3f} times what was charged, at most {noise['upper']:.3f} (99.9 %); a unit "
            f"moves the releases {presence['estimate']:.2f} times as far as charged, at least {presence['lower']:.2f}",
        ]
    if exposed := found["exposure"]:
        bits, p_value = {who: mean(exposed[who]["bits"]) for who in ("adapter", "base")}, exposed["adapter"]["p_value"]
        lines.append(
            f"secrets: {exposed['secrets']} in {exposed['copies']} copies, exposure {bits['adapter']:.2f} bits (base "
            f"model {bits['base']:.2f}, never seen 1.44), ranks {exposed['ranks']}, p = {p_value:.2g}"
        )
    if extracted := found["extraction"]:
        lines.append(f"extracted: {extraction_text(extracted)}")
    for level in found["membership"]:
        lines.append(f"{level_name(level)}: {level['members']} members, {level['held_out']} {level['held_out_origin']}")
        for attack in [*level["attacks"], {"score": "a model that saw neither", "auc": level["exchangeable"]}]:
            auc = attack["auc"]
            row = f"  {attack['score']:32}AUC {auc['estimate']:.3f} ({auc['lower']:.3f} to {auc['upper']:.3f})"
            for at in attack.get("tpr", ()):
                row += f"  TPR at {at['fpr']:g} FPR {at['estimate']:.3f} ({at['lower']:.3f} to {at['upper']:.3f})"
            lines.append(row)
        lines.append(f"  {level['conclusion']}")
        if bound := level["bound"]:
            lines.append(
                f"  epsilon >= {bound['epsilon_lower']:.2f} (95 %), {bound['correct']} of {bound['guesses']} guesses "
                f"right; at most {bound['ceiling']:.2f} could have been shown"
            )
    return "\n".join([*lines, found["verdict"], f"Not tried: {'; '.join(found['not_tried'])}."])
