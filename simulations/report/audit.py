"""The section of a report about an audit. It stands on a page of the auditor's own, never on the run's report."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from simulations.report import plots
from simulations.report.figures import ReportFigure
from simulations.report.notation import delta_text, epsilon_text, number_text, percent_text
from simulations.report.svg import inline_svg


def audit_section(audit: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the content of audit.json for the template."""
    return {
        "warning": audit["not_covered_by_the_guarantee"],
        "verdict": audit["verdict"],
        "bounds": list(_bounds(audit)),
        "levels": [_level(level) for level in audit["membership"]],
        "figure": _figure(audit["membership"]),
        "not_tried": audit["not_tried"],
    }


def _bounds(audit: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    upper = audit["upper_bound"]
    text = "none" if upper is None else f"ε ≤ {epsilon_text(upper['epsilon'])} at δ = {delta_text(upper['delta'])}"
    rows = [("upper bound, by the ledger", text)]
    if canaries := audit["canaries"]:
        noise, presence = canaries["noise"], canaries["presence"]
        rows += [
            (
                f"lower bound by {canaries['canaries']} canaries",
                f"ε ≥ {canaries['epsilon_lower']:.2f} (95 %); {canaries['correct']} of {canaries['guesses']} guesses "
                f"right; it could have shown {canaries['ceiling']:.2f} at most; AUC {_ranged(canaries['auc'])}",
            ),
            ("noise in the releases, over what was charged", _ranged(noise)),
            ("how far a unit moves the releases, over what was charged", _ranged(presence)),
            ("correlation of the noise of successive releases", _ranged(canaries["repeated"])),
        ]
        if estimate := canaries["one_shot"]:
            text = f"ε ≈ {estimate['epsilon_equal_spread']:.2f}; {estimate['epsilon']:.2f} with the spreads as fitted"
            rows.append(("estimate by the sum of the releases, no bound", text))
    if exposed := audit["exposure"]:
        rows.append((f"exposure of {exposed['secrets']} planted secrets", _exposed(exposed)))
    if extracted := audit["extraction"]:
        rows.append((f"extracted of {extracted['secrets']} planted secrets", extraction_text(extracted)))
    for level in audit["membership"]:
        if bound := level["bound"]:
            rows.append(
                (
                    f"lower bound by membership, {level_name(level)}",
                    f"ε ≥ {bound['epsilon_lower']:.2f} (95 %); {bound['correct']} of {bound['guesses']} guesses right "
                    f"by {bound['score']}; it could have shown {bound['ceiling']:.2f} at most",
                )
            )
    return rows


def level_name(level: Mapping[str, Any]) -> str:
    """The name of an attacked level: its units, and whether shadow runs were trained for it."""
    shadows = level.get("shadows")
    return f"{level['level']}s" + (f", {shadows} shadow runs" if shadows else "")


def extraction_text(extracted: Mapping[str, Any]) -> str:
    """Say how many planted secrets come out, beside those of the base model and by luck."""
    said = []
    for name, who in (("adapter", "the adapter"), ("base", "the base model")):
        greedy, sampled, p_value = (extracted[name][key] for key in ("greedy", "sampled", "p_value"))
        said.append(
            f"{greedy['count']} greedily and {sampled['count']} by {extracted['samples']} samples from {who} (95 %: "
            f"{sampled['lower']:.2f} to {sampled['upper']:.2f} of them; p = {p_value:.2g})"
        )
    other = extracted["adapter"]["sampled_never_planted"]
    return (
        f"{'; '.join(said)}; {other['count']} of {extracted['never_planted']} never planted; guessing blindly finds a "
        f"secret with probability {extracted['chance']:.1g}; text in front of the secrets: {extracted['contexts']} kind"
        f"{'s' if extracted['contexts'] > 1 else ', so one can be greedily said'}"
    )


def _exposed(exposed: Mapping[str, Any]) -> str:
    """Say the mean bits under the adapter and the base model. A secret that was never seen has 1.44 in the mean."""
    said = []
    for name, who in (("adapter", "the adapter"), ("base", "the base model")):
        bits = exposed[name]["bits"]
        said.append(f"{sum(bits) / len(bits):.2f} bits under {who} (p = {exposed[name]['p_value']:.2g})")
    return f"{', '.join(said)}, of at most {exposed['most_bits']:.1f}; never seen: 1.44; ranks {exposed['ranks']}"


def _level(level: Mapping[str, Any]) -> dict[str, Any]:
    rates = [percent_text(entry["fpr"]) for entry in level["attacks"][0]["tpr"]]
    counted = f"{number_text(level['members'])} members, {number_text(level['held_out'])} {level['held_out_origin']}"
    rows = [
        {"score": attack["score"], "cells": [_ranged(attack["auc"]), *map(_ranged, attack["tpr"])]}
        for attack in level["attacks"]
    ]
    rows.append({"score": "a model that saw neither", "cells": [_ranged(level["exchangeable"])] + [""] * len(rates)})
    text = f"{counted}. {level['conclusion']}"
    shadows = level.get("shadows")
    name = f"{level['level']}, by {shadows} shadow runs" if shadows else level["level"]
    return {"name": name, "text": text, "rates": rates, "rows": rows}


def _ranged(interval: Mapping[str, float]) -> str:
    return f"{interval['estimate']:.3f} ({interval['lower']:.3f} to {interval['upper']:.3f})"


def _figure(levels: Sequence[Mapping[str, Any]]) -> ReportFigure | None:
    """Draw ROC curves of the last level, which has the most units."""
    if not levels:
        return None
    level = levels[-1]
    title = f"Membership of one {level['level']}"
    meaning = (
        "Share of members found over share of held-out ones taken for members, both on logarithmic scales: what "
        "matters is the left end. The dotted line is chance."
    )
    best = max(attack["auc"]["estimate"] for attack in level["attacks"])

    def draw(axes: Axes, palette: plots.Palette) -> None:
        roc(axes, level["attacks"], palette)

    figure = plots.draw_figure([draw], plots.LIGHT, plots.SIZE)
    description = f"Largest area under a curve: {best:.3f}."
    return ReportFigure("roc", title, meaning, description, inline_svg(figure, "roc", f"{title}. {description}"))


def roc(axes: Axes, attacks: Sequence[Mapping[str, Any]], palette: plots.Palette) -> None:
    """Draw true over false positive rates of attacks, logarithmic."""
    looks = zip(attacks, (palette.first, palette.second, palette.third), ("-", "--", ":"), strict=False)
    for attack, color, dash in looks:
        points = [(x, y) for x, y in attack["curve"] if x > 0 and y > 0]
        axes.plot([x for x, _ in points], [y for _, y in points], color=color, linestyle=dash, label=attack["score"])
    axes.plot([1e-3, 1], [1e-3, 1], color=palette.muted, linestyle=":", linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1))
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(loc="lower right", labelcolor="linecolor")
