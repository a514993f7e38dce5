"""Adapters that no run goes on from are refused by name, before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.config.load import ConfigError
from server.config.saved_adapter import FORM_FILE, WEIGHTS_FILE, adopt_form, read_form
from server.config.tables import Model

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"]}


def saved(folder: Path, **changed: Any) -> str:
    (folder / FORM_FILE).write_text(json.dumps(LORA | changed))
    (folder / WEIGHTS_FILE).write_bytes(b"")
    return str(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"use_dora": True}, "is DoRA"),
        ({"use_rslora": True}, "is rsLoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "ranks that differ between layers"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4, which changes the base model"),
        ({"peft_type": "IA3", "r": None}, "is IA3"),
        ({"r": "many"}, "is no configuration of PEFT's LoRA"),
    ],
)
def test_other_forms_are_named(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_form(saved(tmp_path, **changed))


def test_what_is_set_stays_and_the_rest_is_the_adapter_s(tmp_path: Path) -> None:
    given = Model(adapter=saved(tmp_path, layers_to_transform=[4, 5]), rank=2)
    found = adopt_form(given, given.model_fields_set)
    assert (found.rank, found.alpha, found.targets, found.layers) == (2, 16.0, "q_proj,v_proj", 2)


def test_a_pattern_of_names_is_left_to_the_settings(tmp_path: Path) -> None:
    given = Model(adapter=saved(tmp_path, target_modules=r".*_proj"), targets="q_proj")
    assert adopt_form(given, {"targets"}).targets == "q_proj"


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nor holds adapter_config\.json; give a run's folder"):
        read_form(str(tmp_path))
    saved(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match="save the adapter as safetensors"):
        read_form(str(tmp_path))
