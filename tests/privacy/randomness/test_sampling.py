"""Cohorts: exactly Poisson, repeatable by the run alone, secret to everyone else.

A fresh secret cannot be seeded: every test of its law fails by chance, each with a probability below 1e-6.
"""

import copy
import dataclasses
import math
import os
import pickle
import stat

import numpy as np
import pytest
from scipy import stats
from scipy.special import rel_entr

from privacy.errors import CorruptRun
from privacy.events import ExampleLevelPoisson, Poisson
from privacy.randomness.sampling import Cohort, CohortSampler, RemoteSampler, most_drawn


def test_cohort_sizes_are_binomial():
    sampler, n, rate, rounds = CohortSampler.create(), 1000, 0.1, 4000
    sizes = np.array([len(sampler.poisson(n, rate, round)) for round in range(rounds)])
    variance = n * rate * (1 - rate)
    assert abs(sizes.mean() - n * rate) < 6 * math.sqrt(variance / rounds)
    assert abs(sizes.var() / variance - 1) < 6 * math.sqrt(2 / rounds)


@pytest.mark.parametrize("rate", [0.5, 0.013, 1 - 2**-20])
def test_every_id_has_the_same_chance(rate):
    sampler, n, rounds = CohortSampler.create(), 200, 2000
    joined = np.zeros((rounds, n))
    for round in range(rounds):
        joined[round, sampler.poisson(n, rate, round)] = 1
    low, high = stats.binom.interval(1 - 1e-9, rounds, rate)  # exact: no normal law holds where nearly all join
    assert low <= joined.sum(axis=0).min()
    assert joined.sum(axis=0).max() <= high


def test_joining_is_independent_between_ids_and_between_rounds():
    """Pairs of ids in one round, and one id in successive rounds: correlations of 0/1 indicators."""
    sampler, n, rate, rounds = CohortSampler.create(), 300, 0.2, 5000
    joined = np.zeros((rounds, n))
    for round in range(rounds):
        joined[round, sampler.poisson(n, rate, round)] = 1
    pairs = np.corrcoef(joined.T)[np.triu_indices(n, 1)]
    # The joint rounds of a pair are hypergeometric: one of the 44,850 pairs is beyond this once in 10^8 runs.
    assert np.abs(pairs).max() < 7.5 / math.sqrt(rounds)
    assert abs(pairs.std() * math.sqrt(rounds) - 1) < 0.05  # as spread out as independent ones, no less
    centred = joined - rate
    for lag in (1, 2):
        between = (centred[:-lag] * centred[lag:]).mean() / (rate * (1 - rate))
        assert abs(between) < 6 / math.sqrt((rounds - lag) * n)


def test_releases_of_other_names_have_cohorts_of_their_own():
    """A histogram and the first round, both of round 0, must not be of the same units."""
    sampler, sampling = CohortSampler.create(), Poisson(0.5, 200)
    cohorts = [sampler.draw(sampling, 0, label=label).ids.tolist() for label in ("round", "histogram", "round")]
    assert cohorts[0] == cohorts[2] != cohorts[1]


