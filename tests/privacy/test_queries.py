"""Queries: bounded by their sensitivity, right on ordinary units, and strict about replies."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.audit.contracts import adversarial_rows, check_query
from privacy.clipping.norms import NoUpdate
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute, validate
from privacy.queries import (
    QUERIES,
    AdapterBits,
    BoundedMean,
    LossHistogram,
    NormBit,
    NormHistogram,
    OneHotVote,
    query_from_json,
)

GRID = 2**40
HALF_OCTAVES = tuple(2 ** (j / 2) for j in range(-12, 13))
EXAMPLES = [
    NormBit(1.0, 5.0),
    NormHistogram((0.1, 1.0, 10.0), 10.0),
    LossHistogram((0.5, 1.0, 2.0), 10.0),
    OneHotVote(HALF_OCTAVES, 10.0, simulated_noise_std_per_bound=0.017),
    BoundedMean(2.5, 8.0),
    BoundedMean(1 / 3, 8.0, name="another"),
    AdapterBits((0.5, 2.0, 1.0), (2, 1, 2), 5.0),
    AdapterBits((1.0, 1e-3), (1, 1), 5.0, name="two bits"),
    BoundedMean(1 / 3, 8.0, name="centred", centred=True),
]
NAN, INF = math.nan, math.inf


def units_of(rows, losses=None, votes=None):
    rows = torch.tensor(rows) if isinstance(rows, list) else rows
    return Units(
        rows,
        None if losses is None else torch.tensor(losses),
        None if votes is None else torch.tensor(votes, dtype=torch.int64),
    )


def width_of(query, otherwise):
    return sum(query.sizes) if isinstance(query, AdapterBits) else otherwise


def test_every_query_is_under_test():
    assert {type(query) for query in EXAMPLES} == set(QUERIES)


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32], ids=str)
def test_adversarial_units_stay_within_the_sensitivity(query, dtype):
    rows = adversarial_rows(width_of(query, 5), dtype)
    losses = [0.0, -1.0, 1e38, NAN, INF, -INF, 2.5, 0.3, 1e-45, 2.0]
    votes = [0, -1, 24, 25, 2**62, -(2**62), 3, 4, 5, 6]
    check_query(query, units_of(rows, losses, votes), query_from_json)


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.name)
@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    units=st.lists(
        st.tuples(
            st.lists(st.floats(width=64), min_size=5, max_size=5),
            st.floats(width=64),
            st.integers(-(2**63), 2**63 - 1),
        ),
        max_size=4,
    )
)
def test_any_units_stay_within_the_sensitivity(query, units):
    rows, losses, votes = zip(*units, strict=True) if units else ((), (), ())
    losses = torch.tensor(losses, dtype=torch.float64)
    numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, 5)[:, : width_of(query, 2)]
    check_query(query, Units(numbers, losses, torch.tensor(votes, dtype=torch.int64)), query_from_json)


def test_norm_bit_is_plus_or_minus_a_half_exactly():
    units = units_of([[0.6, 0.8], [0.0, 0.0], [3.0, 4.0], [NAN, 0.0]])
    query = NormBit(1.0 + 1e-6, 5.0)
    assert query.answer(units).flatten().tolist() == [0.5, 0.5, -0.5, 0.0]
    assert contribute(units, Plan(NoUpdate(), 1.0, (query,))).answers[0].tolist() == [GRID]  # in multiples of 1/2


def test_adapter_bits_compare_each_block_with_its_own_threshold():
    units = units_of([[0.6, 0.8, 9.0, 0.0], [3.0, 4.0, 0.1, 0.1], [0.0] * 4, [NAN, 0.0, 0.0, 0.0]])
    query = AdapterBits((1.0 + 1e-6, 0.5), (2, 2), 5.0)
    assert query.answer(units).tolist() == [[0.5, -0.5], [-0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    assert query.sensitivity == math.sqrt(2) / 2
    total = contribute(units, Plan(NoUpdate(), 1.0, (query,))).answers[0].double() * (query.sensitivity / GRID)
    assert total.tolist() == pytest.approx([0.5, 0.5], abs=4 * 2**-39)


def test_adapter_bits_compare_in_double_precision():
    """A float32 of 0.7 is 0.699999988, which a threshold of 0.69999998 is below."""
    assert AdapterBits((0.69999998,), (1,), 5.0).answer(units_of([[0.7]])).tolist() == [[-0.5]]


def test_adapter_bits_refuse_rows_of_another_layout():
    with pytest.raises(ValueError, match=r"4 columns .*'adapter-bits', got 3"):
        AdapterBits((1.0, 1.0), (2, 2), 5.0).answer(units_of([[0.0] * 3]))


def test_norm_histogram_bins():
    units = units_of([[0.0], [0.1], [0.11], [1.0], [10.0], [-10.1], [1e30], [NAN], [INF]])
    edges = tuple(float(torch.tensor(edge)) for edge in (0.1, 1.0, 10.0))
    counts = NormHistogram(edges, 10.0).answer(units).sum(dim=0)
    assert counts.tolist() == [2.0, 2.0, 1.0, 2.0], "bins are (low, high], rows that are not finite have none"


def test_norms_are_compared_with_edges_in_double_precision():
    """0.1 as a float32 is 0.1000000015: the norm between the two is above the edge."""
    query, norm = NormHistogram((0.1, 1.0), 10.0), 0.1 + 1e-10
    assert query.answer(units_of(torch.tensor([[norm], [0.1 - 1e-10]], dtype=torch.float64))).argmax(1).tolist() == [
        1,
        0,
    ]


def test_loss_histogram_bins():
    units = units_of([[0.0]] * 6, losses=[0.5, 0.51, -3.0, 99.0, NAN, INF])
    counts = LossHistogram((0.5, 1.0), 10.0).answer(units).sum(dim=0)
    assert counts.tolist() == [2.0, 1.0, 3.0], "a diverged model belongs to the last bin"


def test_votes():
    units = units_of([[0.0]] * 5, votes=[0, 2, 2, -1, 3])
    query = OneHotVote((1.0, 2.0, 4.0), 10.0, simulated_noise_std_per_bound=0.01)
    assert query.answer(units).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_a_vote_goes_to_the_nearest_bin_on_a_log_scale():
    query = OneHotVote(HALF_OCTAVES, 10.0, simulated_noise_std_per_bound=0.0)
    for index, threshold in enumerate(HALF_OCTAVES):
        for factor in (2**-0.24, 1.0, 2**0.24):
            assert query.nearest_bin(threshold * factor) == index
    assert query.nearest_bin(1e-9) == 0
    assert query.nearest_bin(1e9) == 24
    for nothing in (0.0, -1.0, NAN, INF):
        assert query.nearest_bin(nothing) == -1


def test_bounded_mean_clamps():
    units = units_of([[0.0]] * 6, losses=[0.5, 3.0, -1.0, NAN, INF, -INF])
    assert BoundedMean(2.0, 8.0).answer(units).flatten().tolist() == [0.5, 2.0, 0.0, 2.0, 2.0, 2.0]


def test_a_centred_mean_has_half_the_sensitivity_and_the_same_mean():
    units = units_of([[0.0]] * 4, losses=[0.5, 1.0, 9.0, NAN])
    query = BoundedMean(2.0, 8.0, centred=True)
    assert query.answer(units).flatten().tolist() == [-0.5, 0.0, 1.0, 1.0]
    assert query.sensitivity == 1.0
    for one in (query, BoundedMean(2.0, 8.0)):
        assert one.mean(one.answer(units).sum(dim=0), 4.0) == (0.5 + 1.0 + 2.0 + 2.0) / 4


def test_what_a_query_needs_must_be_there(unchecked_shapes):
    for query, missing in [(EXAMPLES[2], "losses"), (EXAMPLES[4], "losses"), (EXAMPLES[3], "votes")]:
        with pytest.raises(ValueError, match=f"{missing} must be given for the query '{query.name}'"):
            query.answer(units_of([[0.0]]))
    for wrong in ({"losses": torch.zeros(2)}, {"votes": torch.zeros(2, dtype=torch.int64)}):
        with pytest.raises(ValueError, match="one per row"):
            Units(torch.zeros(1, 3), **wrong)
    with pytest.raises(ValueError, match="votes must be integers"):
        Units(torch.zeros(1, 3), votes=torch.zeros(1))


@pytest.mark.parametrize(
    ("query", "total", "possible"),
    [
        (EXAMPLES[0], [3 * GRID], True),
        (EXAMPLES[0], [-3 * GRID], True),
        (EXAMPLES[0], [4 * GRID], False),
        (EXAMPLES[0], [GRID // 2], False),
        (EXAMPLES[1], [GRID, 0, 2 * GRID, 0], True),
        (EXAMPLES[1], [GRID, 0, 3 * GRID, 0], False),
        (EXAMPLES[1], [-GRID, 0, 2 * GRID, 0], False),
        (EXAMPLES[1], [GRID + 1, 0, 0, 0], False),
        (EXAMPLES[4], [3 * GRID], True),
        (EXAMPLES[4], [3 * GRID + 1], False),
        (EXAMPLES[4], [-1], False),
        (EXAMPLES[-1], [-3 * GRID], True),
        (EXAMPLES[-1], [-3 * GRID - 1], False),
        (EXAMPLES[7], [int(3 * GRID / math.sqrt(2)), 0], True),
        (EXAMPLES[7], [int(GRID / math.sqrt(2)), -int(GRID / math.sqrt(2)) + 1], True),
        (EXAMPLES[7], [int(GRID / 2), 0], False),
        (EXAMPLES[7], [int(4 * GRID / math.sqrt(2)), 0], False),
    ],
)
def test_replies_must_be_possible_sums(query, total, possible):
    plan = Plan(NoUpdate(), 1.0, (query,))
    reply = Contribution(torch.zeros(0, dtype=torch.int64), (torch.tensor(total),))
    if possible:
        validate(reply, plan, 3)
    else:
        with pytest.raises(ValueError, match="drop the reply"):
            validate(reply, plan, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NormBit(0.0, 1.0),
        lambda: NormBit(1.0, 0.0),
        lambda: NormBit(NAN, 1.0),
        lambda: NormHistogram((1.0, 1.0), 1.0),
        lambda: NormHistogram((), 1.0),
        lambda: LossHistogram((1.0,), -1.0),
        lambda: OneHotVote((0.0, 1.0), 1.0, simulated_noise_std_per_bound=0.1),
        lambda: OneHotVote((1.0,), 1.0, simulated_noise_std_per_bound=-0.1),
        lambda: OneHotVote((1.0,), 1.0, candidates=(), simulated_noise_std_per_bound=0.1),
        lambda: AdapterBits((), (), 1.0),
        lambda: AdapterBits((1.0,), (1, 2), 1.0),
        lambda: AdapterBits((0.0, 1.0), (1, 2), 1.0),
        lambda: AdapterBits((1.0,), (0,), 1.0),
        lambda: BoundedMean(-1.0, 1.0),
        lambda: BoundedMean(INF, 1.0),
        lambda: query_from_json({"kind": "mean", "noise_std": 1.0, "name": "x"}),
    ],
)
def test_impossible_queries_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


class TestConformanceCheckItself:
    @pytest.mark.parametrize(
        ("fault", "complaint"),
        [
            (lambda units: units.norms.unsqueeze(1).nan_to_num(0.0), "an answer has norm"),
            (lambda units: units.norms.unsqueeze(1), "not finite"),
            (lambda units: torch.full((len(units), 1), 0.5 / len(units), dtype=torch.float64), "answers differently"),
            (lambda units: torch.full((len(units), 2), 0.1, dtype=torch.float64), "have shape"),
            (lambda units: torch.full((len(units), 1), 0.1), "must be float64"),
            (lambda units: torch.full((len(units), 1), 0.1, dtype=torch.float64), "refuses an honest answer"),
        ],
    )
    def test_faulty_queries_fail(self, fault, complaint):
        class Broken(NormBit):
            def answer(self, units):
                return fault(units)

        with pytest.raises(AssertionError, match=complaint):
            check_query(Broken(1.0, 5.0), units_of(adversarial_rows(3)))


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.name)
def test_a_query_is_written_down_and_read_again_with_its_name(query):
    named = dataclasses.replace(query, name="a name of its own")
    assert query_from_json(named.to_json()) == named


def test_the_candidates_of_a_vote_are_written_down():
    vote = OneHotVote(HALF_OCTAVES, 10.0, simulated_noise_std_per_bound=0.017, candidates=(0.5, 1.0, 4.0))
    assert query_from_json(vote.to_json()) == vote
    with pytest.raises(ValueError, match="noise_std must be"):
        OneHotVote(HALF_OCTAVES, 0.0, simulated_noise_std_per_bound=0.017)


def test_a_norm_at_the_threshold_counts_as_unclipped():
    bits = AdapterBits((5.0, 1.0), (2, 1), 5.0)
    assert bits.answer(units_of([[3.0, 4.0, 1.0], [3.0, 4.1, 1.1]])).tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    assert NormBit(5.0, 1.0).answer(units_of([[3.0, 4.0], [3.0, 4.1]])).flatten().tolist() == [0.5, -0.5]
