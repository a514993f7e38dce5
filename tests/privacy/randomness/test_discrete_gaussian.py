"""The exact sampler: its law, its coins, and that nothing but integers decides.

Its bits cannot be seeded: every test of its law fails by chance, each with a probability below 1e-6.
"""

import ast
import inspect
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from privacy.randomness import discrete_gaussian as module
from privacy.randomness.discrete_gaussian import discrete_gaussian
from privacy.randomness.noise import DiscreteGaussianNoise
from privacy.randomness.rng import SecureRandom


def law(s):
    """Probabilities of -12s..12s; what lies outside has probability below exp(-72)."""
    n = np.arange(-12 * s, 12 * s + 1)
    mass = np.exp(-(n**2) / (2 * s**2))
    return n, mass / mass.sum()


def chi_square_pvalue(samples, numbers, probabilities):
    """Goodness of fit with all cells of expectation below 10 pooled into one."""
    counts = np.array([(samples == number).sum() for number in numbers])
    expected = probabilities * len(samples)
    rare = expected < 10
    observed = np.append(counts[~rare], len(samples) - counts[~rare].sum())
    wanted = np.append(expected[~rare], len(samples) - expected[~rare].sum())
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize("s", [1, 2, 3, 10])
def test_small_parameters_have_the_exact_law(s):
    samples = discrete_gaussian(s, 300_000, SecureRandom())
    assert samples.dtype == np.int64
    assert chi_square_pvalue(samples, *law(s)) > 1e-8


def test_the_chi_square_test_would_notice():
    """Power: a rounded continuous Gaussian differs from the discrete one of s = 1 by two per cent in variance."""
    rounded = np.rint(np.random.default_rng(0).standard_normal(300_000)).astype(np.int64)
    assert chi_square_pvalue(rounded, *law(1)) < 1e-12


@pytest.mark.parametrize("s", [math.ceil(1.7618 * 2**40), 2**56, 2**40 + 1])
def test_large_parameters_look_like_the_gaussian(s):
    n = 200_000
    x = discrete_gaussian(s, n, SecureRandom()) / s
    assert abs(x.mean()) < 6 / math.sqrt(n)
    assert abs(x.var() - 1) < 6 * math.sqrt(2 / n)
    assert abs(stats.kurtosis(x)) < 6 * math.sqrt(24 / n)
    assert stats.kstest(x, "norm").pvalue > 1e-8


def test_every_grid_point_is_in_reach():
    """The low bits are uniform: no lattice coarser than the grid shows through (Mironov's attack needs one)."""
    samples = discrete_gaussian(math.ceil(1.1 * 2**40), 100_000, SecureRandom())
    for bits in (1, 3, 8):
        assert stats.chisquare(np.bincount(samples & (2**bits - 1), minlength=2**bits)).pvalue > 1e-8


def test_samples_are_in_no_particular_order():
    """Batches are filled by rejection in many passes; a value must not tell its place."""
    x = discrete_gaussian(2**40, 150_000, SecureRandom()) / 2**40
    for numbers in (x, np.abs(x)):
        for lag in (1, 2, 7):
            assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 5.5 / math.sqrt(len(x))
        halves = np.arange(len(x)) % (1 << 16) > (1 << 15)
        assert abs(stats.ttest_ind(numbers[halves], numbers[~halves]).statistic) < 5.5


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 70_001])
def test_any_count(count):
    assert discrete_gaussian(5, count, SecureRandom()).shape == (count,)


@pytest.mark.parametrize("s", [0, -1, 1.5, 2**56 + 1])
def test_impossible_parameters_are_refused(s):
    with pytest.raises(ValueError, match="s must be"):
        discrete_gaussian(s, 1, SecureRandom())


