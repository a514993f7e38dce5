"""The kinds of noise on their own: integers, scaled block by block, fresh at every call.

Most cannot be seeded: every test of their law fails by chance, each with a probability below 1e-6.
"""

import math
import pickle

import pytest
import torch
from scipy import stats

from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise, InsecureSeededNoise, InsecureZeroNoise

GRID = 2**40
BLOCKS = [(0.5, 40_000), (3.0, 30_000), (1000.0, 20_000)]


@pytest.mark.parametrize("kind", [GaussianNoise, DiscreteGaussianNoise, lambda: InsecureSeededNoise(3)])
def test_blocks_have_their_own_scale_and_the_normal_law(kind):
    drawn = kind().draw(BLOCKS)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (90_000,)
    for (multiplier, length), block in zip(BLOCKS, drawn.split([length for _, length in BLOCKS]), strict=True):
        x = block.double().numpy() / GRID / multiplier
        assert abs(x.var() - 1) < 6 * math.sqrt(2 / length)
        assert stats.kstest(x, "norm").pvalue > 1e-8


@pytest.mark.parametrize("kind", [GaussianNoise, DiscreteGaussianNoise])
def test_low_bits_are_uniform(kind):
    """The grid is fine against the noise and every point of it is in reach."""
    low = kind().draw([(1.0, 100_000)]) & 255
    assert stats.chisquare(torch.bincount(low, minlength=256).numpy()).pvalue > 1e-8


@pytest.mark.parametrize("kind", [GaussianNoise, DiscreteGaussianNoise])
def test_every_call_is_fresh_and_empty_calls_are_empty(kind):
    noise = kind()
    blocks = [(1.0, 1000)]
    draws = [noise.draw(blocks), noise.draw(blocks), kind().draw(blocks)]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert int((one == other).sum()) == 0
    assert noise.draw([(1.0, 0)]).shape == (0,)
    assert len(set(noise.draw([(1.0, 2), (1.0, 0), (1.0, 3)]).tolist())) == 5


@pytest.mark.parametrize("kind", [GaussianNoise, DiscreteGaussianNoise])
def test_private_noise_cannot_be_stored_or_seeded(kind):
    assert kind().insecure is False
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        pickle.dumps(kind())
    with pytest.raises(TypeError):
        kind(7)


def test_test_doubles_say_so():
    assert InsecureZeroNoise().insecure
    assert not InsecureZeroNoise().draw(BLOCKS).any()
    assert InsecureZeroNoise().draw(BLOCKS).shape == (90_000,)
    assert InsecureZeroNoise().draw(BLOCKS).dtype == torch.int64
    seeded = InsecureSeededNoise(3)
    assert seeded.insecure
    first, second = seeded.draw([(1.0, 500)]), seeded.draw([(1.0, 500)])
    assert int((first == second).sum()) == 0, "one object goes on; only a new one repeats"
    assert torch.equal(InsecureSeededNoise(3).draw([(1.0, 500)]), first)
    assert not torch.equal(InsecureSeededNoise(4).draw([(1.0, 500)]), first)
