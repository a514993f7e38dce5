"""The mechanism: charge, noise, decode. Property tests T1 and T3 to T6 of the specification run on the real path.

Noise that is measured is given 5.5 standard deviations: each test fails by chance with a probability below 1e-6.
"""

import copy
import dataclasses
import gc
import math
from dataclasses import replace

import pytest
import torch

from privacy.clipping.norms import AutomaticClip, FlatClip, NoUpdate, PerAdapterClip, PsacClip
from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import Contribution, Plan, contribute
from privacy.errors import BudgetExceeded, CorruptRun
from privacy.events import ExampleLevelPoisson, Poisson
from privacy.ledger.ledger import Charge, Ledger
from privacy.mechanism import Release, charged_release, reopened_release
from privacy.queries import BoundedMean, NormBit, NormHistogram
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise, InsecureSeededNoise, InsecureZeroNoise
from privacy.randomness.rng import torch_generator
from privacy.randomness.sampling import CohortSampler
from tests.cases.drawn import cohort

SAMPLING = Poisson(0.1, 1000)  # 100 expected units
SIZES = (9_000, 30_000, 1_000)
DIM = sum(SIZES)
BLOCKS = PerAdapterClip((0.5, 2.0, 8.0), SIZES)
PRIVATE_NOISE = [GaussianNoise, DiscreteGaussianNoise]


def release(total, plan, ledger, *, round=0, sampling=SAMPLING, noise=None):
    return charged_release(total, plan, cohort(sampling, round, ledger), ledger=ledger, noise=noise)


def correlation(left, right):
    return float(torch.corrcoef(torch.stack([left.double(), right.double()]))[0, 1])


def rows(n, dim=DIM, seed=0):
    return torch.randn(n, dim, generator=torch_generator(seed, "rows"))


@pytest.mark.parametrize("noise", PRIVATE_NOISE)
class TestT1NoiseScale:
    """Zero updates: what comes out is the noise, with the promised std in every block and every answer."""

    def test_per_adapter_blocks(self, noise, ledger):
        plan = Plan(BLOCKS, 1.3)
        update = release(Contribution.zero(plan), plan, ledger, noise=noise()).update
        scale = sum(c * math.sqrt(d) for c, d in zip(BLOCKS.bounds, SIZES, strict=True))
        for bound, block in zip(BLOCKS.bounds, update.split(SIZES), strict=True):
            promised = 1.3 * math.sqrt(scale * bound / math.sqrt(len(block))) / 100
            assert abs(float(block.std()) / promised - 1) < 5.5 / math.sqrt(2 * len(block))
            assert abs(float(block.mean())) < 5.5 * promised / math.sqrt(len(block))

    @pytest.mark.parametrize("make", [FlatClip, AutomaticClip, PsacClip])
    def test_one_threshold(self, noise, ledger, make):
        plan = Plan(make(0.25, DIM), 1.7)
        update = release(Contribution.zero(plan), plan, ledger, noise=noise()).update
        assert abs(float(update.std()) / (1.7 * 0.25 / 100) - 1) < 5.5 / math.sqrt(2 * DIM)

    def test_answers(self, noise, ledger):
        """A histogram wide enough to measure, beside an update: each has its own std."""
        histogram = NormHistogram(tuple(float(edge) for edge in range(20_000)), 12.5)
        plan = Plan(FlatClip(1.0, 10_000), 0.5, (histogram, BoundedMean(3.0, 6.0)))
        released = release(Contribution.zero(plan), plan, ledger, noise=noise())
        counts = released.answer("norm-histogram")
        assert abs(float(counts.std()) / 12.5 - 1) < 5.5 / math.sqrt(2 * 20_001)
        assert abs(float(released.update.std()) / 0.005 - 1) < 5.5 / math.sqrt(2 * 10_000)
        plan = Plan(NoUpdate(), 1.0, (BoundedMean(3.0, 6.0),))
        means = [float(release(Contribution.zero(plan), plan, ledger, noise=noise()).answers[0]) for _ in range(300)]
        assert abs(float(torch.tensor(means).std()) / 6.0 - 1) < 5.5 / math.sqrt(2 * 300)


