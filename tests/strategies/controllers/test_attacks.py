"""An attack on every controller: whoever knows all that is released learns nothing more from what it does.

Two worlds differ in one client, and every release is the same in both. A controller that then plans, steps or shows
something else has read a raw value.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from privacy import mechanism
from privacy.clipping.units import Units
from privacy.contribution import GRID, Contribution, Plan, contribute
from privacy.events import Poisson
from privacy.randomness.rng import torch_generator
from strategies import CONTROLLERS, private_training
from strategies.controllers.controller import RunInfo
from strategies.plugins import build
from strategies.state_files import pack, same_bits
from tests.cases import federation
from tests.cases.controllers import VARIANTS

N, ROUNDS, TARGET = 60, 4, 13
EVERYONE = Poisson(1.0, N)
AGENT = {"interval": 1, "warm-up": 1, "batch": 2, "updates": 1}
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    *((name, options, None) for name in CONTROLLERS for options in ({}, *VARIANTS.get(name, ()))),
    ("rl", {"interval": 1}, 8),  # moves the noise too
    ("rl", {"policy": "scratch", **AGENT}, 8),
]
READ_NOTHING = {"fixed", "dynamic", "rise-reset", "automatic", "psac"}
"""Those that follow no release, as DP-LAC from a given threshold: raw releases do not change them either."""
READERS = [case for case in CASES if case[0] not in READ_NOTHING and case[:2] != ("dp-lac", VARIANTS["dp-lac"][0])]


@pytest.fixture
def play(fed: federation.Federation, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A function that trains in a world and gives all that the controller did; its releases are the world's alone."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    decoded, number = mechanism.decode_release, 0

    def without_data(noisy: Any, *rest: Any) -> mechanism.Release:
        nonlocal number
        number += 1
        drawn = 20.0 * torch.randn(len(noisy), generator=torch_generator(number, "release"), dtype=noisy.dtype)
        return decoded(drawn.abs(), *rest)

    monkeypatch.setattr(mechanism, "decode_release", without_data)

    def played(controller: Any, order: int | None, size: float, seen: list[float]) -> list[Any]:
        nonlocal number
        number = 0

        def sum_of(clients: Any, plan: Plan) -> Contribution:
            asked = torch.as_tensor(np.array(clients), dtype=torch.int64)
            rows, target = federation.UPDATES[asked].clone(), asked == TARGET
            rows[target] *= size
            losses = torch.where(target, min(size, 9.0), 0.7)
            votes = torch.where(target & (size > 1) | (asked % 2 == 0), 20, 5)  # the target's vote decides
            seen.append(float(rows.norm()))
            return contribute(Units(rows[:, : plan.clip.params or federation.DIM], losses, votes), plan)

        monkeypatch.setattr(federation, "sum_of", sum_of)
        info = RunInfo(ROUNDS, (federation.LAYOUT.blocks(),), EVERYONE, (1.5,) * ROUNDS, order)
        strategy = fed.make(controller=controller, info=info, ledger=fed.ledger_for(EVERYONE, ROUNDS))
        done: list[Any] = []
        for _ in range(ROUNDS + (controller.initial(EVERYONE) is not None)):
            plan = strategy.next_release().plan
            fed.hold(strategy, fed.Nodes())
            state, tensors = strategy.state.controller, {}
            said = controller.released_values(state, info), pack(state, "state", tensors)
            done.append((plan.to_json(), plan.clip.arrays(), controller.step_scale(state), repr(said), tensors))
        return done

    return played


def told_apart(play: Callable[..., list[Any]], controller: Callable[[list[float]], Any], order: int | None) -> bool:
    """Whether the controller acts otherwise where the target is enormous than where it is tiny."""
    worlds = []
    for size in (1e-4, 1e4):
        seen: list[float] = []
        worlds.append(play(controller(seen), order, size, seen))
        assert seen, "nobody was trained"
    return not same_bits(*worlds)


@pytest.mark.parametrize(("name", "options", "order"), CASES, ids=str)
def test_no_controller_tells_the_worlds_apart(
    name: str, options: dict[str, Any], order: int | None, play: Callable[..., list[Any]]
) -> None:
    assert not told_apart(play, lambda seen: build("strategy.controller", CONTROLLERS, name, options), order)


@pytest.mark.parametrize(("name", "options", "order"), READERS, ids=str)
def test_each_would_if_its_releases_were_raw(
    name: str,
    options: dict[str, Any],
    order: int | None,
    play: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protected = private_training.charged_release

    def raw(total: Contribution, plan: Plan, cohort: Any, **given: Any) -> mechanism.Release:
        release = protected(total, plan, cohort, **given)
        pairs = zip(total.answers, plan.queries, strict=True)
        answers = tuple(part.double() / GRID * query.sensitivity for part, query in pairs)
        object.__setattr__(release, "answers", answers)
        if plan.clip.dim:
            update = plan.clip.decode(total.encoded.double() / GRID, release.expected_units)
            object.__setattr__(release, "update", update.to(release.update.dtype))
        return release

    monkeypatch.setattr(private_training, "charged_release", raw)
    assert told_apart(play, lambda seen: build("strategy.controller", CONTROLLERS, name, options), order)


class Peeking:
    """A controller whose step follows the raw norm of the last updates."""

    def __init__(self, honest: Any, seen: list[float]) -> None:
        self.honest, self.seen = honest, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)

    def step_scale(self, state: Any) -> float:
        return float(self.honest.step_scale(state)) / (1.0 + sum(self.seen))


@pytest.mark.parametrize("name", CONTROLLERS)
def test_each_would_if_it_looked_at_raw_norms(name: str, play: Callable[..., list[Any]]) -> None:
    assert told_apart(play, lambda seen: Peeking(build("strategy.controller", CONTROLLERS, name, {}), seen), None)
