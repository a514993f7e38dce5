"""What only the methods, the data or the model can know to be wrong is refused before a run starts, by its key."""

import re
from pathlib import Path
from typing import Any

import pytest

from server.config.load import ConfigError, parse, unflatten
from server.config.schema import RunConfig
from simulations import preflight
from simulations.preflight import check, check_adapter, check_data, check_noise, check_run
from simulations.presets.asked import Asked, ask

SMALL = {"clients": 60, "sampling-rate": 0.2, "privacy.delta": 1e-3, "model.name": "random:bert"}


ALONE = {"clients": 1, "sampling-rate": 1.0, "privacy.unit": "record", "data.partition": "iid"}


def small(cache: Path, **changed: Any) -> RunConfig:
    return parse(unflatten({**SMALL, "data.cache": str(cache), **changed}))


@pytest.mark.parametrize(
    ("part", "key", "value", "says"),
    [
        (check_noise, "strategy.controller", "dp-lak", "did you mean 'dp-lac'"),
        (check_noise, "strategy.controller-options", {"bounds": 1}, "strategy.controller-options.bounds"),
        (check_noise, "strategy.controller-options", {"clip-norm": -1.0}, "strategy.controller-options.clip-norm must"),
        (check_noise, "privacy.epsilon", 0.001, "privacy.epsilon = 0.001"),
        (check_data, "data.source", "csv:none.csv", "none.csv"),
        (check_data, "model.name", "./none", "./none"),
        (check_adapter, "model.targets", "foo", "model.targets = 'foo': "),
        (check_adapter, "model.targets", "embeddings", "model.targets = 'embeddings': "),
        (check_adapter, "model.layers", 99, "model.layers = 99: random:bert has 2 layers"),
        (check_adapter, "model.max-length", 131, "model.max-length must be at most 130"),
    ],
)
def test_a_setting_is_refused_by_its_key(part: Any, key: str, value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        part(small(tmp_path, **{key: value}))


def test_ranks_that_do_not_fit_the_adapter_are_refused_with_their_key(tmp_path: Path) -> None:
    strategy = {"strategy.aggregation": "zero-pad", "strategy.aggregation-options": {"ranks": "9,99"}}
    with pytest.raises(ConfigError, match=r"strategy\.aggregation-options\.ranks must be in"):
        check_adapter(small(tmp_path, **strategy))


@pytest.mark.parametrize("preset", ["site-quickstart", "sites"])
def test_record_level_runs_are_refused_with_the_key_too(preset: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.targets = 'foo'"):
        check_run(ask(preset, ["model.targets=foo"], {}, tmp_path, tmp_path))


def test_a_missing_label_column_is_refused_with_the_columns_there_are(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("sentence,sentiment\n" + "some words,1\n" * 200)
    source = {"data.source": f"csv:{tmp_path / 'data.csv'}", "data.text-column": "sentence"}
    with pytest.raises(ValueError, match=r"label.*sentiment"):
        check_data(small(tmp_path, **source))


def test_several_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)none-such.*none\.csv"):
        check(small(tmp_path, **{"strategy.controller": "none-such", "data.source": "csv:none.csv"}))


def test_an_unknown_option_is_refused_before_data_and_model_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("too late")

    for name in ("check_noise", "check_data", "check_adapter", "assemble_record_level"):
        monkeypatch.setattr(preflight, name, touched)
    options = {"strategy.optimizer": "fedavg", "strategy.optimizer-options": {"momentun": 0.9}}
    for config in (small(tmp_path, **options), small(tmp_path, **options, **ALONE)):
        with pytest.raises(
            ConfigError, match=r"strategy\.optimizer-options\.momentun: fedavg has no such option; .*learning-rate"
        ):
            check_run(Asked(config))
