"""A negative control: Flower's wrappers behave as in docs/results/guarantee.md, and our path as it must."""

import json
from collections.abc import Callable, Iterator

import pytest

from privacy.ledger.ledger import Ledger
from simulations.benchmarks.harness.results import RESULTS
from simulations.benchmarks.privacy import flower_dp
from simulations.benchmarks.privacy.flower_dp import CHECKS, Pair, silence
from simulations.benchmarks.privacy.flower_rounds import scratch_ledger

COMMITTED = {
    line["check"]: line
    for line in json.loads((RESULTS / "flower-dp-control.json").read_text(encoding="utf-8"))["lines"]
}


@pytest.fixture(scope="module")
def ledger() -> Iterator[Ledger]:
    silence()
    with scratch_ledger() as ledger:
        yield ledger


def agree(name: str, pair: Pair) -> None:
    """Both sides do today what the committed table says, and ours holds."""
    assert pair.flower.holds == COMMITTED[name]["flower"]["holds"], pair.flower.text
    assert COMMITTED[name]["lacquer"]["holds"]
    assert pair.lacquer.holds, pair.lacquer.text


@pytest.mark.parametrize(
    "check",
    [
        flower_dp.nan_update,
        flower_dp.zero_update,
        flower_dp.example_weights,
        flower_dp.adaptive_noise_scale,
        flower_dp.replayed_noise,
        flower_dp.metrics,
    ],
)
def test_the_faults_that_decided_against_the_wrappers(check: Callable[[Ledger], Pair], ledger: Ledger) -> None:
    pair = check(ledger)
    assert not pair.flower.holds
    agree(next(name for name, known in CHECKS.items() if known is check), pair)


@pytest.mark.parametrize("name", CHECKS)
def test_every_line_of_the_table(name: str, ledger: Ledger) -> None:
    agree(name, CHECKS[name](ledger))


@pytest.mark.parametrize("name", flower_dp.AUDITS)
def test_audits(name: str, ledger: Ledger) -> None:
    agree(name, flower_dp.audit_of(name, ledger))


def test_every_check_has_its_line() -> None:
    assert list(COMMITTED) == [*CHECKS, *flower_dp.AUDITS]
