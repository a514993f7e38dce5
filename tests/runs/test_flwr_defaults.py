"""The settings that `flwr run` reads from pyproject.toml are those of the schema, its pins those of constraints.txt."""

import tomllib
from pathlib import Path

import pytest

from server.app import SPECIAL_KEYS, configuration
from server.config.load import parse, unflatten
from server.config.schema import RunConfig
from server.run_folder.origin import write_origin
from simulations.tools.flwr_defaults import (
    HEADER,
    LAUNCHER_KEYS,
    PINS,
    PYPROJECT,
    flwr_defaults,
    pins,
    rewrite_pyproject,
)


def test_pyproject_holds_the_defaults_of_the_schema():
    config = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]
    assert config == flwr_defaults(), "run `make flwr-defaults`"


def test_pyproject_holds_the_pins_of_the_constraints():
    held = tomllib.loads(PYPROJECT.read_text())["tool"]["uv"]["constraint-dependencies"]
    assert held == pins(), "run `make flwr-defaults`"
    assert any(pin.startswith("torch==") for pin in held)


def test_the_flat_defaults_are_the_default_configuration():
    flat = {key: value for key, value in flwr_defaults().items() if key not in LAUNCHER_KEYS}
    assert parse(unflatten(flat)) == RunConfig()
    assert set(LAUNCHER_KEYS) == set(SPECIAL_KEYS)


def test_rewriting_replaces_the_table_and_the_pins_and_nothing_else():
    before, after = f'[a]\nb = 1\n{PINS} = ["stalest==1"]\n\n', '\n[c]\n"d.e" = 2\n'
    text = f"{before}{HEADER}\nstale = 1\nstaler = 2\n{after}"
    new = rewrite_pyproject(text)
    assert new.startswith("[a]\nb = 1\n")
    assert tomllib.loads(new)["a"] == {"b": 1, PINS: pins()}
    assert f"\n\n{HEADER}\n" in new
    assert new.endswith(after)
    assert "stale" not in new
    assert rewrite_pyproject(new) == new
    assert tomllib.loads(new)["c"] == {"d.e": 2}


def test_a_pyproject_without_the_table_is_refused():
    with pytest.raises(ValueError, match="once"):
        rewrite_pyproject("[a]\n")


def test_plain_flower_names_the_folder_of_a_resumed_run_and_nothing_else(tmp_path: Path) -> None:
    config = RunConfig(seed=7)
    (tmp_path / "config.toml").write_text(config.to_toml())
    write_origin(tmp_path, config, "digest")
    keys = {"config-file": "", "run-folder": "", "resume": str(tmp_path), "rounds": 99}  # flwr gives all its defaults
    assert configuration(keys) == config
