"""The data block: every number that was counted is shown, with what it means."""

from server.config.load import parse
from server.run_folder.data_facts import SIMULATED, DataFacts
from simulations.report.data_block import data_rows

FACTS = DataFacts(
    SIMULATED,
    read={"source": 10_100, "test-source": 500},
    left_out={"empty": 40, "short": 2},
    duplicates={"train": 34, "validation": 1},
    not_drawn={"test": 100},
    records={"train": 8000, "validation": 166, "test": 400},
    truncated={"train": 120, "validation": 0, "test": 4},
    clients=1000,
    empty_clients=3,
    sizes=(2, 8.5, 31),
)


def test_every_count_is_told() -> None:
    config = parse({"public": {"warm-start-epochs": 1}})
    assert data_rows(FACTS, config) == [
        ("Read", "10,100 records in data.source, 500 records in data.test-source; left out: 40 empty, 2 short"),
        (
            "Train",
            "8,000 records; 34 dropped, since validation or test has the same text; 120 (1.5\u00a0%) cut at 128 tokens",
        ),
        (
            "Validation",
            "166 records; 1 dropped, since test has the same text; the first 83 warm the model up, the other 83 "
            "validate",
        ),
        ("Test", "400 records; 100 more were not drawn (data.test-limit); 4 (1.0\u00a0%) cut at 128 tokens"),
        ("Clients", "1,000 with 2 to 31, median 8.5 records each; 3 of them have none"),
    ]
