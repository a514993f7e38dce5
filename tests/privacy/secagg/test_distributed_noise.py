"""Noise made by the clients: exact in the ledger's terms, charged first, and what cannot be kept is refused."""

import json
import math

import numpy as np
import pytest
import torch
from jaxtyping import Float64
from scipy.special import logsumexp
from scipy.stats import kstest

from privacy.accountants.calibration import filter_commitment
from privacy.audit.two_world import judge
from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.units import Units
from privacy.commitment import Commitment, FloorStep
from privacy.contribution import GRID, Plan, contribute
from privacy.errors import BudgetExceeded, UnsupportedEvent
from privacy.events import LEAST_SHARE, NoiseShares, Poisson, ReleaseEvent, divergence_of_sum
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from privacy.mechanism import charged_release, charged_request, noisy_share, released_sum
from privacy.queries import NormBit, OneHotVote
from privacy.randomness.noise import GaussianNoise, InsecureZeroNoise
from privacy.randomness.sampling import CohortSampler
from tests.cases.drawn import cohort
from tests.cases.ledgers import MemoryLedger

SHARES = NoiseShares(10, 8, 1)
EVERYONE = Poisson(1.0, 10)
DIM = 4_000
PLAN = Plan(FlatClip(2.0, DIM), 1.5, (NormBit(1.0, 4.0),))


def committed(rounds: int = 3, shares: NoiseShares = SHARES) -> tuple[Commitment, float]:
    return filter_commitment(4.0, 1e-5, EVERYONE, rounds, adjacency="zero_out", noise_shares=shares)


def exact(parameter: float, reach: int) -> Float64[np.ndarray, " n"]:
    """Probabilities of a discrete Gaussian."""
    mass = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * parameter**2))
    return mass / mass.sum()