def test_records_of_one_unit_join_independently_and_with_the_charged_rate():
    """K, how many of a unit's G records come together, is Binomial(G, q), whatever the other units bring."""
    sampler, most, rate, rounds = CohortSampler.create(), 4, 0.3, 4000
    sampling = ExampleLevelPoisson(rate, 50, "group:patient", most, 50 * most)
    together = np.zeros(most + 1)
    for round in range(rounds):
        drawn = sampler.draw(sampling, round)
        assert drawn.sampling == sampling
        together += np.bincount(np.bincount(drawn.ids // most, minlength=50), minlength=most + 1)
    expected = stats.binom.pmf(range(most + 1), most, rate) * together.sum()
    assert stats.chisquare(together, expected).pvalue > 1e-6
    fewer = ExampleLevelPoisson(1.0, 50, "group:patient", most, 123)  # records, not units times the cap
    assert sampler.draw(fewer, 1).ids.tolist() == list(range(123))


def test_the_probability_is_exact_to_the_last_bit():
    """The threshold on a 64-bit word is rate * 2^64 itself for every rate of 2^-11 or more."""
    from fractions import Fraction

    for rate in (0.1, 1 / 3, 0.02, 2**-11, 1 - 2**-53):
        assert Fraction(int(rate * 2.0**64), 2**64) == Fraction(rate)
    for rate in (1e-6, 1e-12, 2**-70):
        assert 0 <= Fraction(rate) - Fraction(int(rate * 2.0**64), 2**64) < Fraction(1, 2**64)


def test_ids_are_sorted_distinct_and_in_range():
    sampler = CohortSampler.create()
    for n, rate in ((1, 0.5), (10, 1.0), (200_000, 0.3), (1_000_000, 1e-4)):
        cohort = sampler.poisson(n, rate, 3)
        assert cohort.dtype == np.int64
        assert (np.diff(cohort) > 0).all()
        assert len(cohort) == 0 or (cohort[0] >= 0 and cohort[-1] < n)
    assert sampler.poisson(10, 1.0, 0).tolist() == list(range(10))


def test_equal_names_give_equal_cohorts_and_different_ones_do_not():
    secret = CohortSampler.create()._secret
    one, same = CohortSampler(secret, insecure=False), CohortSampler(secret, insecure=False)
    base = one.poisson(1000, 0.1, 7)
    assert base.tolist() == same.poisson(1000, 0.1, 7).tolist() == one.poisson(1000, 0.1, 7, 0, label="round").tolist()
    others = [
        one.poisson(1000, 0.1, 8),
        one.poisson(1000, 0.1, 7, attempt=1),
        one.poisson(1000, 0.1, 7, label="histogram"),
        one.poisson(1001, 0.1, 7),
        CohortSampler.create().poisson(1000, 0.1, 7),
    ]
    for other in others:  # of about 100 ids two independent cohorts share about 10
        assert len(np.intersect1d(base, other)) < 45


def test_a_rate_that_changed_draws_anew():
    """Else raising the rate would only add ids: the two cohorts would tell on each other."""
    sampler = CohortSampler.create()
    low, high = sampler.poisson(2000, 0.1, 7), sampler.poisson(2000, 0.2, 7)
    assert not set(low.tolist()) <= set(high.tolist())


def test_the_stream_is_the_same_on_every_machine():
    assert CohortSampler.insecure_from_seed(1).poisson(40, 0.2, 0).tolist() == [4, 5, 15, 20, 36]
    long = CohortSampler.insecure_from_seed(1).poisson(300_000, 0.0001, 0)  # more than one block of words
    assert long.tolist() == [
        3477,
        14091,
        17508,
        28561,
        79582,
        106096,
        108666,
        118229,
        127929,
        136822,
        171417,
        191519,
        195689,
        207651,
        209906,
        219022,
        239887,
        256935,
        270104,
        280185,
        285168,
        294627,
    ]


def test_draw_follows_the_event():
    sampler = CohortSampler.create()
    assert sampler.draw(Poisson(0.1, 1000), 3, 1).ids.tolist() == sampler.poisson(1000, 0.1, 3, 1).tolist()


class TestSecret:
    def test_a_resumed_run_draws_the_same_cohort(self, tmp_path):
        sampler = CohortSampler.create()
        sampler.save(tmp_path / "cohort.secret")
        resumed = CohortSampler.load(tmp_path / "cohort.secret")
        assert resumed.poisson(1000, 0.1, 4, 2).tolist() == sampler.poisson(1000, 0.1, 4, 2).tolist()
        assert not resumed.insecure

    def test_only_the_owner_can_read_the_file(self, tmp_path):
        path = tmp_path / "cohort.secret"
        before = os.umask(0)
        try:
            CohortSampler.create().save(path)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.listdir(tmp_path) == ["cohort.secret"], "no scratch file may stay"
        path.chmod(0o640)
        with pytest.raises(ValueError, match="got 640; chmod 600"):
            CohortSampler.load(path)

    def test_saving_is_all_or_nothing(self, tmp_path, monkeypatch):
        path = tmp_path / "cohort.secret"
        first = CohortSampler.create()
        first.save(path)

        def full(*args):
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            CohortSampler.create().save(path)
        monkeypatch.undo()
        assert CohortSampler.load(path).poisson(99, 0.5, 0).tolist() == first.poisson(99, 0.5, 0).tolist()
        assert os.listdir(tmp_path) == ["cohort.secret"]

    @pytest.mark.parametrize("damage", ["", "x", "lacquer cohort secret 1\nzz", "lacquer cohort secret 1\n00ff", "é\n"])
    def test_damaged_files_are_corrupt_runs(self, tmp_path, damage):
        path = tmp_path / "cohort.secret"
        path.write_text(damage, encoding="utf-8")
        path.chmod(0o600)
        with pytest.raises(CorruptRun, match="holds no cohort secret"):
            CohortSampler.load(path)

    def test_the_secret_does_not_show_or_travel(self):
        sampler = CohortSampler.create()
        assert repr(sampler) == "CohortSampler(secret withheld)"
        assert not hasattr(sampler, "__dict__")
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="holds the cohort secret"):
                attempt(sampler)

    def test_a_seeded_sampler_is_marked_and_cannot_pass_for_a_secret(self, tmp_path):
        seeded = CohortSampler.insecure_from_seed(3)
        assert seeded.insecure
        assert not CohortSampler.create().insecure
        with pytest.raises(ValueError, match="seed must"):
            CohortSampler.insecure_from_seed(-1)
        assert repr(seeded) == "CohortSampler(INSECURE)"
        with pytest.raises(ValueError, match="insecure samplers must not be saved"):
            seeded.save(tmp_path / "cohort.secret")
        assert not (tmp_path / "cohort.secret").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1, 0), "n must be"),
        ((10, 0.0, 0), "rate must be"),
        ((10, 1.1, 0), "rate must be"),
        ((10, 0.1, -1), "round must be"),
        ((10, 0.1, 1.0), "round must be"),
        ((10, 0.1, 1, -1), "attempt must be"),
    ],
)
def test_impossible_draws_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CohortSampler.create().poisson(*arguments)


