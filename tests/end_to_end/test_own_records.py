"""The settings that docs/data.md gives to a user with a table of their own, on such a table."""

import csv
import re
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "docs" / "data.md"
TINY_MODEL = [*("--set", "model.name=random:bert"), *("--set", "rounds=2"), *("--set", "privacy.delta=1e-3")]


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    section = DATA.read_text(encoding="utf-8").split("## A table\n")[1].split("\n## ")[0]
    path = tmp_path / "my.toml"
    path.write_text(re.findall(r"```toml\n(.*?)```", section, re.DOTALL)[0])
    with (tmp_path / "complaints.csv").open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["complaint", "product", "customer"])
        for row in range(2000):
            product = ("card", "loan")[row % 2]
            rows.writerow([f"The {product} of {row} was charged twice", product, f"customer {row % 200}"])
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_as_it_stands_and_a_wrong_number_of_clients_is_answered_with_the_right_one(lacquer, guide):
    wrong = lacquer("--set", "clients=200", *TINY_MODEL, settings=guide.name)
    assert wrong.finish() == 2
    assert "'customer' names 140 clients after validation and test were held out; set clients = 140" in wrong.stderr()
    assert not (guide.parent / "runs").exists()

    run = lacquer("--engine", "inprocess", "--quiet", *TINY_MODEL, settings=guide.name)
    assert run.finish() == 0, run.stderr()
    assert [line["round"] for line in run.metrics()] == [0, 1, 2]
