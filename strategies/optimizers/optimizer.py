"""The interface of a server optimizer: state and parameters in, a released update, state and parameters out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxtyping import Float
from torch import Tensor

from strategies.plugins import expect, expect_finite, expect_tensor, raise_bad_answer, show_answer


@dataclass(frozen=True)
class ServerStep:
    """The facts about a round that the optimizer is told; all of it is released or public.

    Attributes:
        round: 1..T.
        update: ``[d]``, the released mean update: a noisy pseudo-gradient in the direction of descent.
        noise_std: standard deviation of the noise in each value of ``update``: 0-d where all are alike, else ``[d]``.
        scale: the controller's factor on this step.
    """

    round: int
    update: Float[Tensor, " d"]
    noise_std: Float[Tensor, "*d"]
    scale: float = 1.0

    def rate(self, learning_rate: float, decay: float) -> float:
        """The learning rate of this step, eta * decay^(round - 1) * scale."""
        return learning_rate * decay ** (self.round - 1) * self.scale


class Optimizer(Protocol):
    """Parameters are the object's frozen fields; state is named tensors, so that a checkpoint can hold it.

    A state tensor of the shape of the parameters holds one number per value. It is kept for the whole adapter, and a
    round that trains a part of it is given that part: what is not trained keeps its state. 0-d tensors are given as
    they are.
    """

    @property
    def moments(self) -> Mapping[str, Literal[1, 2]]:
        """Names of the state tensors that are first moments of updates and of those that are second moments; others may
        stay unnamed.

        An aggregation that rewrites the adapter in other coordinates moves them along.
        """
        ...

    def init(self, parameters: Float[Tensor, " d"]) -> dict[str, Tensor]:
        """State before the first round."""
        ...

    def step(
        self, state: dict[str, Tensor], parameters: Float[Tensor, " d"], step: ServerStep
    ) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
        """New state and parameters after a round. Arguments are left as they are."""
        ...


def take_step(
    optimizer: Optimizer, own: dict[str, Tensor], before: Float[Tensor, " d"], step: ServerStep
) -> tuple[dict[str, Tensor], Float[Tensor, " d"]]:
    """A step, whole and finite; else BadAnswer.

    It is a function of the released update, which carries its noise: that it is not finite tells nothing private.
    """
    when = f"in round {step.round}"
    new, values = pair_of(optimizer, optimizer.step(own, before, step))
    if new.keys() != own.keys():
        raise_bad_answer(
            "optimizer", optimizer, "step", f"a state of {sorted(new)}", f"one of {sorted(own)}, as init did"
        )
    expect_tensor("optimizer", optimizer, "step", values, before)
    expect_finite("optimizer", optimizer, "step", values, when)
    for name, tensor in new.items():
        expect_tensor("optimizer", optimizer, "step", tensor, own[name])
        expect_finite("optimizer", optimizer, "step", tensor, f"as state {name!r} {when}")
    return new, values


def pair_of(optimizer: Optimizer, answer: Any) -> tuple[dict[str, Tensor], Any]:
    """Split what ``step`` returned into state and parameters; BadAnswer for anything but these two."""
    pair = "a tuple of two, the new state (a dict of tensors) and the new parameters"
    expect("optimizer", optimizer, "step", answer, tuple, pair)
    if len(answer) != 2 or not isinstance(answer[0], dict):
        raise_bad_answer("optimizer", optimizer, "step", show_answer(answer), pair)
    return answer[0], answer[1]
