"""The layers that "auto" takes are there, and are the model's queries and values."""

import pytest
from torch import nn

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


def test_a_model_that_auto_does_not_know_is_refused_with_its_layers() -> None:
    with pytest.raises(ValueError, match="auto knows none of this model's linear layers; name some of dense, mixer"):
        targets_of(model("mixer"), "auto")
