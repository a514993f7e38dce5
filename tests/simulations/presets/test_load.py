import pytest

from server.config.load import ConfigError, parse
from server.config.methods import methods
from simulations.presets.asked import ask
from simulations.presets.load import absolute_paths, configure, describe, find, parse_setting, preset_files


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("rounds=2", ("rounds", 2)),
        ("privacy.epsilon=0.5", ("privacy.epsilon", 0.5)),
        ("privacy.epsilon=.5", ("privacy.epsilon", 0.5)),
        ("privacy.delta=1e-6", ("privacy.delta", 1e-6)),
        ("engine.sequential=true", ("engine.sequential", True)),
        ("name=7", ("name", "7")),
        ("name=true", ("name", "true")),
        ('name="quoted"', ("name", "quoted")),
        ("data.source=csv:/a b/c.csv", ("data.source", "csv:/a b/c.csv")),
        ("data.label-column= label ", ("data.label-column", "label")),
        ("strategy.controller-options.bound=0.1", ("strategy.controller-options.bound", 0.1)),
        ("strategy.controller=my.module:Thing", ("strategy.controller", "my.module:Thing")),
        ("name=", ("name", "")),
    ],
)
def test_settings_have_the_type_their_key_wants(setting, expected):
    key, value = parse_setting(setting)
    assert (key, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("privacy.epsilon=0", "privacy.epsilon"),
        ("privacy.epsilon=four", "privacy.epsilon = 'four'"),
        ("sampling-rate=1.5", "sampling-rate = 1.5"),
        ("privacy.delta=0.5", "must be below 1/clients"),
        ("rounds", "must be key=value"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        configure("quickstart", ["clients=100", setting], {}, tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        configure("gone.toml", [], {}, tmp_path)


@pytest.mark.parametrize("setting", ["rounds", "=3", "data.source=[1, 2]", "rounds={a = 1}"])
def test_a_setting_that_is_no_key_and_value_is_refused(setting):
    with pytest.raises(ConfigError, match="--set"):
        parse_setting(setting)


@pytest.mark.parametrize("name", sorted(preset_files()))
def test_every_preset_parses_and_says_what_it_is(name, tmp_path):
    asked = ask(name, [], {}, tmp_path, tmp_path)
    assert asked.run.name == name
    assert (asked.phases is not None) == (preset_files()[name].parent.name == "phases")
    assert len(describe(preset_files()[name])) > 20
    methods(asked.run)  # its methods take its settings, so that it is not refused by its own


def test_settings_and_overrides_go_on_top_of_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("rounds = 3\nclients = 500\n[privacy]\ndelta = 1e-6\n")
    config = configure(str(file), ["clients=600", "privacy.epsilon=2"], {"engine.kind": "inprocess"}, tmp_path)
    assert (config.rounds, config.clients, config.privacy.epsilon, config.privacy.delta) == (3, 600, 2.0, 1e-6)
    assert config.engine.kind == "inprocess"


def test_wrong_settings_are_all_named_with_a_suggestion(tmp_path):
    with pytest.raises(ConfigError) as refusal:
        configure("quickstart", ["privacy.epsilom=2", "sampling-rate=1.5", "rounds=many"], {}, tmp_path)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3
    assert any("privacy.epsilom" in line and "privacy.epsilon" in line for line in lines)
    assert any("sampling-rate = 1.5" in line for line in lines)
    assert any("rounds = 'many'" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("quikstart", "did you mean quickstart"), ("nothing-like-it", "there are"), ("gone.toml", "does not exist")],
)
def test_an_unknown_preset_or_file_is_refused(name, hint):
    with pytest.raises(ConfigError, match=hint):
        find(name)


def test_paths_become_absolute(tmp_path):
    (tmp_path / "model").mkdir()
    table = {
        "output": "out",
        "model": {"name": "model"},
        "data": {"source": "parquet:d/train.parquet", "test-source": "notes"},
    }
    config = absolute_paths(parse(table), tmp_path)
    assert config.output == str(tmp_path / "out")
    assert config.model.name == str(tmp_path / "model")
    assert config.data.source == f"parquet:{tmp_path}/d/train.parquet"
    assert config.data.test_source == "notes"
    assert config.data.cache == ""
    assert absolute_paths(config, tmp_path / "elsewhere") == config


def test_a_policy_is_looked_for_beside_the_work_first(tmp_path):
    config = parse({"strategy": {"controller": "rl", "controller-options": {"policy": "mine.json"}}})
    here, data = tmp_path / "here", tmp_path / "data"

    def found():
        return absolute_paths(config, data, here).strategy.controller_options["policy"]

    for folder, expected in ((None, "mine.json"), (data, str(data / "mine.json")), (here, str(here / "mine.json"))):
        if folder is not None:
            folder.mkdir()
            (folder / "mine.json").write_text("{}")
        assert found() == expected
    assert absolute_paths(config, tmp_path).strategy.controller_options["policy"] == "mine.json"


def test_a_model_name_that_is_no_folder_stays_a_name(tmp_path):
    assert absolute_paths(parse({"model": {"name": "minilm"}}), tmp_path).model.name == "minilm"
