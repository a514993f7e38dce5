"""The assignment of records to clients, in simulations.

- ``dirichlet``: label skew. The records of every class are dealt to the clients by proportions drawn from a symmetric
  Dirichlet distribution over the clients (flwr-datasets' ``DirichletPartitioner``; Yurochkin et al., ICML 2019,
  arXiv 1905.12022). Sizes differ widely, and with few records per client some clients have none: they stay, as empty
  clients, since dropping them would let the population depend on the data.
- ``iid``: a random permutation cut into parts whose sizes differ by at most one; the cut is that of flwr-datasets'
  ``IidPartitioner``, computed by arithmetic, so a million clients cost nothing.
- ``natural``: one client per value of a column, in sorted order, as flwr-datasets' ``NaturalIdPartitioner`` has them;
  nodes with many clients need it, whose image is without that package's dependencies.
- ``pathological``, ``shard``: flwr-datasets' partitioners of these names, with ``data.partition-options``: so many
  labels, or pieces of the records sorted by label, for every client (McMahan et al., AISTATS 2017, arXiv 1602.05629,
  section 3). Records of a label that no client draws are left out. Its other partitioners need arrays of sizes, or
  fail above some ten clients (``linear``, ``square``, ``exponential``).
- ``repeated``: for speed tests only. Any number of clients share the records: client `i` reads window
  ``i mod (n // size)``. Clients overlap, so utility and attack results on it mean nothing.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privacy import checks
from privacy.randomness.rng import simulation_generator

PARTITIONERS = {
    "pathological": "PathologicalPartitioner",
    "shard": "ShardPartitioner",
}
"""Classes of flwr-datasets, by the name that a configuration gives."""
BY_LABEL = ("dirichlet", *PARTITIONERS)
_OURS = ("num_partitions", "partition_by", "seed")


@dataclass(frozen=True)
class Partition:
    """Records in client order: client `i` owns ``order[starts[i]:stops[i]]``.

    Attributes:
        order: int64 ``[n]``, indices of records.
        starts, stops: int64 ``[clients]``, positions in `order`.
        names: natural ids of the clients, where they have any.
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    names: tuple[str, ...] = ()

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of records of each client."""
        return self.stops - self.starts

    def __len__(self) -> int:
        return len(self.starts)

    def client(self, index: int) -> NDArray[np.int64]:
        """Indices of the records of one client."""
        return self.order[self.starts[index] : self.stops[index]]


def dirichlet(labels: NDArray[np.int64], clients: int, alpha: float, seed: int) -> Partition:
    """Deal records to label-skewed clients. All records are dealt, each to one client.

    Measured for 66,000 records on one core: 0.9 s for 1,000 clients, 1.1 s for 10,000. The partitioner's own minimum
    size is switched off: with 1,000 clients of about 66 records it never finds ten for each and gives up.
    """
    checks.positive(dirichlet_alpha=alpha)
    _check_clients(clients, len(labels))
    from datasets import Dataset  # seconds to import: only whoever partitions pays
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=clients,
        partition_by="label",
        alpha=alpha,
        min_partition_size=0,
        self_balancing=False,
        seed=int(simulation_generator(seed, "partition").integers(2**31)),
    )
    partitioner.dataset = Dataset.from_dict({"label": labels})
    partitioner.load_partition(0)  # draws all partitions
    # load_partition copies a Dataset, 3 ms a client; the indices behind it are all that is needed
    indices = partitioner._partition_id_to_indices
    return _from_parts([np.asarray(indices[client], dtype=np.int64) for client in range(clients)])


def iid(records: int, clients: int, seed: int) -> Partition:
    """Clients of equal size, give or take one record."""
    _check_clients(clients, records)
    small, larger = divmod(records, clients)
    stops = np.arange(1, clients + 1) * small + np.minimum(np.arange(1, clients + 1), larger)
    order = simulation_generator(seed, "partition").permutation(records)
    return Partition(order, np.concatenate([[0], stops[:-1]]), stops)


def natural(ids: list[str]) -> Partition:
    """One client per distinct id, in sorted order."""
    checks.not_empty(client_ids=ids)
    names = tuple(sorted(set(ids)))
    position = {name: index for index, name in enumerate(names)}
    owner = np.array([position[name] for name in ids])
    order = np.argsort(owner, kind="stable").astype(np.int64)
    stops = np.cumsum(np.bincount(owner, minlength=len(names)))
    return Partition(order, np.concatenate([[0], stops[:-1]]), stops, names)


def check_options(name: str, options: Mapping[str, str | int | float | bool]) -> None:
    """Refuse options that a partitioner does not take, or lacks.

    Raises:
        ValueError: naming the option and what there is.
    """
    takes: dict[str, inspect.Parameter] = {}
    if name in PARTITIONERS:
        signature = inspect.signature(_class(name)).parameters
        takes = {k.replace("_", "-"): p for k, p in signature.items() if k not in _OURS}
    for option in options:
        if option not in takes:
            there = f"its options are: {', '.join(takes)}" if takes else "it takes none"
            raise ValueError(f"data.partition-options.{option} is no option of data.partition = {name!r}; {there}")
    missing = [k for k, p in takes.items() if p.default is inspect.Parameter.empty and k not in options]
    if missing:
        raise ValueError(f"data.partition = {name!r} needs data.partition-options.{missing[0]}")


def by_flwr_datasets(
    name: str,
    labels: NDArray[np.int64],
    clients: int,
    options: Mapping[str, str | int | float | bool],
    seed: int,
) -> Partition:
    """Clients as a partitioner of flwr-datasets makes them, of records in an order drawn by the seed.

    Args:
        name: of :data:`PARTITIONERS`.
        labels: int64 ``[records]``.

    Raises:
        ValueError: the partitioner cannot, in its words; or a record has two clients, so that no client could be
            protected by itself.
    """
    _check_clients(clients, len(labels))
    check_options(name, options)
    from datasets import Dataset

    draws = simulation_generator(seed, "partition")
    rows = draws.permutation(len(labels))
    given = {key.replace("-", "_"): value for key, value in options.items()}
    ours = {"num_partitions": clients, "partition_by": "label", "seed": int(draws.integers(2**31))}
    try:
        partitioner = _class(name)(**ours, **given)
        partitioner.dataset = Dataset.from_dict({"row": rows, "label": labels[rows]})
        parts = [np.asarray(partitioner.load_partition(i)["row"][:], dtype=np.int64) for i in range(clients)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"data.partition = {name!r}, data.partition-options = {dict(options)}: {error}") from error
    found = _from_parts(parts)
    if len(np.unique(found.order)) < len(found.order):
        raise ValueError(f"data.partition = {name!r} gives a record to two clients; change data.partition-options")
    return found


def repeat_records(records: int, clients: int, size: int, seed: int) -> Partition:
    """Overlapping clients of `size` records each, as many as wanted. For speed tests only."""
    checks.integer_at_least(1, clients=clients, records_per_client=size)
    if size > records:
        raise ValueError(f"records_per_client must be <= {records}, the records there are, got {size}")
    starts = (np.arange(clients) % (records // size)) * size
    return Partition(simulation_generator(seed, "partition").permutation(records), starts, starts + size)


def of_whole_units(units: NDArray[np.int64], dealt: Partition) -> Partition:
    """Records dealt by the units they belong to.

    Args:
        units: int64 ``[records]``, the unit of every record, numbered from 0 without gaps.
        dealt: of the units.
    """
    rows = np.split(np.argsort(units, kind="stable"), np.cumsum(np.bincount(units))[:-1])
    return _from_parts(
        [np.concatenate([np.empty(0, np.int64), *(rows[unit] for unit in dealt.client(i))]) for i in range(len(dealt))]
    )


def _class(name: str) -> Any:
    import flwr_datasets.partitioner  # seconds to import: only whoever partitions pays

    return getattr(flwr_datasets.partitioner, PARTITIONERS[name])


def _check_clients(clients: int, records: int) -> None:
    checks.integer_at_least(1, clients=clients)
    if clients > records:
        raise ValueError(
            f"clients must be <= {records}, the number of training records, got {clients}; lower clients or, to "
            "measure speed only, set data.partition = 'repeated'"
        )


def _from_parts(parts: list[NDArray[np.int64]]) -> Partition:
    stops = np.cumsum([len(part) for part in parts])
    return Partition(np.concatenate(parts), np.concatenate([[0], stops[:-1]]), stops)