@pytest.mark.parametrize("noise", PRIVATE_NOISE)
def test_t3_noise_never_repeats(noise, ledger):
    """Between rounds, between blocks of one round, and between a run and a resumed one (a fresh noise object)."""
    histogram = NormHistogram(tuple(float(edge) for edge in range(9_999)), 12.5)
    plan = Plan(FlatClip(1.0, 20_000), 1.0, (histogram,))
    total, same = Contribution.zero(plan), noise()
    first, second = (release(total, plan, ledger, round=t, noise=same) for t in (0, 1))
    resumed = release(total, plan, ledger, round=1, noise=noise())
    limit = 5.5 / math.sqrt(20_000)
    assert abs(correlation(first.update, second.update)) < limit
    assert abs(correlation(second.update, resumed.update)) < limit
    assert abs(correlation(first.update, resumed.update)) < limit
    assert abs(correlation(*first.update.split(10_000))) < 5.5 / math.sqrt(10_000)
    assert abs(correlation(first.update[:10_000], first.answers[0])) < 5.5 / math.sqrt(10_000)
    assert abs(correlation(first.answers[0], second.answers[0])) < 5.5 / math.sqrt(10_000)


def test_t3_would_notice_reused_noise(ledger):
    """The planted fault: a seed that is set again every round."""
    plan = Plan(FlatClip(1.0, 20_000), 1.0)
    total = Contribution.zero(plan)
    first, second = (release(total, plan, ledger, noise=InsecureSeededNoise(7)) for _ in range(2))
    assert correlation(first.update, second.update) == pytest.approx(1.0)


class TestT4Scale:
    """The output's scale must not tell how many units there were."""

    plan = Plan(FlatClip(1.0, 5), 1.0, (NormBit(1.0, 5.0),))

    def responses(self, ledger, realised_divisor):
        """Length of the released update when 1, 20, 90 and 150 units all say the same."""
        unit, lengths = torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0]]), []
        for n in (1, 20, 90, 150):
            total = contribute(Units(unit.expand(n, 5)), self.plan)
            sampling = Poisson(1.0, n) if realised_divisor else SAMPLING  # the planted fault expects who came
            released = release(total, self.plan, ledger, sampling=sampling, noise=InsecureZeroNoise())
            lengths.append(float(released.update.norm()))
        return lengths

    @staticmethod
    def proportional_to_the_sum(lengths):
        return lengths == pytest.approx([lengths[0] * n for n in (1, 20, 90, 150)], rel=1e-6)

    def test_the_divisor_is_the_expected_cohort(self, ledger):
        lengths = self.responses(ledger, realised_divisor=False)
        assert self.proportional_to_the_sum(lengths)
        assert lengths[0] == pytest.approx(1 / 100, rel=1e-6)

    def test_a_realised_divisor_fails_this_test(self, ledger):
        assert not self.proportional_to_the_sum(self.responses(ledger, realised_divisor=True))

    @pytest.mark.parametrize("units", [1, 300])
    def test_the_noise_does_not_scale_either(self, ledger, units):
        plan = Plan(FlatClip(1.0, 20_000), 1.0)
        total = contribute(Units(torch.zeros(units, 20_000)), plan)
        update = release(total, plan, ledger).update
        assert abs(float(update.std()) / 0.01 - 1) < 5.5 / math.sqrt(40_000)


def test_where_records_are_sampled_rows_are_counted_not_units(ledger):
    """More rows than there are units, and the mean is over the expected number of records."""
    plan, sampling = Plan(FlatClip(1.0, 5), 1.0), ExampleLevelPoisson(0.5, 10, "group:patient", 4, 40)
    total = contribute(Units(torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0]]).expand(25, 5)), plan)
    released = release(total, plan, ledger, sampling=sampling, noise=InsecureZeroNoise())
    assert float(released.update.norm()) == pytest.approx(25 / 20, rel=1e-6)
    assert ledger.events[0].sampling == sampling
    with pytest.raises(ValueError, match="at most one sensitivity"):
        release(total, plan, ledger, round=1, sampling=Poisson(0.5, 10))


def test_t5_an_empty_cohort_is_charged_and_noised(ledger):
    plan = Plan(FlatClip(1.0, 20_000), 1.0, (NormBit(1.0, 5.0),))
    empty = contribute(Units(torch.zeros(0, 20_000)), plan)
    released = release(empty, plan, ledger)
    assert released.loudness == 1.0
    assert ledger.steps == ["charge", "released"]
    assert abs(float(released.update.std()) / 0.01 - 1) < 5.5 / math.sqrt(40_000)
    assert float(released.answers[0]) != 0


