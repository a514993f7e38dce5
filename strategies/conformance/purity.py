"""A step is a function: of its arguments alone, which it leaves as they are, and of no hidden or global state.

What a check says when a contract is broken.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from strategies.state_files import classes_of, pack, same_bits, unpack


class ConformanceError(AssertionError):
    """A method broke a rule of its contract.

    Attributes:
        rule: its name, e.g. ``"deterministic"``.
    """

    def __init__(self, rule: str, what: str, remedy: str) -> None:
        super().__init__(f"{rule}: {what}; {remedy}")
        self.rule = rule


def raise_broken(rule: str, what: str, remedy: str) -> NoReturn:
    """Raise ConformanceError for a broken rule."""
    raise ConformanceError(rule, what, remedy)


@contextmanager
def rule(name: str, what: str, remedy: str) -> Iterator[None]:
    """Whatever an inner check or the method itself raises breaks this rule."""
    try:
        yield
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(name, f"{what}: {type(error).__name__}: {error}", remedy) from error


T = TypeVar("T")
M = TypeVar("M")


class Subject:
    """A method under test. Every call is made twice, the second time on a copy from before its first call.

    So what a method keeps in itself, and not in its state, shows as a difference, as it would after a resume.
    """

    def __init__(self, method: Any) -> None:
        self._method = method
        with rule("copyable", f"{type(method).__name__} cannot be copied", "keep parameters only, in frozen fields"):
            self._untouched = copy.deepcopy(method)

    def call(self, name: str, *arguments: Any, form: Callable[[Any], Any] = lambda value: value) -> Any:
        """The result of method ``name``; ``form`` gives what of it must repeat, as something :func:`pack` can hold.

        Raises:
            ConformanceError: rules "runs", "inputs", "global randomness", "deterministic".
        """
        where = f"{type(self._method).__name__}.{name}"
        before = [_kept(argument) for argument in arguments]
        results = []
        for method in (self._method, copy.deepcopy(self._untouched)):
            randomness = _global_randomness()
            with rule("runs", f"{where} raised", "it must work for every run it accepted"):
                results.append(getattr(method, name)(*arguments))
            if _global_randomness() != randomness:
                raise_broken(
                    "global randomness",
                    f"{where} drew from, or seeded, Python's, numpy's or torch's global random state",
                    "draw from privacy.randomness.rng.torch_generator(seed, ...) with a counter in the state",
                )
        if not all(_same(_kept(argument), kept) for argument, kept in zip(arguments, before, strict=True)):
            raise_broken(
                "inputs", f"{where} changed its arguments", "build new values: dataclasses.replace, tensor.clone()"
            )
        with rule("state", f"what {where} returned cannot be compared", "use numbers, texts, tensors, dataclasses"):
            same = same_bits(form(results[0]), form(results[1]))
        if not same:
            raise_broken(
                "deterministic",
                f"{where} gave two answers to the same question, the second on a fresh copy of the object",
                "keep what changes in the state, seed what is random, and read no clock",
            )
        return results[0]


def reload_state(state: T, template: Any) -> T:
    """The state as it comes back from a checkpoint: JSON and safetensors, nothing pickled.

    Args:
        state: what a run would store.
        template: a state as at the start; it names the classes that may come back.

    Raises:
        ConformanceError: rule "checkpoint".
    """
    tensors: dict[str, Tensor] = {}
    remedy = "hold numbers, texts, tensors, tuples, lists, dicts with texts as keys, and frozen dataclasses of them"
    with rule("checkpoint", "the state cannot be stored and read again", remedy):
        document = json.loads(json.dumps(pack(state, "state", tensors)))
        stored = load(save({name: value.contiguous().clone() for name, value in tensors.items()}))
        back: T = unpack(document, stored, classes_of(template))
        same = same_bits(state, back)
    if not same:
        raise_broken("checkpoint", "the state comes back from a checkpoint as another one", remedy)
    return back


def _kept(value: Any) -> Any:
    """A copy to compare with later; None for what is no plain value (a Release is frozen, a function has no state)."""
    tensors: dict[str, Tensor] = {}
    try:
        form = repr(pack(value, "", tensors))
    except TypeError:
        return None
    return form, {name: tensor.clone() for name, tensor in tensors.items()}


def _same(now: Any, before: Any) -> bool:
    if now is None or before is None:
        return now is before
    return now[0] == before[0] and all(same_bits(now[1][name], kept) for name, kept in before[1].items())


def _global_randomness() -> tuple[object, ...]:
    numpy: Any = np.random.get_state(legacy=False)
    of_numpy = (numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()
