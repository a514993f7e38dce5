"""Sums on the grid: one unit moves them by at most one unit of sensitivity (T2), exactly, and alike in any order."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.audit.contracts import adversarial_rows, assert_in_unit_ball
from privacy.clipping.norms import AutomaticClip, FlatClip, NoUpdate, PerAdapterClip, PsacClip
from privacy.clipping.units import Units, slabs, squared_norms
from privacy.clipping.whitening import AdaClip
from privacy.contribution import GRID, MAX_UNITS, Contribution, Plan, contribute, validate
from privacy.queries import BoundedMean, LossHistogram, NormBit, NormHistogram, OneHotVote
from privacy.randomness.rng import torch_generator

PARAMS = 33
QUERIES = (
    NormBit(1.0, 5.0),
    NormHistogram((0.5, 1.0), 10.0),
    LossHistogram((1.0,), 10.0),
    OneHotVote((1.0, 2.0), 10.0, simulated_noise_std_per_bound=0.1),
    BoundedMean(0.3, 1.0),
)
CLIPS = [
    FlatClip(1.0, PARAMS),
    PerAdapterClip((1.0, 0.2, 3.0), (10, 20, 3)),
    AutomaticClip(1.0, PARAMS),
    PsacClip(1.0, PARAMS),
    NoUpdate(),
]


def cohort(rows, seed=0):
    generator = torch_generator(seed, "cohort")
    losses = torch.rand(len(rows), generator=generator)
    return Units(rows, losses, torch.randint(-1, 2, (len(rows),), generator=generator))


def gaussian_rows(n, dim=PARAMS, seed=0, scale=1.0):
    return torch.randn(n, dim, generator=torch_generator(seed, "rows")) * scale


def parts(contribution):
    return (contribution.encoded, *contribution.answers)


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(parts(left), parts(right), strict=True))


def only(units, keep):
    return Units(units.rows[keep], units.losses[keep], units.votes[keep])


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int64], ids=str
)
def test_t2_one_unit_moves_each_component_by_at_most_its_sensitivity(clip, dtype):
    """Add or remove one adversarial unit: the difference of the two sums, per component, in exact integers."""
    plan = Plan(clip, 1.0, QUERIES)
    rows = torch.cat([gaussian_rows(6).to(dtype), adversarial_rows(PARAMS, dtype)])
    everyone = cohort(rows)
    total = contribute(everyone, plan)
    for absent in range(len(rows)):
        without = contribute(only(everyone, [i for i in range(len(rows)) if i != absent]), plan)
        for with_all, with_one_less in zip(parts(total), parts(without), strict=True):
            assert_in_unit_ball(with_all - with_one_less)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    row=st.lists(st.floats(width=64), min_size=1, max_size=40) | st.lists(st.floats(-2, 2), min_size=1, max_size=40),
    bound=st.floats(1e-6, 1e6),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64, torch.int64]),
)
def test_no_row_leaves_the_unit_ball(row, bound, dtype):
    numbers = torch.tensor([row], dtype=torch.float64)
    rows = numbers.nan_to_num(0.0).clamp(-1e15, 1e15).to(dtype) if dtype == torch.int64 else numbers.to(dtype)
    for clip in (FlatClip(bound, len(row)), AutomaticClip(bound, len(row)), PsacClip(bound, len(row))):
        assert_in_unit_ball(contribute(Units(rows), Plan(clip, 1.0)).encoded)


@pytest.mark.parametrize("dim", [1, 2, 3, 1_000, 300_001])
def test_rows_on_the_sphere_stay_inside_after_rounding(dim):
    """The hard case: measured norms of exactly 1, where a float norm may err either way."""
    for seed in range(3):
        rows = gaussian_rows(1, dim, seed, scale=100.0)
        encoded = contribute(Units(rows), Plan(FlatClip(1.0, dim), 1.0)).encoded
        assert_in_unit_ball(encoded)
        lost = 1 - float(squared_norms(encoded.double().unsqueeze(0)).sqrt()) / GRID
        assert 0 <= lost < 1e-9 * math.sqrt(dim), "rounding must not cost anything that matters"


class Unbounded(FlatClip):
    """A plug-in that forgot to clip, to normalise, and to drop NaN."""

    def encode(self, rows):
        return rows.to(torch.float64, copy=True)


@pytest.mark.parametrize("scale", [1.0 + 2**-52, 1.0 + 1e-9, 5.0, 1e30, 1e300])
def test_a_faulty_clip_map_cannot_break_the_bound(scale):
    rows = torch.eye(PARAMS, dtype=torch.float64) * scale
    rows[1] = scale / 2
    rows[2, 0] = math.nan
    rows[3, 0] = math.inf
    for i in range(5):
        assert_in_unit_ball(contribute(Units(rows[i : i + 1]), Plan(Unbounded(1.0, PARAMS), 1.0)).encoded)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "encode",
    [
        lambda self, rows: torch.zeros(2 * len(rows), PARAMS, dtype=torch.float64),  # two rows for one unit
        lambda self, rows: torch.zeros(len(rows), PARAMS + 1, dtype=torch.float64),
        lambda self, rows: torch.zeros(len(rows), PARAMS),
    ],
)
def test_a_clip_map_must_give_one_float64_row_per_unit(encode):
    broken = type("Broken", (FlatClip,), {"encode": encode})(1.0, PARAMS)
    with pytest.raises(ValueError, match="one row per unit"):
        contribute(Units(gaussian_rows(3)), Plan(broken, 1.0))


def test_a_query_must_give_one_float64_row_per_unit():
    class Twice(NormBit):
        def answer(self, units):
            return super().answer(units).repeat(2, 1)

    with pytest.raises(ValueError, match="one row per unit"):
        contribute(Units(gaussian_rows(3)), Plan(NoUpdate(), 1.0, (Twice(1.0, 5.0),)))


def test_values_are_those_of_the_clip_map_to_the_grid():
    rows = gaussian_rows(50)
    for clip in CLIPS[:4]:
        total = contribute(Units(rows), Plan(clip, 1.0)).encoded.double() / GRID
        torch.testing.assert_close(total, clip.encode(rows).sum(dim=0), rtol=0, atol=50 * 2**-39)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
def test_sums_do_not_depend_on_chunks_or_order(clip):
    """Engine, worker count and order of arrival cannot change a bit of a sum, nor can the number of threads."""
    plan, units = Plan(clip, 1.0, QUERIES), cohort(gaussian_rows(64, scale=0.3))
    total = contribute(units, plan)
    order = torch.randperm(64, generator=torch_generator(1, "order"))
    assert equal(total, contribute(only(units, order), plan))
    for shards in (2, 3, 64):
        replies = [contribute(only(units, keep), plan) for keep in torch.arange(64).chunk(shards)]
        summed = Contribution.zero(plan)
        for reply in reversed(replies):
            summed = summed + reply
        assert equal(total, summed)


def test_a_long_row_is_summed_alike_alone_beside_others_and_with_more_threads():
    rows = gaussian_rows(3, 250_007)
    plan = Plan(FlatClip(1.0, 250_007), 1.0)
    alone = [contribute(Units(rows[i : i + 1]), plan).encoded for i in range(3)]
    together = contribute(Units(rows), plan).encoded
    assert torch.equal(together, alone[0] + alone[1] + alone[2])
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(together, contribute(Units(rows), plan).encoded)
    finally:
        torch.set_num_threads(threads)


def test_more_rows_than_one_slab_or_one_exact_float_sum_can_hold(monkeypatch):
    assert [part.stop - part.start for part in slabs(600_000, 1)] == [2**19, 600_000 - 2**19]
    assert [part.stop - part.start for part in slabs(3, 10**7)] == [1, 1, 1]
    monkeypatch.setattr("privacy.clipping.units._SLAB", 15_000)
    rows = torch.ones(20_000, 1)  # float64 adds multiples of 2^40 exactly up to 2^13 of them
    assert contribute(Units(rows), Plan(FlatClip(1.0, 1), 1.0)).encoded.tolist() == [20_000 * 2**40]


def test_inputs_are_left_alone():
    rows = gaussian_rows(4)
    rows.requires_grad_()
    before = rows.detach().clone()
    contribute(cohort(rows), Plan(CLIPS[1], 1.0, QUERIES))
    assert torch.equal(rows, before)


def test_an_empty_cohort_contributes_zero():
    plan = Plan(CLIPS[1], 1.0, QUERIES)
    empty = contribute(cohort(torch.zeros(0, PARAMS)), plan)
    assert equal(empty, Contribution.zero(plan))
    assert not any(part.any() for part in parts(empty))
    assert [len(part) for part in parts(empty)] == [PARAMS, 1, 3, 2, 2, 1]


@pytest.mark.usefixtures("unchecked_shapes")
def test_rows_must_fit_the_plan():
    with pytest.raises(ValueError, match=r"rows .*33 columns, got 32"):
        contribute(Units(torch.zeros(2, 32)), Plan(CLIPS[0], 1.0))
    with pytest.raises(ValueError, match="rows must be a real matrix"):
        Units(torch.zeros(32))


def test_only_equal_shapes_are_added():
    left, right = Contribution.zero(Plan(FlatClip(1.0, 2), 1.0)), Contribution.zero(Plan(FlatClip(1.0, 3), 1.0))
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3,\)"):
        left + right


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "part", [torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int64)]
)
def test_parts_are_int64_vectors(part):
    with pytest.raises(ValueError, match=r"int64 .*CPU"):
        Contribution(part)


def test_private_values_do_not_show():
    units = cohort(torch.full((2, 3), 0.123))
    sums = contribute(units, Plan(FlatClip(1.0, 3), 1.0, QUERIES))
    assert repr(sums) == "Contribution(private, shape (3, 1, 3, 2, 2, 1))"
    assert repr(units) == "Units(2 private rows of 3)"
    assert equal(pickle.loads(pickle.dumps(sums)), sums)  # it does travel between processes


class TestValidate:
    """What a server may believe of a reply. Messages carry no private number."""

    plan = Plan(FlatClip(1.0, 3), 1.0, (NormBit(1.0, 5.0),))

    @staticmethod
    def reply(encoded, bit=0):
        return Contribution(torch.tensor(encoded), (torch.tensor([bit]),))

    def test_honest_replies_pass(self):
        rows = torch.cat([gaussian_rows(40, 3, scale=100.0), torch.full((10, 3), 1e9)])
        validate(contribute(Units(rows), self.plan), self.plan, 50)
        validate(self.reply([5 * 2**40, 0, 0]), self.plan, 5)
        validate(Contribution.zero(self.plan), self.plan, 0)

    @pytest.mark.parametrize(
        "encoded",
        [
            [5 * 2**40 + 1, 0, 0],
            [-5 * 2**40 - 1, 0, 0],
            [4 * 2**40, 4 * 2**40, 0],  # each coordinate possible, the norm not
            [-(2**63), 0, 0],
            [2**63 - 1, 0, 0],
        ],
    )
    def test_too_much_is_refused_without_saying_how_much(self, encoded):
        with pytest.raises(ValueError, match=r"encoded .*L2 norm") as error:
            validate(self.reply(encoded), self.plan, 5)
        assert str(abs(encoded[0])) not in str(error.value)

    def test_shapes_must_be_the_plans(self):
        with pytest.raises(ValueError, match=r"\(3, 1\), got \(2, 1\)"):
            validate(self.reply([0, 0]), self.plan, 5)
        with pytest.raises(ValueError, match=r"\(3, 1\), got \(3,\)"):
            validate(Contribution(torch.zeros(3, dtype=torch.int64)), self.plan, 5)

    def test_sums_must_fit_64_bits(self):
        validate(Contribution.zero(self.plan), self.plan, MAX_UNITS)
        with pytest.raises(ValueError, match="max_units must be <= 4194303"):
            validate(Contribution.zero(self.plan), self.plan, MAX_UNITS + 1)
        with pytest.raises(ValueError, match=r"max_units .*>= 0"):
            validate(Contribution.zero(self.plan), self.plan, -1)


class TestPlan:
    def test_joint_noise_multiplier(self):
        """A centred bit with sigma_b: z_joint = (z^-2 + (2 sigma_b)^-2)^(-1/2), Andrew et al. 2021, theorem 1."""
        plan = Plan(FlatClip(3.0, 7), 1.2, (NormBit(3.0, 5.0),))
        assert plan.effective_noise_multiplier == pytest.approx((1.2**-2 + 10.0**-2) ** -0.5, rel=1e-14)
        assert Plan(FlatClip(3.0, 7), 1.2).effective_noise_multiplier == pytest.approx(1.2)
        assert Plan(NoUpdate(), 1.2, (NormHistogram((1.0,), 10.0),)).effective_noise_multiplier == pytest.approx(10.0)

    @pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
    def test_json_round_trip(self, clip):
        plan = Plan(clip, 1.7, QUERIES)
        assert Plan.from_json(plan.to_json()) == plan

    def test_a_clip_map_with_arrays_is_written_without_them_and_read_with_them(self):
        centre, scale = torch.arange(7.0), 1 + torch.arange(7.0)
        plan = Plan(AdaClip(centre, scale), 1.7, QUERIES)
        again = Plan.from_json(plan.to_json(), plan.clip.arrays())
        assert torch.equal(again.clip.centre, centre)
        assert torch.equal(again.clip.scale, scale)
        with pytest.raises(KeyError):
            Plan.from_json(plan.to_json())

    def test_components_are_what_is_released(self):
        parts = Plan(CLIPS[1], 1.7, QUERIES).components()
        assert [part.name for part in parts] == [
            "update",
            "norm-bit",
            "norm-histogram",
            "loss-histogram",
            "vote",
            "bounded-mean",
        ]
        assert [part.sensitivity for part in parts] == [1.0, 0.5, 1.0, 1.0, 1.0, 0.3]
        assert [part.noise_std for part in parts] == [1.7, 5.0, 10.0, 10.0, 10.0, 1.0]
        assert [part.dim for part in parts] == [PARAMS, 1, 3, 2, 2, 1]
        assert [part.name for part in Plan(NoUpdate(), 1.0, QUERIES[:1]).components()] == ["norm-bit"]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Plan(CLIPS[0], 0.0), "noise_multiplier must be in"),
            (lambda: Plan(CLIPS[0], math.nan), "noise_multiplier must be in"),
            (lambda: Plan(CLIPS[0], 1e6), "noise_multiplier must be in"),
            (lambda: Plan(CLIPS[0], 1.0, (NormBit(1.0, 1e-9),)), "noise_std_over_sensitivity must be in"),
            (lambda: Plan(CLIPS[0], 1.0, QUERIES[:1] * 2), "names of queries must differ"),
            (lambda: Plan(CLIPS[0], 1.0, (NormBit(1.0, 5.0, "update"),)), "names of queries must differ"),
            (lambda: Plan(NoUpdate(), 1.0), "releases nothing"),
        ],
    )
    def test_impossible_plans_are_refused(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()
