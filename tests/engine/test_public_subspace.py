"""PE-SGD, FixSample, PDP-SGD and GEP inside the private loop: spans, projections, evolution, charges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from client.data.records import Records
from client.record_level.public_subspace import (
    METHODS,
    Projecting,
    PublicSpan,
    SpanState,
    in_public_span,
    leading_directions,
    public_bounds,
)
from privacy.clipping.norms import FlatClip
from privacy.clipping.subspace import CoefficientClip, EmbeddingResidualClip, SubspaceClip
from privacy.contribution import Contribution
from privacy.randomness.rng import torch_generator
from strategies.adapter.trainable import TrainedSubset
from strategies.controllers.controller import PublicSignals
from strategies.optimizers.fedavg import FedAvg
from strategies.optimizers.optimizer import ServerStep
from strategies.state_files import classes_of, pack, same_bits, unpack
from tests.cases.record_level import EXACT, PRIVATE, engine, gradient, records, run, site_training, vector

TEXTS = records(6, seed=9)
MAPS = {
    "coefficients": CoefficientClip,
    "projection": FlatClip,
    "embedding-residual": EmbeddingResidualClip,
    "embedding": SubspaceClip,
}


def trained(folder: Path, method: str, *, evolve: Any = None, texts: Records = TEXTS, **settings: Any) -> Any:
    made = engine()
    given = {**PRIVATE, "steps": 2, **settings}
    plain = site_training(folder, records(), made=made, **given)
    training = in_public_span(plain, PublicSpan(made, texts, method, rank=3, evolve=evolve))
    training.begin(vector(), PublicSignals(0, None))
    return training


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_is_charged_and_can_be_stored(method: str, tmp_path: Path) -> None:
    training = trained(tmp_path, method)
    run(training, 2)
    assert isinstance(training.release.plan.clip, MAPS[method])
    assert len(training.ledger.events) == 2
    sizes = {"coefficients": 6, "embedding": 3, "projection": 0, "embedding-residual": 3}
    rest = training.gradients.engine.layout.dim if method in ("projection", "embedding-residual") else 0
    assert training.ledger.events[-1].components[0].dim == sizes[method] + rest
    assert 0 < training.ledger.epsilon_spent() <= 4.0
    assert "all 2 planned steps" in training.refusal()
    tensors: dict[str, Tensor] = {}
    form = pack(training.state.subspace, "subspace", tensors)
    fresh = training.planner.subspace.start()
    assert same_bits(unpack(form, tensors, classes_of(fresh)), training.state.subspace)


def test_the_span_is_that_of_the_texts_gradients_at_the_current_adapter(tmp_path: Path) -> None:
    training = trained(tmp_path, "coefficients")
    first = training.next_release().plan.clip.gradients.clone()
    torch.testing.assert_close(first, gradient(vector(), TEXTS).float(), rtol=1e-4, atol=1e-7)
    training.step()
    training.observe(PublicSignals(1, None))
    second = training.next_release().plan.clip.gradients
    torch.testing.assert_close(second, gradient(training.state.adapter, TEXTS).float(), rtol=1e-4, atol=1e-7)
    assert not torch.equal(first, second)


def test_a_release_without_noise_is_the_mean_of_normalised_projections(tmp_path: Path) -> None:
    """Against the formula, with gradients by autograd: u = G z / (q n), z = sum of Z_j / (||Z_j|| + 1e-8)."""
    training = trained(tmp_path, "coefficients", **{**EXACT, "steps": 2})
    training.step()
    g, h = gradient(vector(), TEXTS).double(), gradient(vector(), records()).double()
    gram = g @ g.T
    ridge = 1e-6 * gram.diagonal().mean()
    z = torch.linalg.solve(gram + ridge * torch.eye(len(g), dtype=torch.float64), g @ -h.T)
    z = z / (z.norm(dim=0) + 1e-8)
    torch.testing.assert_close(training.release.encoded, z.sum(dim=1), rtol=1e-3, atol=1e-3)
    expected = g.T @ z.sum(dim=1) / len(h)
    found = training.release.update.double()
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.9999
    assert float(found.norm() / expected.norm()) == pytest.approx(1.0, abs=1e-3)


def test_an_empty_batch_is_released_and_charged(tmp_path: Path) -> None:
    training = trained(tmp_path, "coefficients")
    planned = training.next_release()
    release = planned.release(Contribution.zero(planned.plan), training.cohort(planned), training.ledger, None)
    assert len(training.ledger.events) == 1
    assert float(release.update.norm()) > 0  # noise, in the span
    g = planned.plan.clip.gradients.double()
    basis = torch.linalg.qr(g.T).Q
    outside = release.update.double() - basis @ (basis.T @ release.update.double())
    assert float(outside.norm()) < 1e-4 * float(release.update.norm())


def test_projection_moves_the_adapter_inside_the_span_only(tmp_path: Path) -> None:
    training = trained(tmp_path, "projection", **{**EXACT, "steps": 2})
    v = leading_directions(gradient(vector(), TEXTS).float(), 3).double()
    training.step()
    layout = training.gradients.engine.layout
    moved = layout.trainable_values(training.state.adapter).double() - layout.trainable_values(vector()).double()
    inside = v.T @ (v @ moved)
    assert float((moved - inside).norm()) < 1e-3 * float(moved.norm())
    expected = v.T @ (v @ (0.5 * training.release.update.double()))
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


def test_the_noise_a_projection_leaves_is_handed_on() -> None:
    v = torch.linalg.qr(torch.randn(9, 3, generator=torch_generator(0, "v"), dtype=torch.float64)).Q.T
    seen: list[ServerStep] = []

    class Watching(FedAvg):
        def step(self, state: Any, parameters: Tensor, step: ServerStep) -> Any:
            seen.append(step)
            return super().step(state, parameters, step)

    std = torch.linspace(0.5, 2, 9, dtype=torch.float64)
    for noise, scales in ((torch.tensor(0.7), None), (std, None), (std, torch.linspace(1, 3, 9, dtype=torch.float64))):
        Projecting(Watching(), v.float(), scales).step({}, torch.zeros(9), ServerStep(1, torch.ones(9), noise))
        s = torch.ones(9, dtype=torch.float64) if scales is None else scales
        whole = torch.diag(1 / s) @ v.T @ v @ torch.diag(s) @ torch.diag(noise.double().expand(9))
        torch.testing.assert_close(seen[-1].noise_std, whole.norm(dim=1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen[-1].update.double(), torch.diag(1 / s) @ v.T @ v @ s, rtol=1e-5, atol=1e-6)


def test_texts_evolve_by_the_released_coefficients_and_survive_a_break(tmp_path: Path) -> None:
    seen: list[tuple[Tensor, int]] = []

    def evolve(texts: Records, scores: Tensor, adapter: Tensor, step: int) -> Records:
        seen.append((scores, step))
        assert len(adapter) == len(vector())
        return texts.select([1, 0, 3, 2, 5, 4])

    training = trained(tmp_path, "coefficients", evolve=evolve)
    release = training.step()
    assert torch.equal(seen[0][0], release.encoded)
    assert seen[0][1] == 1
    state: SpanState = training.state.subspace
    assert state.texts.select([1]).tokens.tolist() == TEXTS.select([0]).tokens.tolist()
    before = training.state
    training.restore(before, release.update, release.answers)
    assert training.release.encoded is None
    training.observe(PublicSignals(1, None))
    assert torch.equal(training.state.subspace.tokens, state.tokens)
    training.step()
    assert [step for _, step in seen] == [1, 2]


def test_public_thresholds_are_medians_of_the_texts_gradients() -> None:
    made = engine()
    whole, embedded, rest = public_bounds(
        PublicSpan(made, TEXTS, "embedding-residual", rank=2), vector(), TrainedSubset()
    )
    g = gradient(vector(), TEXTS)
    assert whole == pytest.approx(float(g.norm(dim=1).median()), rel=1e-4)
    assert 0 < rest < whole
    assert 0 < embedded <= whole


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "pesgd"}, "method must be one of"),
        ({"method": "embedding", "rank": 7}, "rank must be in"),
        ({"method": "projection", "evolve": lambda *_: TEXTS}, "evolve needs released coefficients"),
        ({"method": "embedding-residual", "residual_bound": 0.0}, "residual_bound must be > 0"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PublicSpan(engine(), TEXTS, **{"rank": 3, **given})


def test_a_controller_with_a_clip_map_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a controller of flat clipping"):
        trained(tmp_path, "coefficients", controller="automatic", controller_options={})
