"""Methods of a user's own, all three kinds, beside their work: both engines find them, and say so where they cannot."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/strategy.md"

MORE = """
from dataclasses import dataclass

from strategies.aggregations.factors import Plain
from strategies.optimizers.fedavg import FedAvg


@dataclass(frozen=True)
class MyOptimizer(FedAvg):
    pass


@dataclass(frozen=True)
class MyAggregation(Plain):
    pass
"""

OWN = [
    *("--set", "strategy.controller=my_methods:HalveWhenQuiet"),
    *("--set", "strategy.controller-options.patience=1"),
    *("--set", "strategy.optimizer=more.mine:MyOptimizer"),
    *("--set", "strategy.aggregation=more.mine:MyAggregation"),
]


@pytest.fixture
def own(tmp_path: Path) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    (tmp_path / "my_methods.py").write_text(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0])
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.py").write_text(MORE)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", [pytest.param("inprocess", marks=pytest.mark.nightly), "flower"])
def test_both_engines_find_a_users_methods(lacquer, own, engine):
    run = lacquer(*OWN, "--engine", engine, "--quiet")
    assert run.finish() == 0, run.stderr()
    assert [line["clip_bound"] for line in run.metrics()] == [1.0, 0.5]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_found_is_refused_before_anything_starts(lacquer, own, tmp_path):
    run = lacquer("--set", "strategy.controller=my_methods:HalveWhenQuit", "--set", "strategy.optimizer=mine:Mine")
    assert run.finish() == 2
    assert "my_methods has no 'HalveWhenQuit'; did you mean HalveWhenQuiet?" in run.stderr()
    assert "No module named 'mine'; run from the folder that holds it" in run.stderr()
    assert not (tmp_path / "runs").exists()