@pytest.mark.parametrize("noise", PRIVATE_NOISE)
def test_t6_the_ledger_holds_the_noise_that_was_added(tmp_path, noise):
    """Read back: effective multiplier of the charge on disk = what the released numbers show."""
    histogram = NormHistogram(tuple(float(edge) for edge in range(19_999)), 2.0)
    plan = Plan(replace(BLOCKS), 1.3, (histogram,))
    commitment = Commitment(
        unit="client",
        adjacency="add_remove",
        population=1000,
        epsilon=20.0,
        delta=1e-5,
        floor=(FloorStep("round", SAMPLING, plan.effective_noise_multiplier, 1),),
    )
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        released = release(Contribution.zero(plan), plan, ledger, noise=noise())
    with Ledger.open(tmp_path / "ledger.jsonl", read_only=True) as ledger:
        (charge,) = ledger.charges
        assert charge.released_at is not None
        assert ledger.not_private is None
    joint = 0.0
    blocks = [*(released.update * 100).split(SIZES), released.answers[0]]
    for sensitivity, block in zip([*BLOCKS.bounds, 1.0], blocks, strict=True):
        joint += (sensitivity / float(block.double().std())) ** 2  # the joint Gaussian, from measured stds alone
    assert abs(joint**-0.5 / charge.noise_multiplier - 1) < 5.5 / math.sqrt(2 * min(SIZES))
    update, answers = charge.event.components
    assert (update.name, update.dim, answers.name, answers.dim) == ("update", DIM, "norm-histogram", 20_000)
    assert abs(float(released.answers[0].std()) / answers.noise_std - 1) < 5.5 / math.sqrt(2 * 20_000)


def test_the_signal_comes_through_under_the_noise(ledger):
    plan = Plan(FlatClip(1.0, 4), 1.0, (NormBit(1.0, 5.0), BoundedMean(2.0, 4.0)))
    units = Units(torch.tensor([[0.3, 0.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]]), losses=torch.tensor([0.5, 9.0]))
    released = release(contribute(units, plan), plan, ledger, noise=InsecureZeroNoise())
    torch.testing.assert_close(released.update, torch.tensor([0.003, 0.01, 0.0, 0.0]))
    assert released.answer("norm-bit").tolist() == [0.0]
    assert released.answer("bounded-mean").tolist() == [2.5]
    with pytest.raises(ValueError, match=r"name .*'norm-bit', 'bounded-mean'.* got 'loss'"):
        released.answer("loss")


def test_a_release_of_queries_only(ledger):
    plan = Plan(NoUpdate(), 1.0, (NormHistogram((0.5, 1.0), 10.0),))
    released = release(contribute(Units(rows(50, 7)), plan), plan, ledger)
    assert released.update.shape == (0,)
    assert released.answers[0].shape == (3,)
    assert [part.name for part in ledger.events[0].components] == ["norm-histogram"]


class Spy:
    """A noise that notes when it is asked, and may fail."""

    insecure = False

    def __init__(self, ledger, fails=False):
        self.ledger, self.fails = ledger, fails

    def draw(self, blocks):
        self.ledger.steps.append("draw")
        if self.fails:
            raise RuntimeError("the noise source failed")
        return torch.zeros(sum(length for _, length in blocks), dtype=torch.int64)


