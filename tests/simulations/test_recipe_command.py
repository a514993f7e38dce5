"""`lacquer recipe`: from a file to a run folder that says what it guarantees."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.config import ConfigError
from server.recipe import plan_noise
from server.recipe_config import load_recipe
from server.recipe_progress import PhaseFolder
from server.recipe_promise import promise_of
from server.recipe_result import STAMP_FILE, PhaseResult
from simulations.benchmarks import atdp
from simulations.benchmarks.atdp_tables import NULL, ORDER, comparison
from simulations.cli import app
from simulations.recipe_command import find, recipe_files

SMALL = """
name = "small"
[privacy]
epsilon = 8.0
delta = 1e-3
[model]
name = "random:llama"
task = "causal-lm"
rank = 2
targets = "q_proj,v_proj"
max-length = 40
[data]
source = "jsonl:texts.jsonl"
partition = "iid"
validation-records = 8
test-records = 8
[[phases]]
kind = "ordinary"
name = "redacted"
text = "redacted"
[[phases]]
kind = "private"
name = "atdp"
text = "weighted"
steps = 2
batch-size = 16
noise-multiplier = 4.0
controller = "rise-reset"
"""


def test_a_recipe_runs_from_its_file_and_says_what_it_is_worth(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"Ann wrote {i} times"}) for i in range(40)))
    (tmp_path / "small.toml").write_text(SMALL)
    ended = CliRunner().invoke(app, ["recipe", "small.toml", "--set", "seed=1"])
    assert ended.exit_code == 0, ended.output
    said = " ".join(ended.output.split())
    assert "NOT PRIVATE at record level (epsilon infinite)" in said
    assert "selective-DP (policy regex, detector assumed perfect)" in said
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / STAMP_FILE).is_file()
    assert load_recipe(folder / "recipe.toml").run.seed == 1  # all settings, those of the command line too
    assert json.loads((folder / "results.json").read_text())["test_perplexity"] > 1
    # a mistake is said in a line, and nothing is left behind
    wrong = CliRunner().invoke(app, ["recipe", "small.toml", "--set", "privacy.epsilon=0.001"])
    assert wrong.exit_code == 2
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_recipe_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"Ann wrote {i} times"}) for i in range(40)))
    (tmp_path / "small.toml").write_text(SMALL)
    finish = PhaseFolder.finish

    def interrupted(place: PhaseFolder, result: PhaseResult) -> None:
        if result.name == "atdp":
            raise KeyboardInterrupt
        finish(place, result)

    with monkeypatch.context() as patch:
        patch.setattr(PhaseFolder, "finish", interrupted)
        ended = CliRunner().invoke(app, ["recipe", "small.toml"])
    assert ended.exit_code == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"lacquer resume {folder}" in ended.output.replace("\n", "")
    started = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(started.replace("steps = 2", "steps = 3"))
    refused = CliRunner().invoke(app, ["resume", str(folder)])
    assert (refused.exit_code, "phases are not the same" in refused.output) == (2, True)
    (folder / "recipe.toml").write_text(started)
    ended = CliRunner().invoke(app, ["resume", str(folder)])
    assert ended.exit_code == 0, ended.output
    results = json.loads((folder / "results.json").read_text())
    assert [(resumed["round"], resumed["lost"]) for resumed in results["resumed"]] == [(2, 0)]
    again = CliRunner().invoke(app, ["resume", str(folder)])
    assert (again.exit_code, "has ended" in again.output) == (2, True)


def test_the_recipes_that_come_with_lacquer_promise_what_their_comments_say() -> None:
    kinds = {}
    for name, file in recipe_files().items():
        config = load_recipe(file, {})
        given = [phase for phase in config.recipe.private if phase.noise_multiplier]
        assert len(given) == len(config.recipe.private) - 1
        kinds[name] = "record" if not config.recipe.ordinary else "selective"
        assert ("Selective DP only" in file.read_text()) == (kinds[name] == "selective")
    assert kinds == {"dp-atdp": "record", "jft-atdp": "selective"}
    with pytest.raises(ConfigError, match="there are dp-atdp, jft-atdp"):
        find("jft")


@pytest.mark.parametrize("preset", ["atdp-small", "atdp-paper"])
def test_the_presets_of_the_comparison_hold_the_phases_of_its_rows(preset: str) -> None:
    config = load_recipe(atdp.HERE / f"{preset}.toml", {})
    assert {phase.name for phase in config.recipe.phases} == {name for chain in atdp.CHAINS for name in chain}
    assert {row for rows in atdp.CHAINS.values() for row in rows if row} | {"base model"} == set(ORDER)
    assert config.run.data.canaries >= 100
    phases = tuple(phase for phase in config.recipe.phases if phase.name in ("private", "atdp"))
    if preset == "atdp-small":  # the noise keeps the limit that the preset states, also among few records
        recipe = replace(config.recipe, phases=phases, delta=1e-4)
        assert promise_of(recipe, plan_noise(recipe, 400)).kind == "record"


def test_the_table_says_of_every_row_what_it_guarantees() -> None:
    common = {
        "preset": "p", "kind": "id-record", "detector": "missed", "seed": 0, "delta": 1e-5, "population": 900,
        "canaries": 128, "copies": 4, "model": "m", "dimension": 100, "test_tokens": 5000, "exposure_cap": 11.0,
        "exposure": 2.0, "exposure_low": 1.5, "exposure_high": 2.5, "cpu_seconds": 30.0, "perplexity": 50.0,
        "selective_epsilon": None, "noise_epsilon": 0.0,
    }  # fmt: skip
    rows = [
        {**common, "row": "no DP", "guarantee": "none", "record_epsilon": "infinite"},
        {**common, "row": "JFT", "guarantee": "selective", "record_epsilon": "infinite", "selective_epsilon": 3.0001},
        {**common, "row": "DP-SGD", "guarantee": "record", "record_epsilon": 2.0001},
    ]
    text = comparison({"rows": rows})
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert lines["no DP"].endswith("| none (ε infinite) |")
    assert "record level: none (ε infinite); selective-DP ε 3.01" in lines["JFT"]
    assert "record level: ε 2.01, δ 1e-05" in lines["DP-SGD"]
    assert f"{NULL:.2f} bits" in text
