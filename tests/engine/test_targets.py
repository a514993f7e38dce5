"""The layers that "auto" takes are there, and are the model's queries and values."""

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, target_modules
from client.models.targets import targets_of


def model(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in (*names, "dense")})


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("query", "key", "value"), ("query", "value")),
        (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "v_proj")),
        (("q_lin", "k_lin", "v_lin"), ("q_lin", "v_lin")),
        (("qkv_proj", "o_proj"), ("qkv_proj",)),
    ],
)
def test_auto_takes_queries_and_values(names: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert targets_of(model(*names), "auto") == found


def test_names_that_are_given_are_taken_as_they_are() -> None:
    assert targets_of(model("query"), " up_proj , down_proj") == ("up_proj", "down_proj")


def test_of_a_model_without_known_names_auto_takes_every_linear_layer_of_the_blocks() -> None:
    blocks = nn.ModuleDict({"layers": nn.ModuleList([model("mixer"), model("mixer")])})
    assert targets_of(blocks, "auto") == targets_of(blocks, "all-linear") == ("mixer", "dense")
    with pytest.raises(ValueError, match="finds no block with linear layers"):
        targets_of(model("mixer"), "auto")


@pytest.mark.parametrize(
    ("architecture", "task", "names"),
    [
        ("bert", "classification", ("query", "key", "value", "dense")),
        ("bert", "causal-lm", ("query", "key", "value", "output.dense", "intermediate.dense")),
        ("llama", "causal-lm", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("llama", "classification", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("gpt2", "causal-lm", ("c_attn", "c_proj", "c_fc")),
    ],
)
def test_all_linear_takes_every_linear_layer_of_the_blocks(
    architecture: str, task: str, names: tuple[str, ...]
) -> None:
    base, _ = load_base(f"random:{architecture}", task, 2 if task == "classification" else None)
    found = targets_of(base, "all-linear")
    assert found == names
    spec = LoraSpec(rank=2, alpha=4, targets=found)
    ours = set(target_modules(base, spec))
    adapted = len(adapter_layout(base, spec).entries) // 2
    assert adapted == len(ours) == {"bert": 6, "llama": 7, "gpt2": 4}[architecture] * base.config.num_hidden_layers
    theirs = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    paths = {path.removeprefix("base_model.model.") for path, m in theirs.named_modules() if hasattr(m, "lora_A")}
    beside = {path for path in paths if path.split(".")[0] in ("classifier", "cls", "lm_head")}
    assert paths - beside == ours  # of heads PEFT knows the output's layer, where the model says which it is


def test_all_linear_of_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="all-linear finds no block with linear layers"):
        targets_of(model("query"), " all-linear ")