class TestOrder:
    plan = Plan(FlatClip(1.0, 5), 1.0, (NormBit(1.0, 5.0),))

    def total(self):
        return contribute(Units(rows(3, 5)), self.plan)

    def test_charge_then_noise_then_released(self, ledger):
        release(self.total(), self.plan, ledger, noise=Spy(ledger))
        assert ledger.steps == ["charge", "draw", "released"]

    def test_no_noise_without_budget(self, broke_ledger):
        with pytest.raises(BudgetExceeded):
            release(self.total(), self.plan, broke_ledger, noise=Spy(broke_ledger))
        assert broke_ledger.steps == []

    def test_a_failure_after_the_charge_leaves_it_charged(self, ledger):
        with pytest.raises(RuntimeError, match="noise source failed"):
            release(self.total(), self.plan, ledger, noise=Spy(ledger, fails=True))
        assert ledger.steps == ["charge", "draw"]

    def test_a_failing_decoder_leaves_it_charged_and_not_released(self, ledger):
        class Failing(FlatClip):
            def decode(self, total, expected_units):
                raise RuntimeError("decoder failed")

        plan = Plan(Failing(1.0, 5), 1.0)
        with pytest.raises(RuntimeError, match="decoder failed"):
            release(Contribution.zero(plan), plan, ledger)
        assert ledger.steps == ["charge"]

    @pytest.mark.parametrize(
        "total",
        [
            Contribution.zero(Plan(FlatClip(1.0, 5), 1.0)),
            Contribution.zero(Plan(FlatClip(1.0, 6), 1.0, (NormBit(1.0, 5.0),))),
            Contribution(torch.full((5,), 1001 * 2**40), (torch.zeros(1, dtype=torch.int64),)),
            Contribution(torch.zeros(5, dtype=torch.int64), (torch.tensor([1001 * 2**40]),)),
        ],
    )
    def test_impossible_sums_are_refused_before_the_charge(self, ledger, total):
        with pytest.raises(ValueError, match="contribution"):
            release(total, self.plan, ledger)
        assert ledger.steps == []

    def test_bounds_follow_the_sampling(self, ledger):
        total = contribute(Units(torch.ones(150, 5)), self.plan)
        release(total, self.plan, ledger, sampling=Poisson(0.1, 150))
        with pytest.raises(ValueError, match=r"contribution .*L2 norm"):
            release(total, self.plan, ledger, sampling=Poisson(0.1, 149))
        assert ledger.steps == ["charge", "released"]

    @pytest.mark.parametrize("noise", [InsecureZeroNoise(), InsecureSeededNoise(3)])
    def test_insecure_noise_stamps_first(self, ledger, noise):
        release(self.total(), self.plan, ledger, noise=noise)
        assert ledger.steps == ["stamp", "charge", "released"]
        assert type(noise).__name__ in ledger.not_private
        release(self.total(), self.plan, ledger, round=1, noise=noise)
        assert ledger.steps.count("stamp") == 1

    def test_insecure_noise_stamps_a_real_ledger_on_disk(self, tmp_path):
        commitment = Commitment(
            unit="client",
            adjacency="add_remove",
            population=1000,
            epsilon=20.0,
            delta=1e-5,
            floor=(FloorStep("round", SAMPLING, 0.9, 2),),
        )
        with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
            release(self.total(), self.plan, ledger, noise=InsecureZeroNoise())
        with Ledger.open(tmp_path / "ledger.jsonl", read_only=True) as ledger:
            assert "InsecureZeroNoise" in ledger.not_private

    @pytest.mark.parametrize("noise", PRIVATE_NOISE)
    def test_private_noise_does_not_stamp(self, ledger, noise):
        release(self.total(), self.plan, ledger, noise=noise())
        assert ledger.not_private is None


class TestCohort:
    """What is charged is how the cohort was drawn, and it was drawn for this release."""

    plan = Plan(FlatClip(1.0, 5), 1.0)

    def release(self, ledger, drawn, noise=None):
        return charged_release(Contribution.zero(self.plan), self.plan, drawn, ledger=ledger, noise=noise)

    def test_the_charge_is_that_of_its_sampling(self, ledger):
        sampler = CohortSampler.create()
        for sampling, label, round in ((SAMPLING, "round", 3), (Poisson(0.5, 8, "record"), "histogram", 0)):
            released = self.release(ledger, sampler.draw(sampling, round, label=label))
            event = ledger.events[-1]
            assert (event.sampling, event.label, event.round) == (sampling, label, round)
            assert released.expected_units == sampling.expected_units

    def test_a_batch_that_was_charged_is_not_released_again(self, ledger):
        sampler = CohortSampler.create()
        first = sampler.draw(SAMPLING, 1)
        self.release(ledger, first)
        with pytest.raises(ValueError, match=r"attempt 0.* drawn after the last charge .*draw another cohort"):
            self.release(ledger, first)
        with pytest.raises(ValueError, match="draw another cohort"):
            self.release(ledger, sampler.draw(SAMPLING, 1, attempt=2))
        assert ledger.steps == ["charge", "released"]
        self.release(ledger, sampler.draw(SAMPLING, 1, attempt=1))
        self.release(ledger, sampler.draw(SAMPLING, 2))
        self.release(ledger, sampler.draw(SAMPLING, 1, label="histogram"))
        assert len(ledger.events) == 4

    def test_a_cohort_from_a_seed_stamps_first(self, ledger):
        self.release(ledger, CohortSampler.insecure_from_seed(0).draw(SAMPLING, 1))
        assert ledger.steps == ["stamp", "charge", "released"]
        assert "seed" in ledger.not_private

    def test_nothing_else_is_a_cohort(self, ledger):
        with pytest.raises(AttributeError):
            self.release(ledger, SAMPLING)
        assert ledger.steps == []