class TestCoins:
    """The parts, so that a fault in one is not averaged away in the whole."""

    n = 400_000

    def within(self, successes, probability):
        spread = math.sqrt(self.n * probability * (1 - probability))
        assert abs(int(successes.sum()) - self.n * probability) <= 5.5 * spread

    @pytest.mark.parametrize("denominator", [1, 2, 3, 6, 10, 1000])
    def test_one_in(self, denominator):
        self.within(module._Coins(SecureRandom()).one_in(denominator, self.n), 1 / denominator)

    @pytest.mark.parametrize("limit", [3 * 2**62, 2**63 + 1, 2**64 - 1])
    def test_words_below(self, limit):
        words = module._Coins(SecureRandom()).words_below(limit, self.n)
        assert int(words.max()) < limit
        for share in (0.25, 0.5, 0.9):
            self.within(words < np.uint64(int(limit * share)), int(limit * share) / limit)

    def test_words_beyond_a_whole_number_of_cycles_are_drawn_again(self, monkeypatch):
        """Too rare to see in a histogram, so played through: 65 of 65,000 lanes make a coin of exactly 1/1000."""
        coins = module._Coins(SecureRandom())
        lanes = iter([[64, 65, 64_999, 65_000, 65_535], [0, 65_001], [70]])
        monkeypatch.setattr(coins, "_lanes", lambda count: np.array(next(lanes), dtype=np.uint16))
        assert coins.one_in(1000, 5).tolist() == [True, False, False, True, False]
        words = iter([[2**63, 2**63 + 5, 3], [2**63 + 4]])
        monkeypatch.setattr(coins, "words", lambda count: np.array(next(words), dtype=np.uint64))
        assert coins.words_below(2**63 + 5, 3).tolist() == [2**63, 2**63 + 4, 3]

    @pytest.mark.parametrize(("numerator", "denominator"), [(1, 2), (1, 1), (1, 7)])
    def test_exp_minus(self, numerator, denominator):
        coins = module._Coins(SecureRandom())

        def coin(members, i):
            return coins.one_in(denominator * i // numerator, members.size)

        verdict = module._exp_minus(np.arange(self.n), coin)
        self.within(verdict, math.exp(-numerator / denominator))

    def test_half_normal_integers(self):
        coins = module._Coins(SecureRandom())
        k = module._half_normal_integers(self.n, coins)
        mass = np.exp(-(np.arange(12) ** 2) / 2)
        # kept share: sum_k exp(-k^2/2) of the geometric's 1 / (1 - exp(-1/2))
        assert len(k) / self.n == pytest.approx(mass.sum() * (1 - math.exp(-0.5)), abs=5.5 * 0.5 / math.sqrt(self.n))
        assert chi_square_pvalue(k, np.arange(12), mass / mass.sum()) > 1e-8


def test_no_float_enters_the_sampling():
    """Read from the source: no float, no true division, no power with it, no float dtype, no mathematical function."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, (float, complex))), ast.unparse(node)
        assert not isinstance(node, ast.Div), "true division makes a float"
        assert not isinstance(node, ast.Pow), "a power may make a float"
        if isinstance(node, ast.Attribute):
            assert "float" not in node.attr, ast.unparse(node)
            assert node.attr not in {"exp", "log", "sqrt", "normal", "uniform", "mean", "true_divide"}, ast.unparse(
                node
            )
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"math", "random", "scipy", "torch"}, ast.unparse(node)
        if isinstance(node, ast.Name):
            assert node.id != "float"


def test_every_array_on_the_way_is_integer_or_boolean(monkeypatch):
    """And watched while it runs: what numpy makes inside the module has no float dtype."""
    seen = set()
    for name in ("_exp_minus", "_all_true", "_repeat", "_half_normal_integers", "_samples"):
        real = getattr(module, name)

        def watched(*args, real=real):
            result = real(*args)
            seen.update(value.dtype.kind for value in (*args, result) if isinstance(value, np.ndarray))
            return result

        monkeypatch.setattr(module, name, watched)
    discrete_gaussian(2**40, 5_000, SecureRandom())
    assert seen == {"i", "b"}


def test_noise_parameter_is_rounded_up():
    """z 2^40 is rounded up to an integer, so the noise is never less than promised."""
    asked = []

    def spy(s, count, random):
        asked.append((s, count))
        return np.zeros(count, dtype=np.int64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privacy.randomness.noise.discrete_gaussian", spy)
        DiscreteGaussianNoise().draw([(1.0, 2), (1.7618, 3), (2.0**-20, 4)])
    (one, two, three) = asked
    assert one == (2**40, 2)
    assert two[1] == 3
    assert 0 <= two[0] - Fraction(1.7618) * 2**40 < 1
    assert three == (2**20, 4)
