"""The judge of sentences about restaurants: a fixed rule, and its intervals."""

import pytest

from client.data.catalog.restaurants import slots_of
from simulations.benchmarks.planning.preference import beside, coverage, states, wilson

MEANING = "name[The Mill], eatType[pub], area[city centre], priceRange[less than £20], familyFriendly[no]"


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("The Mill is a pub in the centre of the city. It costs less than 20 and is not family-friendly.", 1.0),
        ("The Mill is a family friendly pub by the river, for more than £30.", 0.4),
        ("It rains.", 0.0),
    ],
)
def test_coverage_is_the_share_of_slots_that_a_text_states(text: str, share: float) -> None:
    assert coverage(slots_of(MEANING), text) == pytest.approx(share)


def test_children_are_welcome_unless_a_text_denies_it() -> None:
    assert states("familyFriendly", "yes", "A kid friendly place.")
    assert not states("familyFriendly", "yes", "It is not child friendly.")
    assert not states("familyFriendly", "no", "A pub.")


def test_ties_count_half_and_intervals_hold_the_mean() -> None:
    found = beside([(1.0, -9), (0.5, -8), (0.5, -7), (0.5, -9), (0.0, -2)] * 15, [(0.5, -8)] * 75)
    assert (found["coverage"], found["words"], found["wins"]) == (0.5, 7.0, 0.5)  # more slots, then fewer words
    assert found["wins_from"] < 0.5 < found["wins_to"]
    assert wilson(0.5, 300) == pytest.approx(0.056, abs=0.001)
