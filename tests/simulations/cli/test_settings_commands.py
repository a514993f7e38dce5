"""`lacquer config` and `lacquer presets`."""

import json

import pytest
from typer.testing import CliRunner

from simulations.cli.app import app
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


def test_a_preset_is_shown_with_its_time_and_its_needs() -> None:
    shown = lacquer("presets", "sst2")
    assert shown.startswith(
        "# Time on two CPU cores: 48 minutes. Needs: files of the data set (data.source); the extra"
    )
    assert 'label-column = "label"' in shown
    listed = {one["name"]: one for one in json.loads(lacquer("presets", "--json"))}
    assert listed["silo-samsum"]["needs"]["text"].endswith("rouge-score (the extra [chat])")
    assert listed["silo-diabetes-paper"]["needs"]["time"] == "not measured"
    assert "Time:" not in listed["quickstart"]["about"]
    assert CliRunner().invoke(app, ["presets", "quikstart"]).exit_code == 2


def test_presets_are_listed_by_purpose_and_none_is_missing() -> None:
    listed = json.loads(lacquer("presets", "--json"))
    assert listed[0]["name"] == "quickstart"
    assert list(dict.fromkeys(one["purpose"] for one in listed)) == [*PURPOSES, "Sweeps"]
    presets = {one["name"] for one in listed if one["kind"] == "preset"}
    assert presets == {file.stem for folder in (PRESETS, PRESETS / "phases") for file in folder.glob("*.toml")}
    shown = lacquer("presets")
    assert 0 < shown.index("To begin with") < shown.index("quickstart") < shown.index("Public data sets")


def test_help_begins_with_run() -> None:
    shown = lacquer("--help")
    assert 0 < shown.index(" run ") < shown.index(" resume ") < shown.index(" sweep ") < shown.index(" init ")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lacquer run quick", "quickstart"),
        ("lacquer presets silo-quick", "silo-quickstart"),
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
