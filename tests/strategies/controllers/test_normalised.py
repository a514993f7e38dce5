"""AUTO-S and PSAC: every update is rescaled as the papers say, stays shorter than C, and keeps its direction."""

import numpy as np
import pytest
import torch

from privacy.clipping.units import Units
from privacy.contribution import Contribution, contribute
from privacy.events import Poisson
from privacy.mechanism import charged_release
from privacy.randomness.noise import InsecureZeroNoise
from strategies.controllers.controller import PublicSignals
from strategies.controllers.normalised import Automatic, Psac
from tests.cases.drawn import cohort
from tests.cases.population import DIM, setting_of

ONE = Poisson(0.5, 2)  # one client is expected, so the mean is the one client's scaled update


@pytest.mark.parametrize("length", [1e-3, 0.1, 0.5, 2.0, 700.0])
@pytest.mark.parametrize("bound", [0.5, 3.0])
@pytest.mark.parametrize("kind", ["automatic", "psac"])
def test_one_update_is_rescaled_as_published(kind: str, bound: float, length: float, quick_ledger_for) -> None:
    controller = Automatic(bound, gamma=0.02) if kind == "automatic" else Psac(bound, r=0.1)
    state = controller.init(setting_of(1, sampling=ONE), PublicSignals(0, None))
    plan = controller.plan(state, setting_of(1, sampling=ONE), 1)
    assert (plan.noise_multiplier, plan.queries) == (1.76, ())
    direction = np.array([0.5, -0.5, 0.1, 0.7]) / np.linalg.norm([0.5, -0.5, 0.1, 0.7])
    total, ledger = contribute(Units(torch.from_numpy(length * direction)[None]), plan), quick_ledger_for(ONE, 1)
    released = charged_release(total, plan, cohort(ONE, 1, ledger), ledger=ledger, noise=InsecureZeroNoise())
    n = length / bound
    expected = bound * n / (n + 0.02) if kind == "automatic" else bound * n / (n + 0.1 / (n + 0.1))
    assert expected < bound
    np.testing.assert_allclose(released.update.numpy(), expected * direction, rtol=1e-5)
    assert controller.update(state, setting_of(1, sampling=ONE), released, PublicSignals(1, None)) == state
    assert controller.released_values(state, setting_of(1, sampling=ONE)) == {"clip-bound": bound}


def test_the_noise_is_that_of_the_length(quick_ledger_for) -> None:
    """z C / m on every coordinate of the mean, whatever the map; 600 numbers are further off once in 10^7 runs."""
    sampling = Poisson(0.5, 20)
    for controller in (Automatic(2.0), Psac(2.0)):
        plan = controller.plan(
            controller.init(setting_of(1, sampling=sampling), PublicSignals(0, None)),
            setting_of(1, sampling=sampling),
            1,
        )
        ledger = quick_ledger_for(sampling, 150)
        draws = [
            charged_release(Contribution.zero(plan), plan, cohort(sampling, 1, ledger), ledger=ledger)
            for _ in range(150)
        ]
        found = torch.stack([draw.update for draw in draws]).std()
        assert float(found) == pytest.approx(1.76 * 2.0 / 10, rel=0.16)
        assert draws[0].update.shape == (DIM,)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Automatic, {"clip_norm": 0.0}),
        (Automatic, {"gamma": 0.0}),
        (Psac, {"clip_norm": -1.0}),
        (Psac, {"r": 0.0}),
        (Psac, {"r": 2.0}),
    ],
)
def test_values_that_cannot_work_are_refused(kind: type, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**options)
