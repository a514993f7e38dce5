"""What a run's folder tells of its data: of a simulation's own files all but real clients' sizes, else public parts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from privacy.errors import CorruptRun
from server.config.load import parse
from server.run_folder.data_facts import PUBLIC, SIMULATED, DataFacts, may_be_shown, read_facts

FACTS = DataFacts(
    SIMULATED,
    read={"source": 100},
    left_out={"empty": 7},
    duplicates={"train": 3},
    not_drawn={},
    records={"train": 70, "validation": 10, "test": 10},
    truncated={"train": 5, "validation": 1, "test": 0},
    clients=20,
    empty_clients=1,
    sizes=(1, 3.0, 11),
)
PARTS = DataFacts(PUBLIC, {}, {}, {}, {}, {"validation": 10, "test": 10}, {"validation": 1, "test": 0})
RECORDS = {"unit": "record", "delta": 1e-3}


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ({}, FACTS),  # generated
        ({"data": {"source": "csv:a.csv"}}, FACTS),  # clients that the simulation deals
        (
            {"data": {"source": "csv:a.csv", "partition": "natural", "client-column": "user"}},
            replace(FACTS, sizes=None, empty_clients=None),
        ),
        ({"data": {"source": "csv:a.csv", "held-by": "nodes", "partition": "iid"}}, PARTS),
        ({"data": {"source": "csv:a.csv"}, "clients": 1, "sampling-rate": 1.0, "privacy": RECORDS}, PARTS),
        ({"clients": 1, "sampling-rate": 1.0, "privacy": RECORDS}, FACTS),
    ],
)
def test_no_count_of_real_clients_or_of_protected_records_is_written(
    table: dict[str, object], shown: DataFacts
) -> None:
    assert may_be_shown(parse(table), FACTS) == shown


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert read_facts(tmp_path) is None
    (tmp_path / "records.json").write_text(json.dumps({"note": "x"}))
    with pytest.raises(CorruptRun, match=r"records\.json holds no facts"):
        read_facts(tmp_path)
