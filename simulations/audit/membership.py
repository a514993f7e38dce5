"""Membership inference on a finished run: losses of members and of held-out units, alone and against a reference.

Scores of a unit, larger meaning "member": minus its mean loss under the released adapter; and the reference's loss
minus that (calibration by difficulty: Watson et al., "On the importance of difficulty calibration in membership
inference attacks", arXiv:2111.08440). What is made of them: :mod:`privacy.audit.membership`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client.data.prepared import PreparedData
from privacy.audit.membership import Attack, attack, exchangeability, membership_bound
from privacy.audit.roc import Interval
from server.evaluation.finished import FinishedRun
from simulations.audit.losses import adapter_losses, reference_losses
from simulations.audit.units import Units

Floats = NDArray[np.float64]

STEPS = {"add_remove": 2, "zero_out": 2, "replace_one": 1}
"""Neighbours that lie between two data sets of which one has another unit in the place of one."""


def membership(run: FinishedRun, data: PreparedData, levels: Sequence[Units]) -> list[dict[str, Any]]:
    """Run the attacks on membership, for the protected units and for single records.

    Args:
        levels: of :func:`simulations.audit.units.audited_units`.
    """
    rows = [np.unique(np.concatenate([level.rows[side] for level in levels])) for side in (0, 1)]
    sets = [data.train.select(rows[0]), data.test.select(rows[1])]

    def by_row(losses: list[Floats]) -> list[dict[int, float]]:
        return [dict(zip(map(int, of), found, strict=True)) for of, found in zip(rows, losses, strict=True)]

    under, before = by_row(adapter_losses(run, sets)), by_row(reference_losses(run, data, sets))
    found = []
    for level in levels:
        adapter, reference = _means(level, under), _means(level, before)
        scores = {
            "loss": (-adapter[0], -adapter[1]),
            "loss against the public start": (reference[0] - adapter[0], reference[1] - adapter[1]),
        }
        found.append(attack_level(run, level, scores, reference))
    return found


def attack_level(
    run: FinishedRun, level: Units, scores: Mapping[str, tuple[Floats, Floats]], reference: tuple[Floats, Floats]
) -> dict[str, Any]:
    """Judge what scores of some units, members and others, say about the run.

    Args:
        reference: losses of the units under a model that saw none of them.
    """
    check = exchangeability(-reference[0], -reference[1])
    found: dict[str, Any] = {
        "level": level.level,
        "protected_unit": level.protected,
        "members": len(level.members),
        "held_out": len(level.others),
        "held_out_origin": level.origin,
        "exchangeable": {**_interval(check.auc), "ks_p_value": check.p_value, "holds": check.holds},
        "attacks": [_attack(name, attack(*pair)) for name, pair in scores.items()],
        "bound": None,
    }
    if level.protected and check.holds and run.statement.get("not_private") is None:
        steps = STEPS[str(run.statement.get("adjacency", "add_remove"))]
        bound = membership_bound(scores, delta=float(run.config.privacy.delta), steps=steps)
        found["bound"] = None if bound is None else asdict(bound)
    return {**found, "conclusion": conclusion(found)}


def conclusion(found: Mapping[str, Any]) -> str:
    """Say in words what may be concluded of one level."""
    check = found["exchangeable"]
    if not check["holds"]:
        return (
            f"No conclusion. A model that saw none of the {found['level']}s tells members from held-out ones (AUC "
            f"{check['estimate']:.3f}, 99 % interval {check['lower']:.3f} to {check['upper']:.3f}, Kolmogorov-Smirnov "
            f"p = {check['ks_p_value']:.2g}), so they differ in themselves and an attack on the run would show that "
            "difference. Test on records of the same source, drawn at random."
        )
    chance = [a for a in found["attacks"] if a["auc"]["lower"] <= 0.5 <= a["auc"]["upper"]]
    if len(chance) == len(found["attacks"]):
        return "No attack tells members from held-out ones better than chance."
    best = max(found["attacks"], key=lambda a: a["auc"]["lower"])
    if best["auc"]["lower"] <= 0.5:
        return "An attack is worse than chance, which no attacker would use; look whether members and others are alike."
    return f"An attack beats chance: {best['score']}, AUC {best['auc']['estimate']:.3f}."


def _means(level: Units, losses: Sequence[Mapping[int, float]]) -> tuple[Floats, Floats]:
    """The mean loss of every member and of every other."""
    sides = zip((level.members, level.others), losses, strict=True)
    inside, outside = (np.array([np.mean([of[int(row)] for row in rows]) for rows in units]) for units, of in sides)
    return inside, outside


def _interval(interval: Interval) -> dict[str, float]:
    return asdict(interval)


def _attack(name: str, found: Attack) -> dict[str, Any]:
    return {
        "score": name,
        "auc": _interval(found.auc),
        "tpr": [{"fpr": fpr, **_interval(interval)} for fpr, interval in found.tpr.items()],
        "curve": [list(point) for point in found.curve],
    }
