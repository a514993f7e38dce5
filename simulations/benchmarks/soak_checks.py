"""What must hold of a run folder after all faults: ledger, lines, adapter, memory."""

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from privacy import accountants
from privacy.ledger import Ledger
from server.artefacts import PRIVACY_FILE
from server.resumed import read_resumed
from server.telemetry import read_metrics, read_status


def memory(folder: Path) -> dict[str, Any]:
    """Resident memory by round of the longest life, in MB, and how it grew once it had warmed up (its second half)."""
    lines = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    longest = Counter(line["life"] for line in lines).most_common(1)[0][0]
    rss = [line["rss"] / 2**20 for line in lines if line["life"] == longest]
    late = rss[len(rss) // 2 :]
    growth = statistics.linear_regression(range(len(late)), late).slope if len(late) > 1 else 0.0
    return {
        "rss_rounds": len(rss),
        "rss_first_mb": round(rss[0], 1),
        "rss_middle_mb": round(late[0], 1),
        "rss_last_mb": round(rss[-1], 1),
        "rss_growth_mb_per_100_rounds": round(100 * growth, 2),
        "rss_by_round_mb": [round(value, 1) for value in rss[:: max(1, len(rss) // 40)]],
    }


def account(folder: Path) -> dict[str, Any]:
    """Hold the folder's files against each other; AssertionError if they do not agree."""
    import torch
    from peft import PeftModel

    from client.models import load_base

    metrics = read_metrics(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(metrics), "a line of metrics.jsonl is doubled"
    assert [record.round for record in metrics] == list(range(len(metrics))), "a round is missing from metrics.jsonl"
    statement = json.loads((folder / PRIVACY_FILE).read_text())
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        charges, stated, guaranteed = ledger.charges, ledger.spent(), ledger.guaranteed()
        delta = ledger.commitment.delta
    released = {(charge.event.label, charge.event.round) for charge in charges if charge.released_at is not None}
    missing = [record.round for record in metrics if (record.phase, record.round) not in released]
    assert missing == [], "a round was released that the ledger does not know"
    recomputed = accountants.epsilon([charge.event for charge in charges], delta, "pld")
    of_the_recorded = accountants.epsilon(_once([charge.event for charge in charges]), delta, "pld")
    assert recomputed <= stated * (1 + 1e-6), "the ledger states less than its charges cost"
    assert stated <= guaranteed <= statement["epsilon"] + 1e-9, "more was spent than was promised"
    model, _ = load_base("random:bert", "classification", 2)
    adapted = PeftModel.from_pretrained(model, folder / "adapter")
    weights = [value for name, value in adapted.state_dict().items() if "lora_B" in name]
    assert weights, "the adapter holds nothing"
    assert all(bool(torch.isfinite(value).all()) for value in weights)
    status = read_status(folder)
    return {
        "state": status.state if status else "unknown",
        "rounds_released": metrics[-1].round,
        "charges": len(charges),
        "charged_and_lost": len(charges) - len(metrics),
        "lost_rounds_in_the_ledger": len(missing),
        "resumes": len(read_resumed(folder)),
        "epsilon_stated": stated,
        "epsilon_of_all_charges": recomputed,
        "epsilon_of_the_rounds_kept": of_the_recorded,
        "epsilon_guaranteed": guaranteed,
        "adapter_loads": True,
    }


def _once(events: list[Any]) -> list[Any]:
    """One event of every round: what a ledger would count that forgets the releases that were lost."""
    return list({(event.label, event.round): event for event in events}.values())
