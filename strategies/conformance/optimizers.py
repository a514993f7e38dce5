"""Checks of what a run relies on in a server optimizer."""

from typing import Any

import torch
from torch import Tensor

from privacy.randomness.rng import simulation_generator
from strategies.conformance.purity import Subject, raise_broken, reload_state, rule
from strategies.optimizers.optimizer import Optimizer, ServerStep, pair_of

_SIZE, _TRAINED = 12, slice(3, 9)


def check_optimizer(optimizer: Optimizer, *, seed: int = 0) -> None:
    """Raise ConformanceError unless ``optimizer`` keeps its contract.

    Checked, under the names of the rules: the protocol is there ("protocol"); every answer is a function of state,
    parameters and :class:`~strategies.optimizers.optimizer.ServerStep` alone, hence post-processing of the release
    ("deterministic", "inputs", "global randomness"); parameters and state keep names, shapes and types, also in rounds
    that train a part ("shapes"); numbers stay finite, with noise known or not, after an update of zero or of pure noise
    ("finite"); updates are added, not subtracted ("direction"); the state comes back from a checkpoint ("checkpoint").

    Args:
        seed: of the made-up updates.
    """
    for member in vars(Optimizer):
        if not member.startswith("_") and not hasattr(optimizer, member):
            raise_broken(
                "protocol", f"{type(optimizer).__name__} has no {member}", "see strategies/optimizers/optimizer.py"
            )
    if wrong := [name for name, power in dict(optimizer.moments).items() if power not in (1, 2)]:
        raise_broken("protocol", f"moments names {wrong} neither 1 nor 2", "first moments are 1, second moments 2")
    subject = Subject(optimizer)
    parameters = _made_up(seed, "parameters")
    start = subject.call("init", parameters)
    _check_state(start, start, _SIZE)
    _check_state(reload_state(start, start), start, _SIZE)
    if unknown := set(optimizer.moments) - set(start):
        raise_broken(
            "protocol", f"moments names {sorted(unknown)}, which are no state", f"the state has {sorted(start)}"
        )
    _check_steps(optimizer, subject, start, parameters, seed)
    _check_direction(subject)


def _check_steps(
    optimizer: Optimizer, subject: Subject, state: dict[str, Tensor], parameters: Tensor, seed: int
) -> None:
    """Twelve rounds: full ones and partial ones; noise that is unknown (0), known, and one number per value."""
    start = state
    for round in range(1, 13):
        part = _TRAINED if round % 3 == 0 else slice(0, _SIZE)
        size = part.stop - part.start
        update = _made_up(seed, round)[part] * (0.0 if round == 5 else 10.0 ** (round % 4 - 2))
        std = (torch.tensor(0.0), torch.tensor(0.3), torch.linspace(0.1, 1.0, size).double())[round % 3]
        own = {name: tensor[part] if tensor.shape == (_SIZE,) else tensor for name, tensor in state.items()}
        step = ServerStep(round, update, std.double(), (1.0, 0.5)[round % 2])
        answer = subject.call("step", own, parameters[part], step)
        with rule("shapes", "step cannot be used", "see strategies/optimizers/optimizer.py"):
            new, values = pair_of(optimizer, answer)
        _check_state(new, start, size)
        if values.shape != (size,) or values.dtype != torch.float32:
            raise_broken(
                "shapes",
                f"step returned parameters {values.dtype} {tuple(values.shape)}, it was given float32 ({size},)",
                "return one float32 number per parameter",
            )
        if not bool(values.isfinite().all()):
            raise_broken("finite", f"round {round} left parameters that are not finite", "guard divisions and roots")
        parameters = parameters.clone()
        parameters[part] = values
        state = {name: _put(state[name], part, new[name]) for name in state}
    reload_state(state, start)


def _put(whole: Tensor, part: slice, values: Tensor) -> Tensor:
    if whole.shape != (_SIZE,):
        return values
    result = whole.clone()
    result[part] = values
    return result


def _check_state(state: Any, start: Any, size: int) -> None:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise_broken("shapes", f"the state is {type(state).__name__}, not a dict of tensors", "name every tensor")
    if state.keys() != start.keys():
        raise_broken("shapes", f"the state holds {sorted(state)}, at first {sorted(start)}", "make all of it in init")
    for name, value in state.items():
        if value.dim() and value.shape != (size,):
            raise_broken(
                "shapes",
                f"state {name!r} has shape {tuple(value.shape)} in a round of {size} parameters",
                "one number per parameter, or a 0-d tensor",
            )
        if value.dtype != start[name].dtype or value.dim() != start[name].dim():
            raise_broken("shapes", f"state {name!r} changed its type or shape", f"it began as {start[name].dtype}")
        if not bool(value.isfinite().all()):
            raise_broken("finite", f"state {name!r} is not finite", "guard divisions and roots")


def _check_direction(subject: Subject) -> None:
    """Eight equal updates without noise, which lead downhill, end with parameters moved along them."""
    update, parameters = torch.linspace(0.5, 1.5, _SIZE), torch.zeros(_SIZE)
    state = subject.call("init", parameters)
    for round in range(1, 9):
        step = ServerStep(round, update, torch.tensor(0.0).double(), 1.0)
        state, parameters = subject.call("step", state, parameters, step)
    if not float(parameters @ update) > 0:
        raise_broken("direction", "eight equal updates moved parameters against them", "the update is added: x + eta u")


def _made_up(seed: int, name: int | str) -> Tensor:
    return torch.from_numpy(simulation_generator(seed, "conformance", name).uniform(-1, 1, _SIZE)).float()
