"""A sweep's file becomes cells, in order, with everything wrong named before anything runs."""

import inspect
import re
from pathlib import Path

import pytest

from server.config.load import ConfigError
from simulations.cli import sweep
from simulations.presets.load import named_file
from simulations.sweep.cells import Cell, choose_cells, digest, read_cells, sweep_files

BASE = """
clients = 50
sampling-rate = 0.2
[privacy]
delta = 1e-3
[data]
source = "csv:set/train.csv"
"""
SWEEP = """
name = "small"
[settings]
rounds = 7
[variants.fixed]
strategy.controller = "fixed"
strategy.controller-options.clip-norm = 2.0
[variants.lac]
strategy.controller = "dp-lac"
[variants.floor]
kind = "public-only"
public.warm-start-epochs = 2
[[grids]]
name = "first"
base = "base.toml"
variants = ["fixed", "lac"]
seeds = [0, 3]
axes = { "privacy.epsilon" = [2.0, 8.0] }
[[grids]]
name = "second"
base = "base.toml"
variants = ["floor"]
seeds = [1]
settings = { rounds = 9 }
"""


@pytest.fixture
def read(tmp_path: Path):
    (tmp_path / "base.toml").write_text(BASE)

    def make(text: str = SWEEP) -> list[Cell]:
        (tmp_path / "small.toml").write_text(text)
        return read_cells(tmp_path / "small.toml", tmp_path / "data")[1]

    return make


def test_cells_are_variants_times_axes_seed_by_seed(read, tmp_path: Path) -> None:
    cells = read()
    assert [cell.key for cell in cells] == [
        *(
            f"first/{variant}/epsilon={epsilon}/seed={seed}"
            for seed in (0, 3)
            for epsilon in (2, 8)
            for variant in ("fixed", "lac")
        ),
        "second/floor/seed=1",
    ]
    first, floor = cells[0].config, cells[-1]
    assert (first.rounds, first.clients, first.seed, first.privacy.epsilon) == (7, 50, 0, 2.0)
    assert first.strategy.controller_options == {"clip-norm": 2.0}
    assert cells[1].config.strategy.controller_options == {}, "nothing of another variant stays"
    assert first.data.source == f"csv:{tmp_path}/data/set/train.csv"
    assert (first.engine.kind, first.engine.workers) == ("inprocess", 1)
    assert (floor.kind, floor.config.rounds, floor.config.public.warm_start_epochs) == ("public-only", 9, 2)


def test_a_digest_is_of_what_decides_the_outcome_and_not_of_where_it_runs(read, tmp_path: Path) -> None:
    cell = read()[0]
    moved = read_cells(tmp_path / "small.toml", tmp_path / "elsewhere")[1][0]
    assert moved.config != cell.config
    assert moved.digest == cell.digest
    assert len({one.digest for one in read()}) == 9
    assert digest(cell.config, "public-only") != cell.digest
    here, there, other = (
        cell.config.replace(model=cell.config.model.replace(name=name)) for name in ("/a/m", "/b/m", "/a/n")
    )
    assert digest(here, "run") == digest(there, "run") != digest(other, "run")
    longer = cell.config.model_copy(update={"rounds": 8})
    assert digest(longer, "run") != cell.digest


def test_only_picks_cells_and_refuses_a_pattern_for_none(read) -> None:
    cells = read()
    assert [cell.key for cell in choose_cells(cells, ["second", "first/lac/*/seed=3"])] == [
        "first/lac/epsilon=2/seed=3",
        "first/lac/epsilon=8/seed=3",
        "second/floor/seed=1",
    ]
    assert choose_cells(cells, []) == cells
    with pytest.raises(ConfigError, match="--only third: matches no cell"):
        choose_cells(cells, ["third"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('variants = ["fixed", "lac"]', 'variants = ["fixd"]', "did you mean fixed?"),
        ('kind = "public-only"', 'kind = "public"', "variants.floor.kind = 'public'"),
        ("seeds = [0, 3]", "seeds = []", "grids.0.seeds"),
        ("rounds = 7", "roundz = 7", "did you mean rounds?"),
        ('name = "second"', 'name = "first"\naxes.x = [1]', "x: unknown key"),
        ('base = "base.toml"', 'base = "bas"', "no preset is called 'bas'"),
        ("[[grids]]", "[grids", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(read, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(SWEEP.replace(old, new, 1))
    assert message in str(refused.value)


def test_the_example_in_the_help_picks_cells(tmp_path: Path) -> None:
    (example,) = re.findall(r"such as '([^']+)'", inspect.getsource(sweep))
    assert choose_cells(read_cells(named_file("controllers", sweep_files(), "sweep"), tmp_path)[1], [example])


@pytest.mark.parametrize("name", sorted(sweep_files()))
def test_every_sweep_that_comes_with_lacquer_parses_with_its_methods(name: str, tmp_path: Path) -> None:
    from server.config.methods import methods

    _, cells = read_cells(named_file(name, sweep_files(), "sweep"), tmp_path)
    for cell in cells:
        methods(cell.config)
        named = cell.config.data.partition == "natural" and cell.config.clients == 0
        sites = cell.kind == "site" or cell.config.several_sites
        assert sites or named or cell.config.clients in (250, 1000, 4000, 5000, 10_000, 15_000, 40_000)
        assert cell.config.privacy.delta == 1e-5


def test_an_unknown_sweep_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="did you mean controllers"):
        named_file("controler", sweep_files(), "sweep")
