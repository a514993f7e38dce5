"""Actor and critic over a set of adapters: the same weights whatever the number of (A, B) pairs.

A state is one row of features per adapter and one of features of the whole run. The actor gives every adapter a mean
and a log std from its own features, the average over all adapters, and the run's; the noise multiplier gets its own
pair from the averages. A critic encodes every adapter with its action, averages, and reads the average with the run's
features and the action on the noise. So both are blind to the order of the adapters, and weights learnt on small
problems serve models of any depth ("Deep Sets", Zaheer et al. 2017, arXiv 1703.06114v3). Weights are a flat dictionary.
"""

import math
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import relu

LOCAL, GLOBAL = 5, 5
"""Features of one adapter, and of the run."""

HIDDEN = 48
LOG_STD = (-5.0, 1.0)

Weights: TypeAlias = dict[str, Tensor]


def _layers(local: int, whole: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every layer, for so many features of one adapter and of the run."""
    actor = {
        "actor.adapter.0": (2 * local + whole, HIDDEN),
        "actor.adapter.1": (HIDDEN, HIDDEN),
        "actor.adapter.2": (HIDDEN, 2),
        "actor.noise.0": (local + whole, HIDDEN),
        "actor.noise.1": (HIDDEN, 2),
    }
    critic = {
        "adapter.0": (local + whole + 1, HIDDEN),
        "adapter.1": (HIDDEN, HIDDEN),
        "whole.0": (HIDDEN + whole + 1, HIDDEN),
        "whole.1": (HIDDEN, 1),
    }
    return actor | {f"{name}.{layer}": shape for name in ("critic1", "critic2") for layer, shape in critic.items()}


def features(weights: Weights) -> tuple[int, int]:
    """How many features of one adapter and of the run these weights read."""
    both, rows = (weights[f"actor.{name}.0.weight"].shape[1] for name in ("noise", "adapter"))
    return rows - both, 2 * both - rows


def initial_weights(generator: torch.Generator, local: int = LOCAL, whole: int = GLOBAL) -> Weights:
    """Uniform in +-1/sqrt(inputs); the actor's last layers are a tenth of that, so that it starts near no change."""
    weights: Weights = {}
    for name, (inputs, outputs) in _layers(local, whole).items():
        last = name in ("actor.adapter.2", "actor.noise.1")
        reach = (0.1 if last else 1.0) / math.sqrt(inputs)
        weights[f"{name}.weight"] = (2 * torch.rand(outputs, inputs, generator=generator) - 1) * reach
        weights[f"{name}.bias"] = torch.zeros(outputs)
    return weights


def targets_of(weights: Weights) -> Weights:
    """Copies of the critics under the names of their targets."""
    return {f"target-{name}": value.clone() for name, value in weights.items() if name.startswith("critic")}


def policy(
    weights: Weights, local: Float[Tensor, "b n l"], whole: Float[Tensor, "b g"]
) -> tuple[Float[Tensor, "b a"], Float[Tensor, "b a"]]:
    """Mean and log std of the actions before the tanh: one per adapter, then one on the noise multiplier."""
    average = local.mean(dim=1)
    rows = torch.cat([local, _spread(torch.cat([average, whole], dim=1), local)], dim=2)
    adapters = _mlp(weights, "actor.adapter", rows, 3)
    noise = _mlp(weights, "actor.noise", torch.cat([average, whole], dim=1), 2)
    outputs = torch.cat([adapters, noise.unsqueeze(1)], dim=1)
    low, high = LOG_STD
    return outputs[..., 0], low + (high - low) * torch.sigmoid(outputs[..., 1])


def value(
    weights: Weights,
    critic: str,
    local: Float[Tensor, "b n l"],
    whole: Float[Tensor, "b g"],
    action: Float[Tensor, "b a"],
) -> Float[Tensor, " b"]:
    """Q(s, a) of ``critic`` ("critic1", "target-critic2", ...)."""
    rows = torch.cat([local, _spread(whole, local), action[:, :-1].unsqueeze(2)], dim=2)
    average = relu(_mlp(weights, f"{critic}.adapter", rows, 2)).mean(dim=1)
    return _mlp(weights, f"{critic}.whole", torch.cat([average, whole, action[:, -1:]], dim=1), 2).squeeze(1)


def _spread(whole: Float[Tensor, "b g"], local: Float[Tensor, "b n l"]) -> Float[Tensor, "b n g"]:
    return whole.unsqueeze(1).expand(-1, local.shape[1], -1)


def _mlp(weights: Weights, name: str, rows: Tensor, layers: int) -> Tensor:
    for layer in range(layers):
        rows = torch.nn.functional.linear(rows, weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"])
        if layer < layers - 1:
            rows = relu(rows)
    return rows
