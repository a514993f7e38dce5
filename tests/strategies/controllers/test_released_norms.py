"""What is read off noisy histograms: bins that are noise are not believed, quantiles are those of the counts."""

import numpy as np
import pytest
import torch

from privacy.randomness.rng import simulation_generator
from strategies.controllers import released_norms

EDGES = released_norms.norm_edges(1.0, 8.0)


def test_edges_are_half_octaves() -> None:
    assert pytest.approx([2 ** (j / 2) for j in range(7)]) == EDGES
    assert released_norms.norm_edges(0.5, 3.0)[-1] >= 3.0
    assert len(released_norms.representatives(EDGES)) == len(EDGES) + 1
    middles = released_norms.representatives(EDGES)
    assert all(low < edge < high for low, edge, high in zip(middles, EDGES, middles[1:], strict=False))


def test_the_average_over_rounds_is_unbiased_and_its_noise_is_what_is_said() -> None:
    """5000 bins that all hold 20 clients, under noise of std 5."""
    noise = simulation_generator(0, "counts")
    history: tuple[float, ...] = ()
    for rounds in range(1, 7):
        history = released_norms.blend_histogram(history, torch.from_numpy(20 + 5 * noise.standard_normal(5000)), 0.8)
        counts = np.array(history) / (1 - 0.8**rounds)
        assert counts.mean() == pytest.approx(20.0, abs=0.3)
        assert counts.std() == pytest.approx(released_norms.noise_left(5.0, 0.8, rounds), rel=0.04)
    assert released_norms.noise_left(5.0, 0.0, 3) == 5.0


def test_noise_alone_is_hardly_ever_believed_and_a_full_bin_is() -> None:
    noise = simulation_generator(1, "counts")
    believed = 0
    for _ in range(300):
        counts = torch.from_numpy(10 * noise.standard_normal(30))
        believed += released_norms.shares(released_norms.blend_histogram((), counts, 0.0), 0.0, 1, 10.0) is not None
        counts[12] += 100
        parts = released_norms.shares(released_norms.blend_histogram((), counts, 0.0), 0.0, 1, 10.0)
        assert parts is not None
        assert sum(parts) == pytest.approx(1.0)
        assert sum(parts[11:14]) > 0.5
    assert believed <= 9  # 300 x 30 bins x 2.3e-4 = 2 are expected


def test_what_lies_far_from_the_significant_bins_counts_as_empty() -> None:
    counts = torch.tensor([3.0, 0.0, -2.0, 40.0, 50.0, 4.0, 3.0, 3.0])
    parts = released_norms.shares(tuple(counts.tolist()), 0.0, 1, 5.0)
    assert parts == pytest.approx([0, 0, 0, 40 / 94, 50 / 94, 4 / 94, 0, 0])


PARTS = (0.1, 0.0, 0.2, 0.4, 0.2, 0.0, 0.0, 0.1)


def test_edges_and_quantiles_are_those_of_the_shares() -> None:
    assert released_norms.upper_edge(EDGES, PARTS, 0.05) == EDGES[0]
    assert released_norms.upper_edge(EDGES, PARTS, 0.1) == EDGES[2]  # more than the share, not as much
    assert released_norms.upper_edge(EDGES, PARTS, 0.5) == EDGES[3]
    assert released_norms.upper_edge(EDGES, PARTS, 0.95) == EDGES[-1]
    assert released_norms.quantile(EDGES, PARTS, 0.05) == EDGES[0]
    assert released_norms.quantile(EDGES, PARTS, 0.5) == pytest.approx(EDGES[2] * 2 ** (0.5 * 0.2 / 0.4))
    assert released_norms.quantile(EDGES, PARTS, 0.99) == EDGES[-1]
    assert released_norms.share_above(EDGES, PARTS, 0.5) == pytest.approx(0.9)
    assert released_norms.share_above(EDGES, PARTS, 100.0) == 0.1
    for share in (0.15, 0.5, 0.65, 0.8):
        norm = released_norms.quantile(EDGES, PARTS, share)
        assert released_norms.share_above(EDGES, PARTS, norm) == pytest.approx(1 - share)
