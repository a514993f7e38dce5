"""Partitions: every record has one owner, the skew is Dirichlet's, arithmetic agrees with flwr-datasets."""

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, NaturalIdPartitioner

from client.data.partition import (
    by_flwr_datasets,
    check_options,
    dirichlet,
    iid,
    natural,
    of_whole_units,
    repeat_records,
)
from privacy.randomness.rng import simulation_generator


def _labels(count, classes=2):
    return np.random.default_rng(0).integers(0, classes, count)


def _owners_are_exact(parts, records):
    assert parts.sizes.sum() == records
    np.testing.assert_array_equal(np.sort(np.concatenate([parts.client(i) for i in range(len(parts))])), range(records))


def test_dirichlet_covers_all_records_once_and_is_repeatable():
    labels = _labels(6000)
    parts = dirichlet(labels, 100, 1.0, seed=3)
    _owners_are_exact(parts, 6000)
    again, other = dirichlet(labels, 100, 1.0, seed=3), dirichlet(labels, 100, 1.0, seed=4)
    np.testing.assert_array_equal(parts.order, again.order)
    assert not np.array_equal(parts.order, other.order)


def test_dirichlet_takes_the_partitioners_own_clients():
    """The indices behind the partitioner are what its public ``load_partition`` returns."""
    labels = _labels(300)
    parts = dirichlet(labels, 10, 0.5, seed=1)
    seed = int(simulation_generator(1, "partition").integers(2**31))
    partitioner = DirichletPartitioner(10, "label", 0.5, min_partition_size=0, self_balancing=False, seed=seed)
    partitioner.dataset = Dataset.from_dict({"label": labels, "row": np.arange(300)})
    for client in range(10):
        assert partitioner.load_partition(client)["row"][:] == parts.client(client).tolist()


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_skew_is_that_of_the_distribution(alpha):
    """A class's share at one client is Beta(alpha, (K-1) alpha): its standard deviation tells alpha."""
    labels, clients = _labels(30_000), 100
    parts = dirichlet(labels, clients, alpha, seed=0)
    share = np.array([(labels[parts.client(i)] == 1).sum() for i in range(clients)]) / (labels == 1).sum()
    expected = np.sqrt((1 / clients) * (1 - 1 / clients) / (clients * alpha + 1))
    assert share.std() == pytest.approx(expected, rel=0.35)


def test_reference_setting_has_small_and_empty_clients_and_keeps_them():
    parts = dirichlet(_labels(5000), 1000, 1.0, seed=0)
    _owners_are_exact(parts, 5000)
    assert len(parts) == 1000
    assert parts.sizes.min() == 0
    assert parts.sizes.max() > 15


def test_iid_agrees_with_flwr_datasets_and_scales():
    parts = iid(103, 10, seed=2)
    _owners_are_exact(parts, 103)
    partitioner = IidPartitioner(10)
    partitioner.dataset = Dataset.from_dict({"row": parts.order})
    for client in range(10):
        assert partitioner.load_partition(client)["row"][:] == parts.client(client).tolist()
    many = iid(1_000_000, 300_000, seed=0)
    assert (many.sizes.min(), many.sizes.max(), many.sizes.sum()) == (3, 4, 1_000_000)


def test_natural_clients_in_sorted_order():
    ids = ["b", "a", "b", "c", "a", "b"]
    parts = natural(ids)
    assert parts.names == ("a", "b", "c")
    assert [parts.client(i).tolist() for i in range(3)] == [[1, 4], [0, 2, 5], [3]]
    partitioner = NaturalIdPartitioner("client")
    partitioner.dataset = Dataset.from_dict({"client": ids, "row": range(6)})
    for client in range(3):
        assert partitioner.load_partition(client)["row"][:] == parts.client(client).tolist()


def test_whole_units_stay_together():
    units = np.random.default_rng(0).permutation(np.repeat(np.arange(40), np.arange(40) % 5 + 1))
    dealt = iid(40, 7, seed=1)
    parts = of_whole_units(units, dealt)
    _owners_are_exact(parts, len(units))
    for client in range(7):
        assert sorted(set(units[parts.client(client)])) == sorted(dealt.client(client))


def test_repeated_windows_for_a_million_clients():
    parts = repeat_records(1003, 1_000_000, size=20, seed=0)
    assert len(parts) == 1_000_000
    assert set(parts.sizes.tolist()) == {20}
    np.testing.assert_array_equal(parts.client(0), parts.client(50))
    assert not set(parts.client(0)) & set(parts.client(1))
    assert parts.stops.max() <= 1003


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"clients .*<= 10, .* got 11"):
        iid(10, 11, 0)
    with pytest.raises(ValueError, match="clients must be <= 10"):
        dirichlet(_labels(10), 11, 1.0, 0)
    with pytest.raises(ValueError, match="dirichlet_alpha must be > 0"):
        dirichlet(_labels(10), 2, 0.0, 0)
    with pytest.raises(ValueError, match="records_per_client must be <= 10"):
        repeat_records(10, 5, 11, 0)


def test_pathological_clients_have_so_many_labels_and_no_record_two_clients():
    labels = _labels(3000, classes=10)
    parts = by_flwr_datasets("pathological", labels, 100, {"num-classes-per-partition": 3}, seed=5)
    _owners_are_exact(parts, 3000)
    assert {len(np.unique(labels[parts.client(i)])) for i in range(100)} == {3}
    again = by_flwr_datasets("pathological", labels, 100, {"num-classes-per-partition": 3}, seed=5)
    np.testing.assert_array_equal(parts.order, again.order)
    other = by_flwr_datasets("pathological", labels, 100, {"num-classes-per-partition": 3}, seed=6)
    assert not np.array_equal(parts.order, other.order)


def test_records_of_a_label_that_no_client_draws_are_left_out():
    labels = _labels(1000, classes=10)
    parts = by_flwr_datasets("pathological", labels, 3, {"num-classes-per-partition": 1}, seed=0)
    drawn = np.unique(labels[parts.order])
    assert len(drawn) <= 3
    np.testing.assert_array_equal(np.sort(parts.order), np.flatnonzero(np.isin(labels, drawn)))


def test_shards_are_pieces_of_the_records_by_label():
    labels = _labels(1200, classes=6)
    parts = by_flwr_datasets("shard", labels, 60, {"num-shards-per-partition": 2}, seed=1)
    _owners_are_exact(parts, 1200)
    assert set(parts.sizes) == {20}
    assert max(len(np.unique(labels[parts.client(i)])) for i in range(60)) <= 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("iid", {"alpha": 1}, "partition-options.alpha is no option of data.partition = 'iid'; it takes none"),
        ("pathological", {}, "'pathological' needs data.partition-options.num-classes-per-partition"),
        ("shard", {"shards": 2}, "its options are: num-shards-per-partition, shard-size"),
        ("shard", {"seed": 2}, "partition-options.seed is no option"),
    ],
)
def test_options_are_checked_before_anything_is_read(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_options(name, options)


def test_what_the_partitioner_refuses_is_said_with_the_setting():
    with pytest.raises(ValueError, match=r"data\.partition = 'pathological', data\.partition-options = .*: "):
        by_flwr_datasets("pathological", _labels(100), 10, {"num-classes-per-partition": 7}, seed=0)
