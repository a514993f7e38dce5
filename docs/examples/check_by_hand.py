"""Checks the ledger in the current run folder, without Lacquer; docs/guarantee.md says what it shows."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

# The ledger is whole.
previous, lines = "0" * 64, []
for text in Path("ledger.jsonl").read_text().splitlines():
    line = json.loads(text)
    digest = line.pop("hash")
    content = json.dumps(line, sort_keys=True, separators=(",", ":"))
    assert line["previous"] == previous
    assert hashlib.sha256(content.encode()).hexdigest() == digest
    previous = digest
    lines.append(line)
statement = json.loads(Path("privacy.json").read_text())
assert statement["ledger"]["head"] == f"{len(lines)}:{previous}"
commitment = lines[0]["body"]["commitment"]

# No release exceeded the commitment (floor mode).
used: Counter[int] = Counter()
for line in lines:
    if line["kind"] == "charge":
        event, step = line["body"]["event"], commitment["floor"][line["body"]["step"]]
        z = 1 / math.hypot(*(part["sensitivity"] / part["noise_std"] for part in event["components"]))
        assert z >= step["noise_multiplier"] * (1 - 1e-9)
        assert event["sampling"]["rate"] <= step["sampling"]["rate"]
        used[line["body"]["step"]] += 1
assert all(used[number] <= step["count"] for number, step in enumerate(commitment["floor"]))
assert not any(line["kind"] == "not-private" for line in lines)
assert commitment["not_private"] is None

# Another accountant prices the commitment.
accountant = PLDAccountant(value_discretization_interval=1e-3)
for step in commitment["floor"]:
    release = PoissonSampledDpEvent(step["sampling"]["rate"], GaussianDpEvent(step["noise_multiplier"]))
    accountant.compose(release, step["count"])
epsilon, delta = accountant.get_epsilon(commitment["delta"]), commitment["delta"]
print(f"epsilon {epsilon:.4f} at delta {delta:g}; stated {statement['epsilon']}, committed {commitment['epsilon']}")
