"""What `lacquer plan` recommends to train: the most values that should come half of the way, where any do."""

import pytest

from simulations.planning.choices import Choice, Pace, Trained, _chosen
from simulations.planning.signal import ALONE, BESIDE_A_HEAD, HALFWAY, expected_share

PACE = Pace(0.1, 10, 50.0, (1.0,) * 10, {})


def sizes(*signals: float, head: float | None = None) -> tuple[Choice, ...]:
    """Choices of ever more values with these signals; the head alone, of the fewest, first."""
    found = [Choice(PACE, Trained(f"{number}", 100 * number, {}), signal) for number, signal in enumerate(signals, 1)]
    if head is not None:
        found.insert(0, Choice(PACE, Trained("head", 50, {}, head_alone=True), head))
    return tuple(found)


@pytest.mark.parametrize(
    ("signals", "chosen", "least"),
    [
        ((20.0, 9.0, 6.0, 2.0), "3", HALFWAY[1]),
        ((5.0, 4.0, 2.0, 1.5), "2", HALFWAY[0]),
        ((3.0, 1.5, 0.9), "2", ALONE),
        ((0.8, 0.5), "1", None),
    ],
)
def test_a_language_model_trains_the_most_values_that_should_come_half_of_the_way(
    signals: tuple[float, ...], chosen: str, least: float | None
) -> None:
    best, why = _chosen(sizes(*signals))
    assert best.trained.name == chosen
    assert why.startswith("no values") if least is None else f"S of at least {least:g}" in why
    assert ("half of the way is expected" in why) == (least in HALFWAY)
    if least == HALFWAY[1]:
        assert expected_share(best.signal)[0] >= 0.5


def test_a_classifier_trains_its_head_where_no_adapter_pays() -> None:
    assert _chosen(sizes(BESIDE_A_HEAD - 0.1, head=9.0))[0].trained.head_alone
    assert _chosen(sizes(9.0, BESIDE_A_HEAD, head=12.0))[0].trained.name == "2"
