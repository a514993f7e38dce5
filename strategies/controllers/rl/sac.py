"""Soft actor-critic over a set of adapters: twin Huber critics, fixed temperature, Polyak targets, a first-in buffer.

    y = r + gamma (1 - end) [ min_j Q'_j(s', a') - alpha log pi(a'|s') ],   a' ~ pi(s')
    critics:  sum_j Huber(Q_j(s, a) - y)        actor:  alpha log pi(a~|s) - min_j Q_j(s, a~),   a~ ~ pi(s)

A state is one row of features per adapter and one of features of the whole run. The actor gives every adapter a mean
and a log std from its own features, the average over all adapters, and the run's; the noise multiplier gets its own
pair from the averages. A critic encodes every adapter with its action, averages, and reads the average with the run's
features and the action on the noise. So both are blind to the order of the adapters, and the same weights, a flat
dictionary, serve models of any depth.

References: Haarnoja et al. 2018 (arXiv 1812.05905v2), with its temperature held fixed as RLDP does (2507.22565v1);
"Deep Sets", Zaheer et al. 2017 (arXiv 1703.06114v3). Deviation: log pi is averaged over the actions, not summed, so
that one temperature suits any number of adapters.

Everything is a value: an :class:`Agent` goes in, an Agent comes out, and its random numbers are functions of the seed
and of its own counters. So an agent that comes back from a checkpoint acts and learns as one that never stopped.

The policy that ships with the project (``simulations/benchmarks/papers/rldp_pretraining.py`` makes it) is
``policy.json``, which holds the bytes of a safetensors file in base64, and its card: Flower's bundles take no binary
file, and a plain ``flwr run`` must find it too.
"""

import base64
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import relu, smooth_l1_loss, softplus

from privacy import checks
from privacy.randomness.rng import torch_generator

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
    """The numbers of features of one adapter and of the run that these weights read."""
    both, rows = (weights[f"actor.{name}.0.weight"].shape[1] for name in ("noise", "adapter"))
    return rows - both, 2 * both - rows


def initial_weights(generator: torch.Generator, local: int = LOCAL, whole: int = GLOBAL) -> Weights:
    """Draw weights uniformly in +-1/sqrt(inputs); the actor's last layers are a tenth of that, so that it starts near
    no change.
    """
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
    """The value Q(s, a) by ``critic`` ("critic1", "target-critic2", ...)."""
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


_BETAS, _EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Learning:
    """Parameters of the learner.

    Attributes:
        seed: names its random numbers.
        discount: gamma, in [0, 1).
        temperature: alpha, > 0; weight of the entropy per action.
        polyak: share of the critics that their targets take over per step.
        learning_rate: of Adam, for actor and critics.
        batch: transitions per step, drawn with replacement.
    """

    seed: int = 0
    discount: float = 0.98
    temperature: float = 0.02
    polyak: float = 0.01
    learning_rate: float = 1e-3
    batch: int = 64

    def __post_init__(self) -> None:
        checks.integer_at_least(0, seed=self.seed)
        checks.integer_at_least(1, batch=self.batch)
        checks.positive(temperature=self.temperature, learning_rate=self.learning_rate)
        checks.probability(polyak=self.polyak, one_minus_discount=1 - self.discount)


@dataclass(frozen=True)
class Agent:
    """The state of the learner after some experience. A checkpoint holds it.

    Attributes:
        weights: of the actor, the critics and their targets.
        moments: Adam's, named ``first.`` and ``second.`` and the weight.
        buffer: the last transitions, one row each, as many as it can hold.
        stored: transitions ever stored.
        steps: gradient steps done.
        draws: actions drawn.
    """

    weights: Weights
    moments: dict[str, Tensor]
    buffer: dict[str, Tensor]
    stored: int = 0
    steps: int = 0
    draws: int = 0

    @property
    def remembered(self) -> int:
        """Transitions in the buffer."""
        return min(self.stored, len(self.buffer["reward"]))


