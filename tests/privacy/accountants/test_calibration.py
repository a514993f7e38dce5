"""Calibrated noise against the table of the specification, and the commitments made with it."""

import math

import pytest

from privacy.accountants import renyi
from privacy.accountants.calibration import calibrate, filter_commitment, floor_commitment
from privacy.accountants.composition import epsilon
from privacy.accountants.renyi import epsilon_of
from privacy.commitment import FloorStep
from privacy.errors import UnsupportedEvent
from privacy.events import Poisson

DELTA, ROUNDS = 1e-5, 200
TABLE = [
    (0.02, 2.0, 0.9682),
    (0.02, 4.0, 0.7425),
    (0.02, 8.0, 0.5799),
    (0.05, 2.0, 1.6721),
    (0.05, 4.0, 1.0944),
    (0.05, 8.0, 0.7870),
    (0.1, 2.0, 3.0046),
    (0.1, 4.0, 1.7618),
    (0.1, 8.0, 1.1298),
]
CHEAP = [row for row in TABLE if row[0] > 0.02 and row[1] < 8.0]


def poisson(rate: float) -> Poisson:
    return Poisson(rate, 1000)


def check_against_table(rate: float, target: float, expected: float) -> None:
    z = calibrate(target, DELTA, poisson(rate), ROUNDS)
    assert z == pytest.approx(expected, abs=5e-4)
    assert z == round(z, 4)
    assert epsilon([(poisson(rate), z, ROUNDS)], DELTA) <= target, "never less noise than the target needs"
    assert epsilon([(poisson(rate), z - 2e-4, ROUNDS)], DELTA) > target, "and hardly more"


@pytest.mark.run
@pytest.mark.parametrize(("rate", "target", "expected"), CHEAP)
def test_the_table(rate: float, target: float, expected: float) -> None:
    check_against_table(rate, target, expected)


@pytest.mark.nightly
@pytest.mark.parametrize(("rate", "target", "expected"), [row for row in TABLE if row not in CHEAP])
def test_the_rest_of_the_table(rate: float, target: float, expected: float) -> None:
    check_against_table(rate, target, expected)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (2.0, 3.2372),
        pytest.param(4.0, 1.8815, marks=pytest.mark.nightly),
        pytest.param(8.0, 1.1958, marks=pytest.mark.nightly),
    ],
)
def test_the_table_by_rdp(target: float, expected: float) -> None:
    assert calibrate(target, DELTA, poisson(0.1), ROUNDS, accountant="rdp") == pytest.approx(expected, abs=5e-4)


@pytest.mark.run
@pytest.mark.parametrize(
    ("rate", "target", "expected"),
    [
        (0.1, 2.0, 5.634),
        (0.1, 4.0, 3.049),
        pytest.param(0.1, 8.0, 1.690, marks=pytest.mark.nightly),
        pytest.param(0.05, 2.0, 2.819, marks=pytest.mark.nightly),
        pytest.param(0.05, 4.0, 1.542, marks=pytest.mark.nightly),
        pytest.param(0.05, 8.0, 0.927, marks=pytest.mark.nightly),
        pytest.param(0.02, 2.0, 1.188, marks=pytest.mark.nightly),
        pytest.param(0.02, 4.0, 0.800, marks=pytest.mark.nightly),
        pytest.param(0.02, 8.0, 0.604, marks=pytest.mark.nightly),
    ],
)
def test_replacing_one_of_a_poisson_sample(rate: float, target: float, expected: float) -> None:
    z = calibrate(target, DELTA, poisson(rate), ROUNDS, adjacency="replace_one")
    assert z == pytest.approx(expected, abs=1e-3)


@pytest.mark.run
@pytest.mark.parametrize(("target", "expected"), [(2.0, 28.2), (4.0, 15.3), (8.0, 8.49)])
def test_without_amplification(target: float, expected: float) -> None:
    assert calibrate(target, DELTA, Poisson(1.0, 1000), ROUNDS) == pytest.approx(expected, rel=2e-3)