def test_a_cohort_is_made_by_a_sampler_and_nobody_joins_it():
    sampling = Poisson(0.2, 40, "record")
    drawn = CohortSampler.insecure_from_seed(1).draw(sampling, 0, 2, label="histogram")
    assert (drawn.sampling, drawn.round, drawn.attempt, drawn.label) == (sampling, 0, 2, "histogram")
    assert drawn.insecure
    assert not CohortSampler.create().draw(sampling, 0).insecure
    assert len(drawn) == len(drawn.ids)
    values = (np.arange(3), sampling, "round", 0, 0, False)
    with pytest.raises(TypeError, match=r"made by CohortSampler\.draw only"):
        Cohort(*values, object())
    with pytest.raises(TypeError, match="seal"):
        Cohort(*values)
    with pytest.raises((TypeError, ValueError), match="seal"):
        dataclasses.replace(drawn, ids=np.arange(40))
    with pytest.raises(ValueError, match="read-only"):
        drawn.ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        drawn.ids = np.arange(40)
    assert not any(str(one) in repr(drawn).replace("0.2", "").replace("40", "") for one in drawn.ids if one > 9)
    assert "withheld" in repr(drawn)


def test_a_cohort_of_several_holders_has_no_ids_and_bounds_for_each():
    sampling = Poisson(0.1, 330)
    drawn = RemoteSampler((300, 30)).draw(sampling, 2, 1, label="histogram")
    assert (drawn.sampling, drawn.round, drawn.attempt, drawn.label) == (sampling, 2, 1, "histogram")
    assert drawn.insecure is False
    assert drawn.ids.dtype == np.int64
    assert len(drawn) == 0
    first = RemoteSampler((1, 1)).draw(Poisson(0.1, 2), 3)
    assert (first.round, first.attempt, first.label, first.held) == (3, 0, "round", (1, 1))
    assert drawn.held == (most_drawn(300, 0.1), 30)
    assert drawn.most == sum(drawn.held)
    assert CohortSampler.create().draw(Poisson(1.0, 7), 0).most == 7
    with pytest.raises(ValueError, match="population must be 330, the units of all holders, got 329"):
        RemoteSampler((300, 30)).draw(Poisson(0.1, 329), 0)
    for units in ((), (3, 0)):
        with pytest.raises(ValueError, match="units must"):
            RemoteSampler(units)


@pytest.mark.parametrize(
    ("units", "rate", "all_of_them"),
    [(1, 0.5, True), (40, 1.0, True), (50, 0.02, False), (300, 0.1, False), (3000, 0.05, False), (10**6, 0.001, False)],
)
def test_what_a_sample_holds_at_most_is_next_to_never_exceeded(units, rate, all_of_them):
    most = most_drawn(units, rate)
    assert (most == units) == all_of_them
    assert units * rate <= most <= units
    assert stats.binom.sf(most, units, rate) <= 2.0**-100
    if not all_of_them:  # no looser than Chernoff's bound, word for word: exp(-n KL) crosses 2^-100 right above it
        low, high = (
            units * float(np.sum(rel_entr([p, 1 - p], [rate, 1 - rate]))) / math.log(2)
            for p in (most / units, (most + 1) / units)
        )
        assert low < 100 <= high


def test_groups_are_drawn_for_somebody_and_no_other_stream_is_used_again():
    sampler = CohortSampler.insecure_from_seed(1)
    assert sampler.group_of(8, 3).tolist() == [2, 1, 2, 1, 2, 0, 2, 2]
    assert sampler.group_of(1, 1).tolist() == [0]
    for n, groups in ((0, 3), (8, 0)):
        with pytest.raises(ValueError, match="must be an integer"):
            sampler.group_of(n, groups)