def new_agent(weights: Weights, adapters: int, capacity: int) -> Agent:
    """An agent without experience; the targets start as the critics."""
    local, whole = features(weights)
    moments = {f"{kind}.{name}": torch.zeros_like(w) for kind in ("first", "second") for name, w in weights.items()}
    shapes = {"local": (adapters, local), "whole": (whole,), "action": (adapters + 1,), "reward": (), "end": ()}
    shapes |= {"next-local": (adapters, local), "next-whole": (whole,)}
    buffer = {name: torch.zeros(capacity, *shape) for name, shape in shapes.items()}
    return Agent(weights | targets_of(weights), moments, buffer)


def fresh_weights(seed: int, local: int = LOCAL, whole: int = GLOBAL) -> Weights:
    """Weights of an actor and critics that know nothing, for so many features of one adapter and of the run."""
    return initial_weights(torch_generator(seed, "rl", "weights"), local, whole)


def act(agent: Agent, local: Float[Tensor, "n l"], whole: Float[Tensor, " g"]) -> Float[Tensor, " a"]:
    """The policy's action at its mode, in (-1, 1)."""
    with torch.no_grad():
        mean, _ = policy(agent.weights, local.unsqueeze(0), whole.unsqueeze(0))
    return torch.tanh(mean[0])


def explore(
    agent: Agent, learning: Learning, local: Float[Tensor, "n l"], whole: Float[Tensor, " g"], *, at_random: bool
) -> tuple[Agent, Float[Tensor, " a"]]:
    """An action drawn from the policy, or uniformly from (-1, 1) with ``at_random``."""
    generator = torch_generator(learning.seed, "rl", "act", agent.draws)
    agent = replace(agent, draws=agent.draws + 1)
    if at_random:
        return agent, 2 * torch.rand(len(local) + 1, generator=generator) - 1
    with torch.no_grad():
        action, _ = _drawn(agent.weights, local.unsqueeze(0), whole.unsqueeze(0), generator)
    return agent, action[0]


def remember(agent: Agent, transition: dict[str, Tensor]) -> Agent:
    """The agent with a transition stored in place of the oldest."""
    place = agent.stored % len(agent.buffer["reward"])
    buffer = {name: values.clone() for name, values in agent.buffer.items()}
    for name, values in buffer.items():
        values[place] = transition[name]
    return replace(agent, buffer=buffer, stored=agent.stored + 1)


def learn(agent: Agent, learning: Learning) -> Agent:
    """One gradient step on critics and actor, from a batch of remembered transitions."""
    generator = torch_generator(learning.seed, "rl", "learn", agent.steps)
    chosen = torch.randint(agent.remembered, (learning.batch,), generator=generator)
    batch = {name: values[chosen] for name, values in agent.buffer.items()}
    weights = agent.weights
    with torch.no_grad():
        action, density = _drawn(weights, batch["next-local"], batch["next-whole"], generator)
        after = _least(weights, "target-", batch["next-local"], batch["next-whole"], action)
        goal = batch["reward"] + learning.discount * (1 - batch["end"]) * (after - learning.temperature * density)
    trained = {n: w.detach().requires_grad_() for n, w in weights.items() if not n.startswith("target-")}
    critics = [name for name in trained if name.startswith("critic")]
    actors = [name for name in trained if name.startswith("actor")]
    loss = torch.stack(
        [
            smooth_l1_loss(value(trained, critic, batch["local"], batch["whole"], batch["action"]), goal)
            for critic in ("critic1", "critic2")
        ]
    ).sum()
    gradients = dict(zip(critics, torch.autograd.grad(loss, [trained[n] for n in critics]), strict=True))
    action, density = _drawn(trained, batch["local"], batch["whole"], generator)
    worth = _least(trained, "", batch["local"], batch["whole"], action)
    loss = (learning.temperature * density - worth).mean()
    gradients |= dict(zip(actors, torch.autograd.grad(loss, [trained[n] for n in actors]), strict=True))
    return _stepped(agent, learning, gradients)


