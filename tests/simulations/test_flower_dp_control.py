"""The negative control: Flower's wrappers behave as the table in privacy/README.md says, and our path as it must."""

import json
from collections.abc import Callable, Iterator

import pytest

from privacy.ledger import Ledger
from simulations.benchmarks import flower_checks, flower_guarantee_checks
from simulations.benchmarks.flower_checks import Pair
from simulations.benchmarks.flower_dp_control import CHECKS
from simulations.benchmarks.flower_wrappers import silence
from simulations.benchmarks.release_paths import scratch_ledger
from simulations.benchmarks.tables import RESULTS

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
        flower_checks.nan_update,
        flower_checks.zero_update,
        flower_checks.example_weights,
        flower_checks.adaptive_noise_scale,
        flower_checks.replayed_noise,
        flower_guarantee_checks.metrics,
    ],
)
def test_the_faults_that_decided_against_the_wrappers(check: Callable[[Ledger], Pair], ledger: Ledger) -> None:
    pair = check(ledger)
    assert not pair.flower.holds
    agree(next(name for name, known in CHECKS.items() if known is check), pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_every_line_of_the_table(name: str, ledger: Ledger) -> None:
    agree(name, CHECKS[name](ledger))


@pytest.mark.slow
@pytest.mark.parametrize("name", flower_guarantee_checks.AUDITS)
def test_audits(name: str, ledger: Ledger) -> None:
    agree(name, flower_guarantee_checks.audit_of(name, ledger))


def test_every_check_has_its_line() -> None:
    assert list(COMMITTED) == [*CHECKS, *flower_guarantee_checks.AUDITS]
