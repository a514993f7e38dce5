"""Cells of a sweep whose base is one site; the command's own road for bad input."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.record_level.calibration import commit
from server.config.load import flatten
from server.runs.record_level_assembly import record_level_settings
from simulations.benchmarks.papers.diabetes import NAMES
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from simulations.presets.asked import ask
from simulations.sweep.cells import CELL_FILE, SWEEPS, read_cells
from simulations.sweep.rows import row

BASE = """
rounds = 2
clients = 1
sampling-rate = 1.0
[privacy]
unit = "group"
delta = 1e-3
[strategy]
controller = "fixed"
optimizer = "fedadam"
[model]
name = "random:llama"
task = "causal-lm"
rank = 2
targets = "q_proj"
max-length = 32
[data]
source = "jsonl:visits.jsonl"
unit-column = "patient"
partition = "iid"
validation-records = 6
test-records = 6
cache = "CACHE"
[site]
batch-size = 5
"""
SWEEP = """
name = "tiny"
[variants.fixed]
[variants.psac]
strategy.controller = "psac"
[[grids]]
name = "g"
base = "base.toml"
variants = ["fixed", "psac"]
seeds = [0]
axes = { "privacy.epsilon" = [2.0] }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE.replace("CACHE", str(tmp_path / "cache")))
    (tmp_path / "tiny.toml").write_text(SWEEP)
    visits = [{"text": f"Visit {i} of patient {i % 20}, code {i % 7}.", "patient": str(i % 20)} for i in range(60)]
    (tmp_path / "visits.jsonl").write_text("\n".join(map(json.dumps, visits)))
    return tmp_path


def test_a_site_cell_is_run_and_measured_by_perplexity(folder: Path) -> None:
    _, cells = read_cells(folder / "tiny.toml", folder)
    assert [cell.kind for cell in cells] == ["site", "site"]
    assert cells[0].digest != cells[1].digest
    place = folder / "run"
    place.mkdir()
    (place / "config.toml").write_text(cells[0].config.to_toml())
    (place / CELL_FILE).write_text("{}")
    run_inprocess(cells[0].config, place)
    entry = row(cells[0], place)
    assert entry["unit"] == "group:patient"
    assert 1 < entry["test_perplexity"] < 400
    assert entry["expected_cohort"] == 5
    assert [step for step, _ in entry["curve"]] == [1, 2]
    assert entry["epsilon_stated"] <= 2.0
    assert entry["kind"] == "site"


@pytest.mark.parametrize("name", ["records-diabetes", "records-diabetes-paper"])
def test_the_sweep_of_the_records_is_sound_as_far_as_can_be_told_without_the_data(name: str) -> None:
    found, cells = read_cells(SWEEPS / f"{name}.toml", Path("/nowhere"))
    assert found == name
    assert {cell.kind for cell in cells} == {"site"}
    assert {cell.config.seed for cell in cells if "tuning" not in cell.grid} == {0, 1, 2}
    assert {cell.config.seed for cell in cells if "tuning" in cell.grid} == {100}
    epsilons = {(cell.variant, cell.config.privacy.epsilon) for cell in cells if "epsilon" in cell.grid}
    assert {epsilon for variant, epsilon in epsilons if variant == "rldp"} == {0.5, 2.0, 4.0, 8.0}
    assert {variant for variant, epsilon in epsilons if epsilon == 2} == set(NAMES)
    # every method reads the same validation records, and RLDP in every step
    assert len({cell.config.data.validation_records for cell in cells}) == 1
    assert {cell.config.evaluation.every == 1 for cell in cells if cell.variant == "rldp"} == {True}
    assert max(cell.config.data.validation_records for cell in cells) <= 100


def test_the_sweep_at_the_paper_s_scale_has_the_same_methods() -> None:
    """No sweep's file takes variants from another, so they stand in both; rates and thresholds are tuned for each."""
    small, paper = (
        tomllib.loads((SWEEPS / f"records-diabetes{scale}.toml").read_text())["variants"] for scale in ("", "-paper")
    )

    def untuned(variants: dict) -> dict:
        tuned = ("strategy.controller-options.clip-norm", "strategy.optimizer-options.learning-rate")
        return {
            name: {key: value for key, value in flatten(variant).items() if key not in tuned}
            for name, variant in variants.items()
        }

    assert untuned(small) == untuned(paper)
    _, cells = read_cells(SWEEPS / "records-diabetes-paper.toml", Path("/nowhere"))
    assert {(cell.config.model.name, cell.config.rounds, cell.config.data.train_records) for cell in cells} == {
        ("gpt2", 3434, 0)
    }


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:delta = 1e-05 is above")  # the paper's
def test_every_method_of_the_paper_s_scale_is_calibrated_at_every_epsilon() -> None:
    """73,271 encounters of the part, less those for validation: the noise of the accounting in the docs."""
    _, cells = read_cells(SWEEPS / "records-diabetes-paper.toml", Path("/nowhere"))
    distinct = {(cell.variant, cell.config.privacy.epsilon): cell.config for cell in cells}
    assert len(distinct) == len(NAMES) + 3 * 3
    expected = {0.5: 0.7648, 2.0: 0.5805, 4.0: 0.4924, 8.0: 0.4085}
    for (_, epsilon), config in distinct.items():
        least = min(commit(record_level_settings(config, config.rounds), 73_171)[1])
        assert least == pytest.approx(expected[epsilon], abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "BASE", "--set", "site.batch-size=1000"], "batch_size must be <= the number of units"),
        (["run", "BASE", "--set", "data.unit-column=doctor"], "doctor"),
        (
            ["run", "BASE", "--set", "data.detector=high-entitty"],
            "detector = 'high-entitty': unknown; there are regex",
        ),
        (["run", "BASE", "--workers", "2"], "leave out --engine and --workers"),
    ],
)
def test_the_command_refuses_what_cannot_be_a_site(folder: Path, monkeypatch, arguments, reason) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [argument.replace("BASE", "base.toml") for argument in arguments])
    assert result.exit_code == 2
    assert reason in result.output
    assert not (folder / "runs").exists()


def test_data_are_looked_for_in_their_own_folder(folder: Path, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    config = ask(str(folder / "base.toml"), ["output=out"], {}, elsewhere, folder).run
    assert config.data.source == f"jsonl:{folder / 'visits.jsonl'}"
    assert config.output == str(elsewhere / "out")