@pytest.mark.run
@pytest.mark.parametrize(
    ("target", "expected"), [(2.0, 3.059), (4.0, 1.770), pytest.param(8.0, 1.131, marks=pytest.mark.nightly)]
)
def test_the_histogram_is_absorbed(target: float, expected: float) -> None:
    z = calibrate(target, DELTA, poisson(0.1), ROUNDS, extra=[FloorStep("histogram", Poisson(1.0, 1000), 10.0)])
    assert z == pytest.approx(expected, abs=1e-3)


def joint(*multipliers: float) -> float:
    return 1.0 / math.hypot(*(1.0 / z for z in multipliers))


@pytest.mark.run
@pytest.mark.parametrize(("target", "expected"), [(2.0, 3.067), (4.0, 1.798)])
def test_a_loss_query_at_five_times_the_noise(target: float, expected: float) -> None:
    """DP-CLAC's loss beside the update, as one joint event."""
    z = calibrate(target, DELTA, poisson(0.1), ROUNDS, queries=lambda z: joint(z, 5 * z))
    assert z == pytest.approx(expected, abs=4e-3)
    assert epsilon([(poisson(0.1), joint(z, 5 * z), ROUNDS)], DELTA) <= target


@pytest.mark.run
def test_queries_with_noise_of_their_own() -> None:
    z = calibrate(4.0, DELTA, poisson(0.1), ROUNDS, queries=(10.0, 20.0))
    assert joint(z, 10.0, 20.0) == pytest.approx(1.7618, abs=5e-4)
    assert epsilon([(poisson(0.1), joint(z, 10.0, 20.0), ROUNDS)], DELTA) <= 4.0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rate", "target", "update", "loss", "true"),
    [
        (0.1, 4.0, 2.432, 4.483, 3.08),
        (0.1, 2.0, 4.323, 8.312, 1.49),
        (0.02, 2.0, 1.186, 1.897, 1.83),
        (0.02, 4.0, 0.875, 1.219, 4.51),
        (0.02, 8.0, 0.678, 0.895, 9.79),
        (0.05, 4.0, 1.406, 2.384, 3.33),
    ],
)
def test_splitting_the_budget_by_basic_composition(
    rate: float, target: float, update: float, loss: float, true: float
) -> None:
    """DP-CLAC splits epsilon and delta 2/3 and 1/3: wasteful at large rates, and UNSOUND at small ones."""
    z_update = calibrate(2 * target / 3, 2 * DELTA / 3, poisson(rate), ROUNDS)
    z_loss = calibrate(target / 3, DELTA / 3, poisson(rate), ROUNDS)
    assert [z_update, z_loss] == pytest.approx([update, loss], abs=2e-3)
    assert epsilon([(poisson(rate), joint(z_update, z_loss), ROUNDS)], DELTA) == pytest.approx(true, abs=6e-3)


@pytest.mark.run
def test_a_short_schedule_of_noise_and_rates() -> None:
    profile = [2.0] * 10 + [1.0] * 10
    samplings = [Poisson(0.2, 1000)] * 15 + [Poisson(0.4, 1000)] * 5
    z = calibrate(2.0, DELTA, samplings, 20, profile=profile)
    run = [(one, z * share, 1) for one, share in zip(samplings, profile, strict=True)]
    assert 1.99 < epsilon(run, DELTA) <= 2.0


@pytest.mark.nightly
def test_a_long_schedule_of_different_steps() -> None:
    profile = [1.5 - t / 40 for t in range(40)]
    z = calibrate(2.0, DELTA, poisson(0.05), 40, profile=profile)
    assert 1.98 < epsilon([(poisson(0.05), z * share, 1) for share in profile], DELTA) <= 2.0


@pytest.mark.run
def test_floor_commitment_holds_what_was_calibrated() -> None:
    histogram = FloorStep("histogram", Poisson(1.0, 1000), 10.0)
    commitment, z = floor_commitment(4.0, DELTA, poisson(0.1), 200, extra=[histogram], queries=(20.0,))
    assert commitment.floor[0] == histogram
    assert [step.count for step in commitment.floor] == [1, 200]
    assert commitment.floor[1].noise_multiplier == pytest.approx(joint(z, 20.0), rel=1e-12)
    assert 3.99 < epsilon(commitment.floor, DELTA) <= 4.0
    assert (commitment.unit, commitment.population, commitment.mode) == ("client", 1000, "floor")


