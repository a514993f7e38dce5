"""`lacquer config` and `lacquer presets`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli.app import app
from simulations.cli.settings.presets import preset_time
from simulations.engines import speed
from simulations.presets.load import PRESETS, PURPOSES


def lacquer(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_config_prints_a_line_for_every_setting_that_begins_so() -> None:
    lines = lacquer("config", "public.").splitlines()
    assert [line.split()[0] for line in lines] == [
        "public.training-fraction",
        "public.warm-start-epochs",
        "public.warm-start-learning-rate",
        "public.warm-start-batch-size",
        "public.warm-start-factors",
    ]
    assert lines[1].endswith("0  integer >= 0  Passes over those records before round 1")


def test_config_explains_one_setting_whole_and_suggests_another() -> None:
    assert "the queries and values of the model's attention" in " ".join(lacquer("config", "model.targets").split())
    done = CliRunner().invoke(app, ["config", "privacy.epsilom"])
    assert done.exit_code == 2
    assert "did you mean privacy.epsilon?" in done.stderr


def test_config_speaks_json() -> None:
    (found,) = json.loads(lacquer("config", "rounds", "--json"))
    assert (found["key"], found["default"], found["limits"]) == ("rounds", 40, ">= 1")
    assert json.loads(lacquer("config", "--schema"))["properties"]["rounds"]["default"] == 40


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four cores, each three times slower than the presets' two."""
    monkeypatch.setattr(speed, "step_seconds", lambda: 3 * speed.REFERENCE_SECONDS)
    monkeypatch.setattr(speed, "available_cores", lambda: 4)


def test_a_preset_is_shown_with_its_time_here_and_its_needs(slow: None) -> None:
    shown = lacquer("presets", "sst2")
    assert shown.startswith("# Time: 72 minutes (estimates for this machine's processor, by a training step")
    assert "Needs: files of the data set (data.source); the extra" in shown
    assert 'label-column = "label"' in shown
    listed = {one["name"]: one for one in json.loads(lacquer("presets", "--json"))}
    assert listed["site-samsum"]["needs"]["text"].endswith("rouge-score (the extra [chat])")
    assert listed["site-diabetes-paper"]["needs"]["time"] == "not measured"
    assert "Time:" not in listed["quickstart"]["about"]
    assert CliRunner().invoke(app, ["presets", "quikstart"]).exit_code == 2


def test_minutes_are_those_of_this_machine(slow: None) -> None:
    assert speed.time_here("5 to 9 minutes") == "8 to 14 minutes"
    assert speed.time_here("about 30 minutes of one core, by its first six rounds") == (
        "about 90 minutes of one core, by its first six rounds"
    )
    assert speed.time_here("not measured") == "not measured"
    assert speed.scaled("1 to 2 minutes", 0.1) == "about 1 minute"
    assert "3 minutes, estimates for this machine" in preset_time("quickstart")
    assert preset_time("my.toml") == ""


def test_a_training_step_is_timed_once_and_again_on_another_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = speed.step_seconds()
    assert 0.001 < first < 10
    monkeypatch.setattr(speed, "_measured", lambda: 7.0)
    assert speed.step_seconds() == first
    monkeypatch.setattr(speed, "processor", lambda: "another")
    assert speed.step_seconds() == 7.0
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert speed.step_seconds() == 7.0, "without a place to keep it"


def test_presets_are_listed_by_purpose_and_none_is_missing() -> None:
    listed = json.loads(lacquer("presets", "--json"))
    assert listed[0]["name"] == "quickstart"
    assert list(dict.fromkeys(one["purpose"] for one in listed)) == [*PURPOSES, "Sweeps"]
    presets = {one["name"] for one in listed if one["kind"] == "preset"}
    assert presets == {file.stem for folder in (PRESETS, PRESETS / "phases") for file in folder.glob("*.toml")}
    shown = lacquer("presets")
    assert "The main job: 1,000 clients" in shown, "or what a preset is about is squeezed by a long time"
    assert 0 < shown.index("To begin with") < shown.index("quickstart") < shown.index("Public data sets")


def test_help_begins_with_run() -> None:
    shown = lacquer("--help")
    assert 0 < shown.index(" run ") < shown.index(" resume ") < shown.index(" sweep ") < shown.index(" init ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lacquer run quick", "quickstart"),
        ("lacquer presets site-quick", "site-quickstart"),
        ("lacquer sweep records-diabetes-w", "records-diabetes-why"),
        ("lacquer run --set privacy.eps", "privacy.epsilon="),
    ],
)
def test_the_shell_completes_presets_sweeps_and_settings(typed: str, offered: str) -> None:
    asked = {
        "_LACQUER_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = CliRunner().invoke(app, [], env=asked, prog_name="lacquer")
    assert done.output.split() == [offered]
