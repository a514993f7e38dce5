"""Whether a run of nodes with many clients, in containers and without noise, is the simulation of it. Not a test.

    python -m tests.docker.same_as_simulation FOLDER RECORDS

docker/organisations_test.sh calls it: ``FOLDER/run`` is the run, ``FOLDER/own-NODE/state`` what each node kept of it
(the secret that draws its cohorts, the seed of its clients' local randomness), ``RECORDS/NODE/records.jsonl`` its
records. What was compared is written to ``simulations/benchmarks/results/organisations.json``.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from server.config.load import load
from server.run_folder.telemetry import read_metrics
from simulations.benchmarks.harness.results import origin, write
from tests.cases.many_clients import adapter, charges, drawn, kept, roster_of, simulated


def main(folder: Path, records: Path) -> None:
    """AssertionError unless the adapters are the same, bit by bit."""
    run, names = folder / "run", sorted(path.name for path in records.iterdir())
    config, nodes = load(run / "config.toml"), kept(folder, names)
    numbers = [one.clients for one in nodes]
    assert sorted(roster_of(run)["clients"]) == sorted(numbers)
    assert sum(numbers) == config.clients
    rounds = [record for record in read_metrics(run) if record.phase == "round"]
    assert len(rounds) == charges(run) == config.rounds
    assert all(record.not_private for record in rounds)
    rows = [
        [json.loads(line) for line in (records / name / "records.jsonl").read_text().splitlines()] for name in names
    ]
    with pytest.MonkeyPatch.context() as patch:
        same = simulated(folder, config, rows, nodes, patch)
    ours, theirs = adapter(run), adapter(same)
    assert ours.keys() == theirs.keys()
    values = sum(value.numel() for value in ours.values())
    different = sum(int((ours[name] != theirs[name]).sum()) for name in ours)
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    assert not different, f"{different} of {values} values differ, by at most {largest:g}"
    moved = sum(int(values.count_nonzero()) for name, values in ours.items() if "lora_B" in name)
    assert moved > 0
    cohorts = [len(drawn(nodes, round, config.sampling_rate)) for round in range(1, config.rounds + 1)]
    write(
        "organisations",
        {
            "rounds": len(rounds),
            "clients_of_nodes": numbers,
            "smallest_cohort": min(cohorts),
            "largest_cohort": max(cohorts),
            "values_compared": values,
            "values_different": different,
            "values_of_lora_B_not_zero": moved,
            **origin(),
            "load": round(os.getloadavg()[2], 1),
        },
    )
    sys.stdout.write(
        f"{len(rounds)} rounds over nodes of {numbers} clients, {min(cohorts)} to {max(cohorts)} of them in a round: "
        f"all {values} values of the adapter ({moved} of lora_B are not 0) are those of the simulation\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