class TestRelease:
    plan = Plan(FlatClip(1.0, 64), 1.0, (NormBit(1.0, 5.0),))

    def made(self, ledger, noise=None):
        total = contribute(Units(rows(20, 64)), self.plan)
        return total, release(total, self.plan, ledger, noise=noise)

    def test_only_the_mechanism_makes_one(self, ledger):
        with pytest.raises(TypeError, match=r"made by privacy\.mechanism\.charged_release only"):
            Release(self.plan, torch.zeros(64), (), 100.0, object())
        with pytest.raises(TypeError, match="missing"):
            Release(self.plan, torch.zeros(64), (), 100.0)
        _, released = self.made(ledger)
        with pytest.raises((TypeError, ValueError), match="seal"):
            dataclasses.replace(released, update=torch.zeros(64))
        with pytest.raises(dataclasses.FrozenInstanceError):
            released.update = torch.zeros(64)

    def test_types_and_shapes(self, ledger):
        _, released = self.made(ledger)
        assert released.update.dtype == torch.float32
        assert released.answers[0].dtype == torch.float64
        assert released.expected_units == 100
        assert released.plan is self.plan
        assert torch.equal(copy.deepcopy(released).update, released.update)

    def test_it_is_read_back_only_as_it_was_made(self, ledger):
        """For a run that is resumed; no noise is drawn."""
        _, released = self.made(ledger)
        event = ledger.events[-1]
        done = Charge(event, event.effective_noise_multiplier, 0, None, "then", released_at="now")
        said = {"label": event.label, "round": event.round, "sampling": event.sampling, "charges": [done]}
        again = reopened_release(self.plan, released.update, released.answers, **said)
        assert again.update is released.update
        assert again.answers == released.answers
        assert (again.plan, again.expected_units, again.loudness) == (self.plan, 100, released.loudness)
        pending = dataclasses.replace(done, released_at=None)
        for other in ({"label": "other"}, {"round": event.round + 1}, {"charges": []}, {"charges": [pending]}):
            with pytest.raises(CorruptRun, match="knows of no release"):
                reopened_release(self.plan, released.update, released.answers, **{**said, **other})
        quieter = dataclasses.replace(self.plan, noise_multiplier=2.0)
        with pytest.raises(CorruptRun, match="knows of no release"):
            reopened_release(quieter, released.update, released.answers, **said)
        for update, answers in (
            (released.update[:-1], released.answers),
            (released.update.double(), released.answers),
            (released.update, ()),
            (released.update, (released.answers[0].float(),)),
        ):
            with pytest.raises(CorruptRun, match="do not have the form"):
                reopened_release(self.plan, update, answers, **said)

    def test_it_says_nothing_but_shapes(self, ledger):
        _, released = self.made(ledger)
        assert repr(released) == "Release(update of 64, answers (norm-bit), expected_units 100.0)"

    @pytest.mark.parametrize("noise", PRIVATE_NOISE)
    def test_the_exact_sum_cannot_be_reached_from_it(self, ledger, noise):
        total, released = self.made(ledger, noise())
        assert not self.reaches(released, total)

    def test_a_leak_would_be_found(self, ledger):
        total, released = self.made(ledger)
        object.__setattr__(released, "leak", {"debug": [total.encoded.double() / 100]})
        assert self.reaches(released, total)
        total, released = self.made(ledger, InsecureZeroNoise())
        assert self.reaches(released, total)

    @staticmethod
    def reaches(released, total):
        """Follow every reference out of a Release: does a tensor, or the memory behind it, hold the un-noised total?

        Compared by direction, so that no scale hides it; float32 rounding changes a direction by about 1e-7.
        """
        exact = total.encoded.double()
        seen, frontier = set(), [released]
        while frontier:
            item = frontier.pop()
            if id(item) in seen or isinstance(item, type) or callable(item):
                continue
            seen.add(id(item))
            frontier.extend(gc.get_referents(item))
            if isinstance(item, torch.Tensor) and item.untyped_storage().nbytes() >= 64 * item.element_size():
                whole = torch.tensor([], dtype=item.dtype).set_(item.untyped_storage()).double()
                windows = whole.unfold(0, 64, 1)
                cosines = (windows @ exact) / (windows.norm(dim=1) * exact.norm()).clamp(min=1e-300)
                if float(cosines.abs().max()) > 1 - 1e-6:
                    return True
        return False

    def test_errors_carry_no_sums(self, ledger):
        class WrongLength:
            insecure = False

            def draw(self, blocks):
                return torch.zeros(3, dtype=torch.int64)

        total = contribute(Units(rows(20, 64)), self.plan)
        with pytest.raises(RuntimeError) as error:
            release(total, self.plan, ledger, noise=WrongLength())
        text = repr(error.value) + "".join(error.value.args)
        assert not any(str(abs(int(number))) in text for number in total.encoded if abs(int(number)) > 999)
        assert ledger.steps == ["charge"]
