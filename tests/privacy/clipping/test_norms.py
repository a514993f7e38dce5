"""Every clip map keeps every row in the unit ball, and each is the map of its paper."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.audit.contracts import adversarial_rows, check_clip_map
from privacy.clipping import CLIP_MAPS, clip_from_json
from privacy.clipping.clip_map import in_unit_ball, same_arrays
from privacy.clipping.norms import AutomaticClip, FlatClip, NoUpdate, PerAdapterClip, PsacClip
from privacy.clipping.subspace import CoefficientClip, EmbeddingResidualClip, SubspaceClip
from privacy.clipping.units import float64_copy, squared_norms
from privacy.clipping.whitening import AdaClip, GeoClip
from privacy.contribution import Plan
from privacy.randomness.rng import simulation_generator, torch_generator

PARAMS = 12


def seeded(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch_generator(1, "maps", size))


def orthonormal(k: int, d: int) -> torch.Tensor:
    return torch.linalg.qr(seeded(k * d).view(d, k)).Q.T.contiguous()


MAPS = [
    FlatClip(0.7, PARAMS),
    FlatClip(1e-12, PARAMS),
    FlatClip(1e12, PARAMS),
    PerAdapterClip((0.5, 2.0, 0.01), (3, 8, 1)),
    PerAdapterClip((3.0,), (PARAMS,)),
    AutomaticClip(0.7, PARAMS),
    AutomaticClip(0.7, PARAMS, gamma=1e-9),
    PsacClip(0.7, PARAMS),
    PsacClip(2.0, PARAMS, r=0.01),
    NoUpdate(),
    AdaClip(seeded(PARAMS), seeded(PARAMS).exp()),
    GeoClip(
        seeded(PARAMS), orthonormal(2, 8).flatten(), torch.tensor([3.0, 0.1]), torch.tensor([0.5, 2.0]), (8, 4), (2, 0)
    ),
    GeoClip(
        seeded(PARAMS),
        torch.cat([orthonormal(2, 8).flatten(), orthonormal(1, 4).flatten()]),
        torch.tensor([3.0, 0.1, 1.0]),
        torch.zeros(2),
        (8, 4),
        (2, 1),
    ),
    GeoClip(seeded(PARAMS), torch.zeros(0), torch.zeros(0), torch.tensor([0.5, 2.0]), (8, 4), (0, 0)),
    SubspaceClip(orthonormal(3, PARAMS), 0.4),
    SubspaceClip(orthonormal(PARAMS, PARAMS), 1e4),
    SubspaceClip(orthonormal(1, PARAMS), 1e-3),
    CoefficientClip(seeded(5 * PARAMS).view(5, PARAMS)),
    EmbeddingResidualClip(orthonormal(3, PARAMS), 0.7, 0.2),
    EmbeddingResidualClip(orthonormal(3, PARAMS), 2.0, 0.5, share=0.9),
]
EXTREME = [
    AdaClip(torch.full((PARAMS,), 1e18), torch.full((PARAMS,), 1e-18)),
    GeoClip(
        seeded(PARAMS), orthonormal(3, PARAMS).flatten(), torch.tensor([1e18, 1, 1e-18]), torch.zeros(1), (12,), (3,)
    ),
    GeoClip(seeded(PARAMS), 1e15 * seeded(24), torch.ones(2), torch.ones(1), (PARAMS,), (2,)),
    SubspaceClip(1e3 * seeded(3 * PARAMS).view(3, PARAMS), 0.5),  # not orthonormal
    SubspaceClip(torch.full((2, PARAMS), 1e38), 1e-30),
    CoefficientClip(seeded(2 * PARAMS).view(2, PARAMS).repeat(10, 1), ridge=1e-12),
    CoefficientClip(torch.zeros(3, PARAMS)),
    CoefficientClip(torch.full((3, PARAMS), 1e38)),
    CoefficientClip(torch.full((3, PARAMS), 1e-38)),
    EmbeddingResidualClip(1e30 * seeded(3 * PARAMS).view(3, PARAMS), 1e-30, 1e30, share=0.9),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64]


def test_every_map_is_under_test():
    assert {type(clip) for clip in MAPS} == set(CLIP_MAPS)


@pytest.mark.parametrize("clip", MAPS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adversarial_rows_stay_in_the_ball(clip, dtype):
    check_clip_map(clip, adversarial_rows(PARAMS, dtype), clip_from_json)


@pytest.mark.parametrize("clip", EXTREME, ids=repr)
def test_statistics_of_any_size_cost_utility_never_sensitivity(clip):
    check_clip_map(clip, adversarial_rows(PARAMS, torch.float64), clip_from_json)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    numbers=st.lists(
        st.lists(st.floats(width=64), min_size=PARAMS, max_size=PARAMS) | st.just([1e200] * PARAMS), max_size=4
    ),
    power=st.integers(-40, 40),
)
def test_any_row_stays_in_the_ball(numbers, power):
    rows = torch.tensor(numbers, dtype=torch.float64).reshape(-1, PARAMS) * 2.0**power
    for clip in MAPS:
        check_clip_map(clip, rows, clip_from_json)


@pytest.mark.parametrize("clip", MAPS, ids=repr)
def test_edges_are_those_of_the_table(clip):
    """The table of ``privacy/clipping/clip_map.py``, row by row; what it says of refusals is tested below."""
    ones = torch.ones(1, PARAMS, dtype=torch.float64)
    for lost in (torch.nan, torch.inf, -torch.inf):
        assert not clip.encode(torch.cat([ones[:, 1:], torch.full((1, 1), lost)], dim=1)).any()
    assert not clip.encode(1e200 * ones).any(), "the norm of finite values may overflow too"
    centred = isinstance(clip, AdaClip | GeoClip)
    assert bool(clip.encode(0 * ones).any()) == centred, "zeros lie off a centre, and nowhere else"
    if clip.dim:
        long = clip.encode(1e100 * seeded(PARAMS).double().unsqueeze(0))
        assert float(long.norm()) == pytest.approx(1.0, abs=1e-6)
        assert float(clip.encode(1e-310 * ones).norm()) <= 1.0
    assert tuple(clip.encode(ones[:0]).shape) == (0, clip.dim)
    assert clip.decode(torch.zeros(clip.dim, dtype=torch.float64), 3.0).any() == centred


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("clip", [clip for clip in MAPS if clip.dim], ids=repr)
def test_wrong_rows_are_refused(clip):
    for rows in (torch.zeros(2, PARAMS + 1), torch.zeros(2, PARAMS - 1)):
        with pytest.raises(ValueError, match=f"rows must have {PARAMS} columns"):
            clip.encode(rows)
    for rows in (torch.zeros(PARAMS), torch.zeros(1, 2, PARAMS), torch.zeros(2, PARAMS, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="rows must be a real matrix"):
            clip.encode(rows)


@pytest.mark.parametrize("clip", [MAPS[0], MAPS[3]], ids=repr)
def test_rows_inside_the_ball_come_back_unchanged(clip):
    rows = torch.randn(5, PARAMS, generator=torch_generator(0, "rows"), dtype=torch.float64)
    rows *= 0.009 / rows.norm(dim=1, keepdim=True)  # inside every block's threshold
    for row, encoded in zip(rows, clip.encode(rows), strict=True):
        torch.testing.assert_close(clip.decode(encoded, 1.0), row, rtol=1e-14, atol=0)
        torch.testing.assert_close(clip.decode(encoded, 8.0), row / 8, rtol=1e-14, atol=0)


def test_flat_clip_shortens_and_keeps_the_direction():
    clip = FlatClip(0.5, 2)
    row = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(clip.encode(row)[0], torch.tensor([0.6, 0.8], dtype=torch.float64))
    torch.testing.assert_close(clip.decode(clip.encode(row)[0], 1.0), torch.tensor([0.3, 0.4], dtype=torch.float64))


def test_a_lost_row_takes_nobody_with_it():
    """min(1, C/NaN) is 1 in Python: such a row would pass unclipped. Nor may it poison the others."""
    rows = torch.tensor([[math.nan, 1e6, 1e6], [3.0, 0.0, 0.0], [math.inf, 0.0, 0.0]])
    encoded = FlatClip(1.0, 3).encode(rows)
    assert encoded.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    blocks = PerAdapterClip((1.0, 1.0), (1, 2)).encode(rows)
    assert not blocks[0].any(), "a NaN in one block must drop the whole row"
    assert not blocks[2].any()


class TestPerAdapterClip:
    """Decision 5 of the specification: exactly the joint z, and the least noise for it."""

    @staticmethod
    def blocks():
        generator = simulation_generator(5, "blocks")
        bounds = tuple(generator.uniform(0.1, 1.5, 24).tolist())
        return bounds, tuple(int(size) for size in generator.integers(2_000, 20_000, 24))

    def test_noise_per_block_is_the_formula(self):
        bounds, sizes = self.blocks()
        clip, z = PerAdapterClip(bounds, sizes), 1.3
        scale = sum(c * math.sqrt(d) for c, d in zip(bounds, sizes, strict=True))
        unit = torch.full((clip.dim,), z, dtype=torch.float64)  # what decoding does to the encoded noise's std
        decoded = clip.decode(unit, 1.0).split(sizes)
        for c, d, block in zip(bounds, sizes, decoded, strict=True):
            torch.testing.assert_close(block, torch.full((d,), z * math.sqrt(scale * c / math.sqrt(d))).double())

    def test_joint_noise_multiplier_is_exactly_z(self):
        bounds, sizes = self.blocks()
        clip, z = PerAdapterClip(bounds, sizes), 1.3
        stds = [z / w for w in clip.weights]
        joint = sum((c / s) ** 2 for c, s in zip(bounds, stds, strict=True)) ** -0.5
        assert joint == pytest.approx(z, rel=1e-12)

    def test_a_row_at_every_threshold_has_norm_one(self):
        bounds, sizes = self.blocks()
        clip = PerAdapterClip(bounds, sizes)
        row = torch.cat([torch.full((d,), 10.0 * c) for c, d in zip(bounds, sizes, strict=True)])
        assert float(clip.encode(row.unsqueeze(0)).norm()) == pytest.approx(1.0, rel=1e-12)

    def test_each_block_is_clipped_to_its_own_threshold(self):
        clip = PerAdapterClip((0.5, 2.0), (1, 2))
        decoded = clip.decode(clip.encode(torch.tensor([[9.0, 0.3, 0.4]]))[0], 1.0)
        torch.testing.assert_close(decoded, torch.tensor([0.5, 0.3, 0.4], dtype=torch.float64))

    def test_total_noise_against_the_two_usual_allocations(self):
        """The specification found 0.72 of uniform noise z||C|| and 0.66 of z sqrt(K) C_k for 24 random blocks; how
        they were drawn it does not say. Both lie within what 24 blocks drawn uniformly give, and no draw exceeds 1."""
        z, against_uniform, against_proportional = 1.3, [], []
        for trial in range(200):
            generator = simulation_generator(trial, "allocation")
            c, d = generator.uniform(0.1, 2.0, 24), generator.integers(1_000, 20_000, 24).astype(float)
            weights = np.array(PerAdapterClip(tuple(c.tolist()), tuple(d.astype(int).tolist())).weights)
            ours = (d * (z / weights) ** 2).sum()
            assert ours == pytest.approx((z * (c * np.sqrt(d)).sum()) ** 2, rel=1e-12)
            against_uniform.append(ours / (d.sum() * z**2 * (c**2).sum()))
            against_proportional.append(ours / (d * 24 * (z * c) ** 2).sum())
        assert max(against_uniform) < 1
        assert max(against_proportional) < 1
        assert np.quantile(against_uniform, 0.05) < 0.72 < np.quantile(against_uniform, 0.95)
        assert np.quantile(against_proportional, 0.05) < 0.66 < np.quantile(against_proportional, 0.95)

    def test_no_allocation_of_the_same_privacy_has_less_noise(self):
        bounds, sizes = self.blocks()
        c, d = np.array(bounds), np.array(sizes, dtype=float)
        ours = (d / np.array(PerAdapterClip(bounds, sizes).weights) ** 2).sum()
        for trial in range(100):
            shares = simulation_generator(trial, "shares").dirichlet(np.ones(24))  # of 1/z^2 = sum (C_k/s_k)^2
            assert (d * c**2 / shares).sum() > ours


def test_automatic_is_bu_et_al():
    clip = AutomaticClip(2.0, 2, gamma=0.01)
    decoded = clip.decode(clip.encode(torch.tensor([[3.0, 4.0]]))[0], 1.0)
    torch.testing.assert_close(decoded, torch.tensor([3.0, 4.0], dtype=torch.float64) * 2 / (5 + 0.02))


def test_psac_is_xia_et_al():
    """With C = 1: w(x) = 1/(x + r/(x + r)); w(0) = 1, its maximum 1.88 at sqrt(r) - r for r = 0.1, and ~1/x far out."""
    clip = PsacClip(1.0, 1, r=0.1)
    norms = torch.linspace(1e-9, 1.0, 20_001, dtype=torch.float64).unsqueeze(1)
    weight = (clip.encode(norms) / norms).squeeze(1)
    assert float(weight[0]) == pytest.approx(1.0, abs=1e-6)
    peak = int(weight.argmax())
    assert float(weight[peak]) == pytest.approx(1 / (2 * math.sqrt(0.1) - 0.1), rel=1e-6)
    assert float(norms[peak]) == pytest.approx(math.sqrt(0.1) - 0.1, abs=1e-3)
    assert float(clip.encode(torch.tensor([[1e6]]))) == pytest.approx(1.0, abs=1e-6)


def test_psac_and_automatic_scale_with_the_bound():
    rows = torch.randn(3, 4, generator=torch_generator(1, "rows"), dtype=torch.float64)
    for make in (lambda c: PsacClip(c, 4), lambda c: AutomaticClip(c, 4)):
        torch.testing.assert_close(make(3.0).encode(3.0 * rows), make(1.0).encode(rows))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlatClip(0.0, 3), "bound must be in"),
        (lambda: FlatClip(math.nan, 3), "bound must be in"),
        (lambda: FlatClip(math.inf, 3), "bound must be in"),
        (lambda: FlatClip(1e31, 3), "bound must be in"),
        (lambda: FlatClip(1.0, 0), "params must be an integer >= 1"),
        (lambda: PerAdapterClip((), ()), "bounds must be non-empty"),
        (lambda: PerAdapterClip((1.0,), (1, 2)), "bounds and sizes must be of the same length"),
        (lambda: PerAdapterClip((1.0, -1.0), (1, 2)), "bound must be in"),
        (lambda: PerAdapterClip((1.0, 1e-13), (1, 2)), "within a factor of 1e12"),
        (lambda: AutomaticClip(1.0, 3, gamma=0.0), "gamma must be in"),
        (lambda: PsacClip(1.0, 3, r=0.0), "r must be in"),
        (lambda: AdaClip(torch.zeros(0), torch.zeros(0)), "scale must be non-empty"),
        (lambda: GeoClip(*4 * [torch.zeros(0)], (), ()), "sizes must be non-empty"),
        (lambda: clip_from_json({"kind": "flaat"}), "kind of clip map must be flat"),
        (
            lambda: clip_from_json(
                {"kind": "subspace", "bound": 1.0, "rank": 2, "params": 4}, {"basis": torch.zeros(6)}
            ),
            "basis must have 2 x 4 values, got 6",
        ),
    ],
)
def test_impossible_maps_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TestConformanceCheckItself:
    """A check that passes everything proves nothing: maps with one fault each must fail it."""

    @staticmethod
    def broken(**faults):
        class Broken(FlatClip):
            pass

        for name, method in faults.items():
            setattr(Broken, name, method)
        return Broken(1.0, PARAMS)

    @pytest.mark.parametrize(
        ("fault", "complaint"),
        [
            (lambda self, rows: rows.double().nan_to_num(), "norm .* more than 1"),
            (lambda self, rows: FlatClip(1.0, PARAMS).encode(rows).float(), "must be float64"),
            (lambda self, rows: FlatClip(1.0, PARAMS).encode(rows.nan_to_num(0.0)), "not finite must be encoded as 0"),
            (
                lambda self, rows: FlatClip(1.0, PARAMS).encode(rows) / len(rows),
                "encoded differently beside other rows",
            ),
            (lambda self, rows: FlatClip(1.0, PARAMS).encode(rows.mul_(1.0).fill_(0.5)), "changed its input"),
            (
                lambda self, rows: rows.double() / rows.double().norm(dim=1, keepdim=True).clamp(min=1.0),
                "not finite",
            ),
        ],
    )
    def test_faulty_encoders_fail(self, fault, complaint):
        with pytest.raises(AssertionError, match=complaint):
            check_clip_map(self.broken(encode=fault), adversarial_rows(PARAMS))

    def test_faulty_decoders_fail(self):
        noisy = simulation_generator(0, "decoder")
        for decode, complaint in [
            (lambda self, total, expected: total[:-1], "decoded shape"),
            (lambda self, total, expected: total.mul_(2), "decode changed its input"),
            (lambda self, total, expected: total * noisy.random(), "not repeatable"),
        ]:
            with pytest.raises(AssertionError, match=complaint):
                check_clip_map(self.broken(decode=decode), adversarial_rows(PARAMS))

    def test_forgetful_json_fails(self):
        with pytest.raises(AssertionError, match=r"JSON .*same map"):
            check_clip_map(FlatClip(1.0, PARAMS), adversarial_rows(PARAMS), lambda data: FlatClip(2.0, PARAMS))


@pytest.mark.parametrize("clip", MAPS, ids=repr)
def test_noise_is_stated_for_every_coordinate(clip):
    assert clip.spread().shape in ((), (clip.params,))


@pytest.mark.parametrize("clip", [clip for clip in MAPS if clip.dim], ids=repr)
def test_the_stated_noise_is_what_the_release_carries(clip):
    """Whatever the map adds beside the noise (a centre, say) and however it mixes coordinates."""
    m, z = 50.0, 1.5
    nothing = clip.decode(torch.zeros(clip.dim, dtype=torch.float64), m)
    columns = torch.stack([clip.decode(unit, m) - nothing for unit in z * torch.eye(clip.dim, dtype=torch.float64)])
    plan = Plan(clip, z)
    torch.testing.assert_close(
        columns.norm(dim=0), plan.noise_std(m).expand(clip.params), rtol=1e-6, atol=1e-9 * float(columns.norm())
    )
    assert plan.noise_norm(m) == pytest.approx(float(columns.norm()), rel=1e-6)


def test_a_centre_is_not_taken_for_noise():
    clip = AdaClip(torch.full((1000,), 0.1), torch.full((1000,), 0.01))
    assert Plan(clip, 1.0).noise_norm(50.0) == pytest.approx(0.01 * 1000**0.5 / 50, rel=1e-6)  # and not 3.169


def test_the_last_step_of_an_encoding_leaves_no_row_outside_and_none_that_is_not_finite() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0], [math.inf, 0.0], [1e200, 1e200]], dtype=torch.float64)
    assert in_unit_ball(rows).tolist() == [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_a_row_s_norm_does_not_depend_on_how_its_matrix_lies_in_memory():
    rows = torch.randn(3, 4001, generator=torch_generator(5, "layout"))
    across = rows.T.contiguous().T
    assert not across.is_contiguous()
    assert float64_copy(across).is_contiguous()
    assert torch.equal(squared_norms(float64_copy(across)), squared_norms(float64_copy(rows)))


def test_maps_of_other_classes_are_not_the_same():
    assert same_arrays(FlatClip(1.0, 3), FlatClip(1.0, 3))
    assert not same_arrays(FlatClip(1.0, 3), AutomaticClip(1.0, 3))
    assert not same_arrays(FlatClip(1.0, 3), "flat")