def test_one_round_is_a_commitment_too() -> None:
    commitment, z = floor_commitment(1.0, DELTA, Poisson(1.0, 500), 1)
    assert commitment.population == 500
    assert commitment.floor == (FloorStep("round", Poisson(1.0, 500), z),)


@pytest.mark.run
def test_floor_commitment_of_a_schedule_has_one_step_per_stretch() -> None:
    commitment, z = floor_commitment(2.0, DELTA, poisson(0.5), 6, profile=[1, 1, 2, 2, 2, 1])
    assert [step.count for step in commitment.floor] == [2, 3, 1]
    assert [step.noise_multiplier for step in commitment.floor] == pytest.approx([z, 2 * z, z])


@pytest.mark.parametrize(
    ("rate", "target", "order", "z", "rho"),
    [
        (0.02, 2.0, 7, 1.0535, 0.5596),
        (0.05, 4.0, 5, 1.1640, 1.7473),
        (0.1, 2.0, 10, 3.2379, 1.0820),
        (0.1, 4.0, 6, 1.8856, 2.2381),
        (0.1, 8.0, 4, 1.2159, 4.9121),
    ],
)
def test_filter_commitment_is_the_table(rate: float, target: float, order: int, z: float, rho: float) -> None:
    commitment, even = filter_commitment(target, DELTA, poisson(rate), ROUNDS)
    assert commitment.order == order
    assert even == pytest.approx(z, abs=2e-4)
    assert commitment.rho == pytest.approx(rho, abs=1e-4)
    assert epsilon_of(rho, order, DELTA) == pytest.approx(target, abs=1e-3)


def test_filter_commitment_leaves_room_for_a_histogram() -> None:
    plain, even = filter_commitment(4.0, DELTA, poisson(0.1), ROUNDS)
    with_histogram, needed = filter_commitment(
        4.0, DELTA, poisson(0.1), ROUNDS, extra=[FloorStep("histogram", Poisson(1.0, 1000), 10.0)]
    )
    assert needed > even
    assert plain.rho == with_histogram.rho or plain.order != with_histogram.order


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibrate(0.0, DELTA, poisson(0.1), 10), "epsilon must be > 0"),
        (lambda: calibrate(1.0, 2.0, poisson(0.1), 10), "delta must be in"),
        (lambda: calibrate(1.0, DELTA, poisson(0.1), 0), "rounds must be an integer >= 1"),
        (lambda: calibrate(1.0, DELTA, [poisson(0.1)], 2), "sampling must be one, or one per round"),
        (lambda: calibrate(1.0, DELTA, poisson(0.1), 2, profile=[1.0]), "one relative multiplier per round"),
        (lambda: calibrate(1.0, DELTA, poisson(0.1), 2, profile=[1.0, 0.0]), "profile must be > 0"),
        (lambda: calibrate(1.0, DELTA, poisson(0.1), 200, queries=(2.0,)), r"epsilon must be > 3\.36, which the extra"),
        (lambda: calibrate(300.0, DELTA, poisson(0.1), 2), r"a multiplier of 0\.3 would do: that protects no one"),
        (lambda: calibrate(1.0, DELTA, poisson(0.1), 2, accountant="moments"), "accountant must be one of"),
        (lambda: filter_commitment(1e-3, DELTA, poisson(0.1), 2, extra=[(Poisson(1.0, 1000), 1.0, 1)]), "pay for 1"),
    ],
)
def test_impossible_targets_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.run
def test_a_tiny_epsilon_is_accounted_finely_enough() -> None:
    """Losses of a thousandth need a finer grid than the usual one, or twice the noise would be asked for."""
    z = calibrate(2e-3, DELTA, poisson(0.01), 2)
    assert epsilon([(poisson(0.01), z, 2)], DELTA, interval=5e-5) == pytest.approx(2e-3, rel=0.02)