def _stepped(agent: Agent, learning: Learning, gradients: Weights) -> Agent:
    """Adam on actor and critics (Kingma and Ba 2015), then the targets follow."""
    steps, weights, moments = agent.steps + 1, dict(agent.weights), dict(agent.moments)
    (b1, b2), rate = _BETAS, learning.learning_rate
    for name, gradient in gradients.items():
        first = moments[f"first.{name}"] = torch.lerp(gradient, moments[f"first.{name}"], b1)
        second = moments[f"second.{name}"] = torch.lerp(gradient**2, moments[f"second.{name}"], b2)
        scale = (second / (1 - b2**steps)).sqrt() + _EPSILON
        weights[name] = weights[name] - rate / (1 - b1**steps) * first / scale
    for name in weights:
        if name.startswith("target-"):
            weights[name] = torch.lerp(weights[name], weights[name.removeprefix("target-")], learning.polyak)
    return replace(agent, weights=weights, moments=moments, steps=steps)


def _least(
    weights: Weights,
    prefix: str,
    local: Float[Tensor, "b n l"],
    whole: Float[Tensor, "b g"],
    action: Float[Tensor, "b a"],
) -> Float[Tensor, " b"]:
    """The smaller of the two critics' values."""
    return torch.minimum(*(value(weights, f"{prefix}critic{j}", local, whole, action) for j in (1, 2)))


def _drawn(
    weights: Weights, local: Float[Tensor, "b n l"], whole: Float[Tensor, "b g"], generator: torch.Generator
) -> tuple[Float[Tensor, "b a"], Float[Tensor, " b"]]:
    """An action in (-1, 1) by the reparametrisation a = tanh(mean + std xi), and its log density per action."""
    mean, log_std = policy(weights, local, whole)
    noise = torch.randn(mean.shape, generator=generator)
    before = mean + log_std.exp() * noise
    # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which does not cancel for large x.
    squash = 2 * (torch.log(before.new_tensor(2.0)) - before - softplus(-2 * before))
    density = -0.5 * noise**2 - log_std - 0.5 * torch.log(before.new_tensor(2 * torch.pi)) - squash
    return torch.tanh(before), density.mean(dim=1)


FILE = "policy.json"


@cache
def _shipped() -> str:
    return (resources.files("strategies.controllers.rl") / FILE).read_text(encoding="utf-8")


def card() -> dict[str, Any]:
    """The card that says where the shipped policy comes from."""
    told: dict[str, Any] = json.loads(_shipped())["card"]
    return told


def policy_weights(source: str) -> Weights:
    """Weights of actor and critics of a policy, a fresh copy.

    Args:
        source: ``"pretrained"`` for the policy that ships, which was learnt on synthetic federated problems, or the
            file of another one, as :func:`document` writes it.

    Raises:
        ValueError: there is no such file, or what it holds is no policy for the features of this package.
    """
    remedy = (
        f"policy must be 'pretrained', 'scratch' or the file of a policy, got {source!r}, %s. "
        "papers.rldp_pretraining (python -m simulations.benchmarks) makes such a file"
    )
    try:
        text = _shipped() if source == "pretrained" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(remedy % "which cannot be read") from error
    try:
        weights = load(base64.b64decode(json.loads(text)["safetensors"]))
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(remedy % "which holds no policy") from error
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    expected = {name: tuple(weight.shape) for name, weight in fresh_weights(0).items()}
    if shapes != expected or not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise ValueError(remedy % "whose weights have other names or shapes, or are not finite")
    return dict(sorted(weights.items()))  # safetensors gives them in any order


def document(weights: Weights, card: dict[str, Any]) -> str:
    """The text of ``policy.json``: weights, and in words and numbers where they come from."""
    return json.dumps({"card": card, "safetensors": base64.b64encode(save(weights)).decode()}, indent=1) + "\n"
