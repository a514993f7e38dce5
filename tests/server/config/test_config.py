"""The configuration: both forms give the same run, and whatever is wrong is refused by name."""

import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from client.settings import Options
from server.config.load import ConfigError, flatten, known_keys, load, parse, unflatten
from server.config.schema import RunConfig


def refusal(table: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse(table)
    return str(error.value)


def another(kind: Any, default: Any) -> Any:
    """A legal value that is not the default, so that a key lost on the way shows."""
    if default == "utf-8":
        return "latin-1"
    if get_origin(kind) is Literal:
        return next(choice for choice in reversed(get_args(kind)) if choice != default)
    return (
        {bool: not default, int: default + 1, float: default / 2 or 0.5}[kind]
        if kind is not str
        else f'{default} "ä"\n'
    )


# Other values of these rule out other values of others; what they rule out is under test where it is done.
KEPT = {"privacy.trust": "server", "privacy.unit": "client", "data.held-by": "server", "engine.ray-address": ""}
KEPT |= {"data.separator": "", "data.unit-column": "", "data.client-column": "", "engine.checkpoint-blocks": False}
KEPT |= {"engine.attention": "sdpa", "privacy.noise-correlation": "none", "privacy.bands": 0, "data.nodes": 0}
KEPT |= {"privacy.buffers": 0, "evaluation.confusion": False, "evaluation.tokens": 0}
KEPT |= {"site.sampling-level": "user", "evaluation.data": "public"}


def others(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every key with another value; the tables of options with one option of every type."""
    flat: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key, kind = prefix + name.replace("_", "-"), field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            flat |= others(kind, key + ".")
        elif kind == Options:
            flat |= {f"{key}.count": 3, f"{key}.clip-norm": 0.5, f"{key}.smooth": True, f"{key}.word": "x"}
        elif key in KEPT:
            flat[key] = KEPT[key]
        elif get_origin(kind) is Literal and len(get_args(kind)) == 1:
            flat[key] = field.default
        else:
            flat[key] = another(kind, field.default)
    return flat


def test_other_values_cover_every_key() -> None:
    given = others()
    for key in known_keys():
        assert any(name.startswith(key) for name in given) if key.endswith(".") else key in given, key


@pytest.mark.parametrize("flat", [{}, others()], ids=["defaults", "everything-changed"])
def test_toml_and_flat_forms_give_the_same_configuration(flat: dict[str, Any], tmp_path: Path) -> None:
    config = parse(unflatten(flat))
    assert parse(tomllib.loads(config.to_toml())) == config
    assert parse(unflatten(flatten(config.to_table()))) == config
    assert {key: value for key, value in flatten(config.to_table()).items() if key in flat} == flat
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert load(file) == config
    assert load(file, {"rounds": 9}).rounds == 9


def test_defaults_are_those_of_no_settings_at_all() -> None:
    assert parse({}) == RunConfig()
    assert set(flatten(RunConfig().to_table())) == {key for key in known_keys() if not key.endswith(".")}


def test_an_integer_serves_where_a_number_is_wanted() -> None:
    config = parse({"privacy": {"epsilon": 4}, "sampling-rate": 1, "model": {"alpha": 8}})
    assert type(config.privacy.epsilon) is type(config.sampling_rate) is type(config.model.alpha) is float


def test_options_keep_their_types() -> None:
    options = {"a": 1, "b": 1.0, "c": True, "d": "x"}
    kept = parse({"strategy": {"controller-options": options}}).strategy.controller_options
    assert kept == options
    assert [type(value) for value in kept.values()] == [int, float, bool, str]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rounds", True, "rounds = True: input should be a valid integer"),
        ("rounds", 2.0, "rounds = 2.0: input should be a valid integer"),
        ("rounds", "2", "rounds = '2': input should be a valid integer"),
        ("rounds", 0, "rounds = 0: input should be greater than or equal to 1"),
        ("privacy.epsilon", 0, "privacy.epsilon = 0: input should be greater than 0"),
        ("privacy.epsilon", -1.5, "privacy.epsilon = -1.5: input should be greater than 0"),
        ("privacy.epsilon", True, "privacy.epsilon = True: input should be a valid number"),
        ("privacy.epsilon", float("nan"), "privacy.epsilon = nan: input should be"),
        ("privacy.epsilon", float("inf"), "privacy.epsilon = inf: input should be a finite number"),
        ("privacy.epsilon", 10**400, "privacy.epsilon = 1000"),
        ("privacy.delta", 0, "privacy.delta = 0: input should be greater than 0"),
        ("privacy.delta", 1.0, "privacy.delta = 1.0: input should be less than 1"),
        ("privacy.delta", 1e-3, "privacy.delta = 0.001 must be below 1/clients = 0.001"),
        ("privacy.noise", "gauss", "privacy.noise = 'gauss': input should be 'gaussian', 'discrete' or"),
        ("sampling-rate", 1.01, "sampling-rate = 1.01: input should be less than or equal to 1"),
        ("sampling-rate", 0, "sampling-rate = 0: input should be greater than 0"),
        ("sampling-rate", float("nan"), "sampling-rate = nan"),
        ("sampling-rate", 0.0009, "sampling-rate x clients = 0.9 "),
        ("clients", 19, "sampling-rate x clients = 0.95 "),
        ("seed", -1, "seed = -1: input should be greater than or equal to 0"),
        ("strategy.served-average", 1.0, "strategy.served-average = 1.0: input should be less than 1"),
        ("public.training-fraction", 1, "public.training-fraction = 1"),
        ("simulation.clients-per-node", 2, "simulation.clients-per-node = 2"),
        ("strategy.controller-options", 3, "strategy.controller-options = 3: must be a table of settings"),
        ("strategy.controller-options.a", [1], "strategy.controller-options.a: must be a text, a number or a boolean"),
        ("strategy.controller-options.a", {"b": 1}, "strategy.controller-options.a: must be a text, a number"),
        ("privacy", 4, "privacy = 4: must be a table of settings"),
        ("name", None, "name = None: input should be a valid string"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_limit(key: str, value: Any, words: str) -> None:
    text = refusal(unflatten({key: value}))
    assert words in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("round", "rounds"),
        ("sampling_rate", "sampling-rate"),
        ("privacy.epsilom", "privacy.epsilon"),
        ("epsilon", "privacy.epsilon"),
        ("engine.worker", "engine.workers"),
        ("strategi", "strategy"),
        ("strategy.controller-option", "strategy.controller-options"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, nearest: str) -> None:
    assert refusal(unflatten({key: 1})) == f"{key}: unknown key; did you mean {nearest}?"


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    assert refusal({"zzzzqqqq": 1}) == "zzzzqqqq: unknown key"


def test_every_wrong_key_is_listed() -> None:
    text = refusal(
        {
            "roundz": 3,
            "rounds": "many",
            "privacy": {"epsilon": -1, "delta": 2.0, "colour": "red"},
            "strategy": {"optimizer-options": {"a": []}},
        }
    )
    lines = text.splitlines()
    assert len(lines) == 6
    for key in ("roundz", "rounds", "privacy.epsilon", "privacy.delta", "privacy.colour", "strategy.optimizer-opt"):
        assert sum(line.startswith(key) for line in lines) == 1, key


def test_both_limits_that_concern_two_keys_are_reported() -> None:
    text = refusal({"clients": 10, "sampling-rate": 0.05, "privacy": {"delta": 0.2}})
    assert len(text.splitlines()) == 2
    assert "privacy.delta = 0.2" in text
    assert "sampling-rate x clients = 0.5" in text


def test_what_voids_the_guarantee_needs_to_be_asked_for() -> None:
    for table in ({"noise": "insecure-zero"}, {"seeded-cohorts": True}):
        assert "privacy.non-private = true" in refusal({"privacy": table})
        assert parse({"privacy": {**table, "non-private": True}}).privacy.non_private
    assert parse({"clients": 20, "privacy": {"delta": 0.5, "non-private": True}}).clients == 20


@pytest.mark.parametrize(
    "flat",
    [{"rounds": 3, "rounds.x": 1}, {"rounds.x": 1, "rounds": 3}],
    ids=["value-first", "table-first"],
)
def test_a_key_cannot_be_value_and_table(flat: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rounds"):
        unflatten(flat)


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml does not exist"):
        load(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path)
    file = tmp_path / "bad.toml"
    for content in (b"rounds = ", b"rounds = 1\nrounds = 2\n", b"\xff\xfe\x00", 'name = "ä"'.encode("latin-1")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
            load(file)


def test_an_empty_unknown_table_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[privaci]\n")
    with pytest.raises(ConfigError, match=r"privaci: .*privacy"):
        load(file)


def test_overrides_go_over_the_file_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[strategy]\ncontroller = "fixed"\n[strategy.controller-options]\nclip-norm = 2\n')
    config = load(file, {"strategy.controller-options.extra": True, "privacy.epsilon": 2})
    assert config.strategy.controller_options == {"clip-norm": 2, "extra": True}
    assert (config.strategy.controller, config.privacy.epsilon) == ("fixed", 2.0)
    with pytest.raises(ConfigError, match=r"strategy = 3: .*table"):
        load(file, {"strategy": 3})


def test_a_configuration_does_not_change() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.rounds = 3  # type: ignore[misc]
    assert config.expected_cohort == 50.0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"unit-column": "patient"}, "data.unit-column = 'patient' must be empty where clients are protected"),
        ({"client-column": "ward"}, "data.client-column = 'ward' needs data.partition = 'natural', got 'dirichlet'"),
        ({"client-column": "ward", "partition": "natural", "train-records": 9}, "data.train-records = 9 must be 0"),
        ({"partition": "repeated"}, "data.partition = 'repeated' needs privacy.non-private = true"),
        ({"held-by": "nodes", "sensitive": "redaction"}, "data.sensitive = 'redaction' must be 'none'"),
    ],
)
def test_columns_that_would_not_be_what_is_protected_are_refused(data: dict[str, Any], says: str) -> None:
    assert says in refusal({"data": data})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "needs public.warm-start-epochs above 0, or model.adapter"),
        ({"public": {"warm-start-epochs": 1}, "privacy": {"unit": "record"}, "clients": 1}, "and privacy.unit ="),
        ({"public": {"warm-start-epochs": 1}, "model": {"task": "causal-lm"}}, "needs model.task = 'classification'"),
    ],
)
def test_heads_stay_only_with_clients_that_can_learn_from_them(changed: dict[str, Any], says: str) -> None:
    assert says in refusal({"strategy": {"aggregation": "local-heads"}, **changed})


@pytest.mark.parametrize(
    ("table", "members", "units"),
    [
        ({"clients": 1200}, "1,200 clients", "clients"),
        ({"clients": 1, "sampling-rate": 1.0, "privacy": {"unit": "record"}}, "one site, records protected", "records"),
        (
            {"clients": 4, "sampling-rate": 1.0, "privacy": {"unit": "group"}},
            "4 sites, patients protected in each",
            "sites",
        ),
    ],
)
def test_words_for_who_takes_part(table: dict[str, Any], members: str, units: str) -> None:
    config = parse(table)
    assert (config.members_text, config.units_text) == (members, units)


NODES: dict[str, Any] = {"held-by": "nodes", "nodes": 3, "client-column": "user"}


def test_nodes_may_have_many_clients_each() -> None:
    config = parse({"clients": 9000, "privacy": {"delta": 1e-5}, "data": NODES})
    assert (config.is_deployed, config.nodes, config.expected_cohort) == (True, 3, 450.0)
    assert parse({"data": {"held-by": "nodes"}}).nodes == 1000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {**NODES, "held-by": "server"}}, "data.nodes = 3 needs data.held-by = 'nodes', got 'server'"),
        ({"data": {**NODES, "client-column": ""}}, "data.nodes = 3 needs data.client-column: the column of"),
        ({"data": NODES, "privacy": {"unit": "record"}}, "data.nodes = 3 needs privacy.unit = 'client'"),
        (
            {
                "data": NODES,
                "sampling-rate": 1.0,
                "privacy": {"trust": "secagg", "mode": "filter", "noise": "discrete"},
            },
            "data.nodes = 3 needs privacy.trust = 'server': in a secure sum every party is one client",
        ),
        (
            {"data": NODES, "privacy": {"seeded-cohorts": True, "non-private": True}},
            "data.nodes = 3 needs privacy.seeded-cohorts = false",
        ),
        ({"data": NODES, "clients": 2, "sampling-rate": 1.0}, "data.nodes = 3 needs at least one client on every node"),
    ],
)
def test_what_nodes_with_many_clients_cannot_do_is_refused(change: dict[str, Any], words: str) -> None:
    assert words in refusal(change)


def test_a_table_of_an_older_file_is_read_under_its_new_name(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(
        'clients = 1\nsampling-rate = 1.0\nprivacy.unit = "record"\nstrategy.controller = "fixed"\n'
        "[silo]\nbatch-size = 7\n"
    )
    assert load(file).site.batch_size == 7
    assert load(file, {"silo.batch-size": 8}).site.batch_size == load(file, {"site.batch-size": 8}).site.batch_size == 8
    assert "[silo" not in load(file).to_toml()
    file.write_text("[silo]\nbatch-size = 7\n[site]\nsteps = 2\n")
    with pytest.raises(ConfigError, match=r"\[silo\] is an older name of \[site\], and both are given; keep one"):
        load(file)