@pytest.mark.run
def test_weak_noise_can_be_forced() -> None:
    z = calibrate(50.0, DELTA, Poisson(1.0, 1000), 1, force=True)
    assert z < 0.3
    assert epsilon([(Poisson(1.0, 1000), z, 1)], DELTA) <= 50.0


def test_a_delta_below_the_reach_of_pld_is_calibrated_by_rdp() -> None:
    z = calibrate(4.0, 1e-14, Poisson(1.0, 1000), 1)
    assert z == calibrate(4.0, 1e-14, Poisson(1.0, 1000), 1, accountant="rdp")
    with pytest.raises(ValueError, match=r"'pld', got 4 .*1e-14"):
        calibrate(4.0, 1e-14, Poisson(1.0, 1000), 1, accountant="pld")


def test_unsupported_sampling_is_refused_before_the_search() -> None:
    with pytest.raises(UnsupportedEvent, match="use accountant 'pld'"):
        calibrate(4.0, DELTA, Poisson(0.1, 100), 10, adjacency="replace_one", accountant="rdp")


def test_a_filter_is_committed_for_its_own_profile_and_adjacency() -> None:
    """The divergences of the planned rounds and of what comes before just fit, priced as the ledger prices them."""
    everybody, first = Poisson(1.0, 1000), (Poisson(1.0, 1000), 30.0, 2)
    profile = [2.0] * 6 + [0.5] * 4
    for adjacency in ("add_remove", "replace_one"):
        commitment, z = filter_commitment(
            4.0, DELTA, everybody, 10, extra=[first], profile=profile, adjacency=adjacency
        )
        assert commitment.order is not None
        assert commitment.rho is not None

        def spent(z: float, order: int = commitment.order, adjacency: str = adjacency) -> float:
            rounds = sum(renyi.rho_of(everybody, z * share, order, adjacency) for share in profile)
            return 2 * renyi.rho_of(everybody, 30.0, order, adjacency) + rounds

        assert spent(z) <= commitment.rho < spent(z - 2e-4)
    for target, delta in ((0.0, DELTA), (4.0, 0.0)):
        with pytest.raises(ValueError, match="must be"):
            filter_commitment(target, delta, everybody, 10)


def test_a_floor_is_committed_for_its_own_profile_and_called_round() -> None:
    sampling, profile = Poisson(0.5, 1000), [2.0, 2.0, 0.5]
    commitment, z = floor_commitment(4.0, DELTA, sampling, 3, profile=profile)
    assert z == calibrate(4.0, DELTA, sampling, 3, profile=profile)
    steps = [(step.label, step.noise_multiplier, step.count) for step in commitment.floor]
    assert steps == [("round", pytest.approx(2 * z), 2), ("round", pytest.approx(z / 2), 1)]


def test_a_filter_without_anything_left_after_its_extras_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renyi, "rho_budget", lambda epsilon, order, delta: 0.0)
    with pytest.raises(ValueError, match="large enough to pay for 0 extra releases"):
        filter_commitment(2.0, DELTA, poisson(0.1), 10)


def test_a_floor_is_calibrated_under_the_adjacency_it_is_committed_for() -> None:
    everybody = Poisson(1.0, 500)
    added, replaced = (
        floor_commitment(1.0, DELTA, everybody, 1, adjacency=adjacency) for adjacency in ("add_remove", "replace_one")
    )
    assert replaced[1] == pytest.approx(2 * added[1], abs=2e-4)  # a unit in another's place moves the sum by 2 C
    assert replaced[0].adjacency == "replace_one"


def test_a_filter_of_one_round_is_a_commitment_too() -> None:
    commitment, z = filter_commitment(4.0, DELTA, poisson(0.1), 1)
    assert commitment.order is not None
    assert commitment.rho is not None
    assert 0.999 * commitment.rho < renyi.rho_of(poisson(0.1), z, commitment.order) <= commitment.rho