class TestAccount:
    @pytest.mark.parametrize("share", [0.75, 1.0, 1.25])
    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_a_sum_of_shares_is_within_tau_of_one_discrete_gaussian(self, share: float, count: int) -> None:
        """By exact convolution, where tau is large enough to be seen."""
        summed = single = exact(share, 60)
        for _ in range(count - 1):
            summed = np.convolve(summed, single)
        whole = exact(share * math.sqrt(count), len(summed) // 2)
        near = slice(len(summed) // 2 - 8, len(summed) // 2 + 9)
        off = float(np.abs(np.log(summed[near] / whole[near])).max())
        assert 0.0 < off <= divergence_of_sum(share, count)

    def test_shares_that_are_allowed_have_no_tau_at_all(self) -> None:
        assert divergence_of_sum(LEAST_SHARE, 1024) == 0.0
        assert divergence_of_sum(1.0, 1) == 0.0  # one share is no sum
        with pytest.raises(ValueError, match="share must be"):
            divergence_of_sum(float(1 << 57), 2)
        with pytest.raises(ValueError, match="count must be"):
            divergence_of_sum(1.0, 0)

    def test_a_discrete_gaussian_costs_at_any_order_at_most_what_is_charged(self) -> None:
        """Renyi divergence of the sum of 8 - 1 shares under an integer shift, computed from exact probabilities."""
        parameter, count, order = 3, 7, 5
        summed = single = exact(parameter, 60)
        for _ in range(count - 1):
            summed = np.convolve(summed, single)
        shift = 4
        inner = np.log(summed[len(summed) // 2 - 100 : len(summed) // 2 + 101])  # 12 standard deviations
        divergence = float(logsumexp(order * inner[shift:] + (1 - order) * inner[:-shift])) / (order - 1)
        multiplier = parameter * math.sqrt(count) / shift
        assert divergence <= order / (2 * multiplier**2) * (1 + 1e-9)
        assert divergence >= 0.98 * order / (2 * multiplier**2), "a bound that is not met may not be what is computed"

    def test_the_filter_takes_no_amplification(self) -> None:
        commitment, z = committed(3)
        assert commitment.order is not None
        assert commitment.rho is not None
        assert commitment.rho == pytest.approx(3 * commitment.order / (2 * z**2), rel=1e-3)
        with pytest.raises(UnsupportedEvent, match="rate 1"):
            filter_commitment(4.0, 1e-5, Poisson(0.5, 10), 3, adjacency="zero_out", noise_shares=SHARES)

    def test_floor_mode_and_other_adjacencies_are_refused(self) -> None:
        with pytest.raises(ValueError, match="zero_out"):
            filter_commitment(4.0, 1e-5, EVERYONE, 3, noise_shares=SHARES)
        floor = (FloorStep("round", EVERYONE, 3.0),)
        with pytest.raises(ValueError, match="filter"):
            Commitment("client", "zero_out", 10, 4.0, 1e-5, "floor", floor, noise_shares=SHARES)
        with pytest.raises(ValueError, match="needs noise_shares"):
            filter_commitment(4.0, 1e-5, EVERYONE, 3, adjacency="zero_out")
        with pytest.raises(ValueError, match="population"):
            filter_commitment(4.0, 1e-5, Poisson(1.0, 11), 3, adjacency="zero_out", noise_shares=SHARES)


class TestAgreement:
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ((1, 1), "parties"),
            ((1025, 1000), "parties"),
            ((10, 5), "survivors"),
            ((10, 11), "survivors"),
            ((10, 8, -1), "colluding"),
            ((10, 7, 4), "survivors"),
            ((2, 2, 1), "honest|survivors"),
            ((10, 8, 0, 20), "modulus_bits"),
        ],
    )
    def test_what_cannot_be_kept_is_refused(self, arguments: tuple[int, ...], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            NoiseShares(*arguments)

    @pytest.mark.parametrize("parties", [2, 3, 10, 101])
    @pytest.mark.parametrize("colluding", [0, 1])
    def test_no_server_gets_two_thresholds_of_answers(self, parties: int, colluding: int) -> None:
        if parties == 2 and colluding:
            return
        threshold = NoiseShares(parties, parties, colluding).threshold
        assert colluding < threshold
        assert (parties - colluding) + 2 * colluding < 2 * threshold

    @pytest.mark.parametrize("bits", [24, 32])
    @pytest.mark.parametrize("multiplier", [0.3, 3.0, 200.0])
    @pytest.mark.parametrize("parties", [3, 100, 1000])
    def test_nothing_wraps_around(self, parties: int, multiplier: float, bits: int) -> None:
        shares = NoiseShares(parties, parties // 2 + 2, 0, bits)
        try:
            grid = shares.grid_bits([multiplier])
        except ValueError:
            assert bits == 24  # shares of noise below LEAST_SHARE, or no grid at all
            return
        total_std = shares.share(multiplier, grid) * math.sqrt(parties)
        assert parties * 2**grid + 11.9 * total_std < 2 ** (bits - 1)
        assert shares.share(multiplier, grid) >= LEAST_SHARE
        room = parties + 12.0 * multiplier * math.sqrt(parties / (parties // 2 + 2))
        assert room * 2 ** (grid + 1) > 2 ** (bits - 1), "a finer grid fits into the modulus"

    def test_a_grid_too_coarse_for_the_least_noise_is_refused(self) -> None:
        """10 bits of grid are left: a share of 0.3 is 14 steps."""
        assert NoiseShares(1000, 502, 0, 24).grid_bits([200.0]) == 10
        with pytest.raises(ValueError, match=r"modulus_bits must be larger .* from 0.3 to 200"):
            NoiseShares(1000, 502, 0, 24).grid_bits([0.3, 200.0])

    @pytest.mark.parametrize(
        ("shares", "alone"),
        [((10, 8, 1), 7), ((10, 8, 0), 8), ((10, 10, 3), 7), ((100, 80, 10), 70), ((5, 4, 2), 2)],
    )
    def test_those_the_server_does_not_know_make_the_whole_noise(self, shares: tuple[int, ...], alone: int) -> None:
        """In numbers, not in the code's own words: m - c shares of z 2^g / sqrt(m - c) each."""
        made, grid, z = NoiseShares(*shares), 20, 1.5
        assert made.honest == alone
        share = made.share(z, grid)
        assert share == math.ceil(1.5 * 1048576 / math.sqrt(alone))
        assert alone * share**2 >= (1.5 * 1048576) ** 2 > (alone - 1) * share**2

    def test_json_brings_back_the_same(self) -> None:
        event = ReleaseEvent("round", 1, EVERYONE, PLAN.components(), SHARES)
        assert ReleaseEvent.from_json(json.loads(json.dumps(event.to_json()))) == event
        commitment, _ = committed()
        assert Commitment.from_json(json.loads(json.dumps(commitment.to_json()))) == commitment
        assert "noise_shares" not in ReleaseEvent("round", 1, EVERYONE, PLAN.components()).to_json()


def summed(count: int, plan: Plan = PLAN, **kind: object) -> torch.Tensor:
    rows = torch.zeros(1, plan.clip.params)
    total = torch.zeros(sum(part.dim for part in plan.components()), dtype=torch.int64)
    for _ in range(count):
        total += noisy_share(contribute(Units(rows), plan), plan, SHARES, **kind)  # type: ignore[arg-type]
    return total


class TestMechanism:
    def test_t6_the_noise_of_the_fewest_survivors_is_what_the_ledger_says(self, ledger: MemoryLedger) -> None:
        """Without the colluding party's share: m - c of them carry the whole promise."""
        plan = Plan(FlatClip(2.0, DIM), 1.5)
        requested = charged_request(plan, cohort(EVERYONE, 1, ledger), noise_shares=SHARES, ledger=ledger)
        release = released_sum(summed(7, plan), requested, ledger)
        update = release.update
        assert release.loudness == 1.0
        promised = requested.event.components[0].noise_std * 2.0 / 10  # bound 2, divisor 10
        assert kstest(update.numpy() / promised, "norm").pvalue > 1e-8  # its chance to fail
        assert float(update.std()) == pytest.approx(promised, rel=5.5 / math.sqrt(2 * DIM))
        assert ledger.steps == ["charge", "released"]
        assert ledger.events == [requested.event]
        stale = CohortSampler.create().draw(EVERYONE, 1)
        with pytest.raises(ValueError, match="draw another cohort"):
            charged_request(plan, stale, noise_shares=SHARES, ledger=ledger)
        assert ledger.events == [requested.event]

    def test_clients_told_to_add_no_noise_stamp_the_ledger(self, ledger: MemoryLedger) -> None:
        for insecure, stamp in ((False, None), (True, "the clients were told to add no noise")):
            drawn = cohort(EVERYONE, 1 + len(ledger.events), ledger)
            charged_request(PLAN, drawn, noise_shares=SHARES, ledger=ledger, insecure=insecure)
            assert ledger.not_private == stamp

    def test_every_part_has_its_own_share(self, ledger: MemoryLedger) -> None:
        plan = Plan(
            NoUpdate(), 1.0, (OneHotVote(tuple(np.linspace(0.1, 1, 400)), 10.0, simulated_noise_std_per_bound=0.0),)
        )
        total = torch.stack(
            [
                noisy_share(
                    contribute(Units(torch.zeros(0, 1), votes=torch.zeros(0, dtype=torch.int64)), plan), plan, SHARES
                )
                for _ in range(5)
            ]
        )
        grid = SHARES.grid_bits([10.0])
        expected = 10.0 * 2**grid / math.sqrt(7)
        assert float(total.double().std()) == pytest.approx(expected, rel=5.5 / math.sqrt(2 * total.numel()))

    def test_without_noise_it_is_the_plain_sum(self, ledger: MemoryLedger) -> None:
        rows = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
        parts = [contribute(Units(row.unsqueeze(0)), PLAN) for row in rows]
        requested = charged_request(
            PLAN, cohort(EVERYONE, 1, ledger), noise_shares=SHARES, ledger=ledger, insecure=True
        )
        noisy = sum((noisy_share(part, PLAN, SHARES, InsecureZeroNoise()) for part in parts), torch.zeros(1).long())
        one = released_sum(noisy, requested, ledger)
        total = sum(parts[1:], parts[0])
        other = charged_release(total, PLAN, cohort(EVERYONE, 1, ledger), ledger=ledger, noise=InsecureZeroNoise())
        assert ledger.not_private is not None
        step = 2.0 ** -SHARES.grid_bits([1.5, 8.0])
        assert float((one.update - other.update).abs().max()) <= 4 * step * 2.0 / 10
        assert float(one.answers[0]) == float(other.answers[0]), "bits are exact on every grid"

    def test_no_norm_grows_on_the_coarser_grid(self) -> None:
        shares = NoiseShares(10, 8, 0, 24)
        plan = Plan(FlatClip(1.0, 2_000), 1.0)
        rows = torch.randn(20, 2_000, generator=torch.Generator().manual_seed(2)) * 100
        grid = shares.grid_bits([1.0])
        for row in rows:
            fine = contribute(Units(row.unsqueeze(0)), plan)
            coarse = noisy_share(fine, plan, shares, InsecureZeroNoise())
            assert sum(int(x) ** 2 for x in coarse) <= (1 << grid) ** 2
            assert float((coarse.double() / 2**grid - fine.encoded.double() / GRID).abs().max()) < 2.0**-grid

    @pytest.mark.parametrize(("beyond", "refused"), [(-2, False), (2, True)])
    def test_a_sum_is_as_long_as_all_parties_and_their_noise_and_no_longer(
        self, ledger: MemoryLedger, beyond: int, refused: bool
    ) -> None:
        plan = Plan(FlatClip(2.0, DIM), 1.5)
        requested = charged_request(plan, cohort(EVERYONE, 1, ledger), noise_shares=SHARES, ledger=ledger)
        grid = SHARES.grid_bits([1.5])
        noise = math.ceil(1.5 * 2**grid / math.sqrt(7)) * math.sqrt(10) * (math.sqrt(DIM) + 10)
        noisy = torch.zeros(DIM, dtype=torch.int64)
        noisy[3] = int(10 * 2**grid + noise) + beyond
        if refused:
            with pytest.raises(ValueError, match="longer than any honest sum"):
                released_sum(noisy, requested, ledger)
        else:
            released_sum(noisy, requested, ledger)

    def test_only_noise_that_adds_up_may_be_shared(self) -> None:
        with pytest.raises(ValueError, match="DiscreteGaussianNoise"):
            noisy_share(contribute(Units(torch.zeros(1, DIM)), PLAN), PLAN, SHARES, GaussianNoise())

    def test_a_share_of_two_units_is_refused(self) -> None:
        with pytest.raises(ValueError, match="more"):
            noisy_share(contribute(Units(torch.ones(2, DIM) * 9), PLAN), PLAN, SHARES)

    def test_a_budget_that_is_spent_asks_nobody(self, broke_ledger: MemoryLedger) -> None:
        with pytest.raises(BudgetExceeded):
            charged_request(PLAN, cohort(EVERYONE, 1, broke_ledger), noise_shares=SHARES, ledger=broke_ledger)
        assert broke_ledger.steps == []

    def test_the_audit_finds_the_guarantee_kept_and_too_few_shares_not(self) -> None:
        """Two worlds of the opened sum: the worst contribution of a client, or zero. Every coordinate is a run.

        What keeps the guarantee fails with a probability below alpha; too few shares pass 10 standard deviations off.
        """
        plan = Plan(FlatClip(1.0, 4000), 1.0)
        canary = torch.zeros(1, 4000)
        canary[0, 0] = 9.0
        worst = noisy_share(contribute(Units(canary), plan), plan, SHARES, InsecureZeroNoise())
        assert int(worst[0]) == (1 << SHARES.grid_bits([1.0])) - 1  # toward zero, from just below
        for honest, kept in ((7, True), (3, False)):
            present = (summed(honest, plan) + worst[0]).double().numpy()
            absent = summed(honest, plan).double().numpy()
            assert judge(present, absent, noise_multiplier=1.0, alpha=1e-7).passed == kept


class TestLedger:
    def test_a_run_is_charged_by_what_it_committed_to(self, tmp_path) -> None:
        commitment, z = committed(2)
        plan = Plan(FlatClip(1.0, 20), z)
        with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
            for round in (1, 2):
                requested = charged_request(plan, cohort(EVERYONE, round, ledger), noise_shares=SHARES, ledger=ledger)
                released_sum(summed(8, plan), requested, ledger)
            with pytest.raises(BudgetExceeded, match="left of"):
                charged_request(plan, cohort(EVERYONE, 3, ledger), noise_shares=SHARES, ledger=ledger)
            total = contribute(Units(torch.zeros(0, 20)), plan)
            with pytest.raises(BudgetExceeded, match="by whom"):
                charged_release(total, plan, cohort(EVERYONE, 3, ledger), ledger=ledger)
        with Ledger.open(tmp_path / "ledger.jsonl") as again:
            assert [event.noise_shares for event in again.events] == [SHARES, SHARES]
            statement = privacy_statement(again)
        assert "against anyone, the server included as long as at most 1 clients collude" in statement["sentence"]
        assert "replacing all that one client contributes by zero" in statement["sentence"]
        assert "at most 1 of the 10 clients" in statement["trust_model"]
        assert "no amplification" in statement["trust_model"]
        assert not any("before noise is added" in text for text in statement["not_covered"])
