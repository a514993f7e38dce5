"""Exposure: ranks of planted secrets among all numbers, exactly, and among a sample."""

import numpy as np
import pytest

from client.models import load_base
from simulations.attacks import exposure


@pytest.fixture(scope="module")
def model():
    return load_base("random:llama", "causal-lm")


def test_the_tree_gives_every_number_its_log_probability(model, monkeypatch):
    monkeypatch.setattr(exposure, "ROWS", 30)
    language_model, tokenizer = model
    prefix = exposure.prefix_tokens(tokenizer, "six-digit")[:-1]  # this tokenizer ends every text
    digits = [row[0] for row in exposure.secret_tokens(tokenizer, "six-digit", list("0123456789"))]
    scores = exposure.all_numbers(language_model, prefix, digits, 3)
    numbers = [[digits[int(d)] for d in f"{number:03}"] for number in range(1000)]
    np.testing.assert_allclose(scores, exposure.log_probabilities(language_model, prefix, numbers), atol=1e-5)
    assert np.exp(scores).sum() < 1


def test_log_probabilities_multiply_along_the_secret(model):
    language_model, tokenizer = model
    prefix = exposure.prefix_tokens(tokenizer, "secret-id")[:-1]
    short, long = exposure.secret_tokens(tokenizer, "secret-id", ["A7", "A7Q"])
    one, two = exposure.log_probabilities(language_model, prefix, [short, long])
    (last,) = exposure.log_probabilities(language_model, [*prefix, *short], [long[2:]])
    assert two == pytest.approx(one + last, abs=1e-5)


def test_exact_exposure_is_the_rank():
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.2, 0.3, 0.0, 0.7])
    bits = [found.bits for found in exposure.exact(scores, [1, 7, 2, 6])]
    assert bits == pytest.approx([3.0, 2.0, 3 - np.log2(3), 0.0])


def test_sampled_exposure_covers_the_exact_one():
    draws = np.random.default_rng(0)
    scores = draws.normal(size=4096)
    planted = np.argsort(scores)[[0, 1000, 2048, 3500, 4000, 4090]]
    truth = exposure.exact(scores, planted)
    covered = 0
    for _ in range(50):
        sample = scores[draws.choice(4096, 500, replace=False)]
        found = exposure.sampled(scores[planted], sample, 4096)
        covered += sum(one.low <= true.bits <= one.high for one, true in zip(found, truth, strict=True))
        assert max(one.bits for one in found) <= np.log2(501)
    assert covered >= 0.95 * 300
    best = exposure.sampled(np.array([9.0]), scores[:500], 4096)[0]
    assert best.high == 12.0
    assert 6.5 < best.low < best.bits == pytest.approx(np.log2(501))


def test_mean_and_its_interval():
    values = [exposure.Exposure(bits, bits, bits) for bits in (1.0, 2.0, 3.0, 6.0)]
    mean = exposure.mean_interval(values)
    assert (mean.bits, mean.high - mean.bits) == (
        3.0,
        pytest.approx(3.182 * np.std([1, 2, 3, 6], ddof=1) / 2, rel=1e-3),
    )
    draws = np.random.default_rng(1)
    inside = 0
    for rows in draws.exponential(size=(100, 40)):
        interval = exposure.mean_interval([exposure.Exposure(bits, bits, bits) for bits in rows])
        inside += interval.low <= 1 <= interval.high
    assert inside >= 85
    with pytest.raises(ValueError, match="canaries"):
        exposure.mean_interval(values[:1])
