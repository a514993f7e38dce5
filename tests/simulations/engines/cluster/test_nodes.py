"""From the nodes that Ray lists to workers, cores and shares of GPUs; the lists are invented."""

from typing import Any

import pytest

from server.config.load import ConfigError, parse
from simulations.engines.cluster.nodes import allocate_workers, living_nodes
from simulations.engines.hardware import Resources

HEAD, GIB = {"CPU": 2.0, "memory": 8 * 2.0**30, "node:__internal_head__": 1.0}, 2.0**30
GPUS = {"CPU": 64.0, "GPU": 8.0, "memory": 500 * GIB, "accelerator_type:H100": 1.0}
CORES = {"CPU": 16.0, "memory": 64 * GIB}


def plan(nodes: list[dict[str, float]], **engine: Any) -> Resources:
    listed = [
        {"Alive": bool(has), "NodeManagerHostname": f"n{i}", "NodeManagerAddress": f"10.0.0.{i}", "Resources": has}
        for i, has in enumerate(nodes)
    ]
    table = {"engine": {"ray-address": "h:1", **engine}, "clients": 10_000, "sampling-rate": 0.1}
    return allocate_workers(parse(table), living_nodes(listed))


@pytest.mark.parametrize("head", [HEAD, {"CPU": 0.0}, {"memory": 8 * GIB}, GPUS])
def test_gpus_of_the_nodes_count_whatever_the_head_has(head: dict[str, float]) -> None:
    nodes = [head, *[GPUS] * (7 if head is GPUS else 8)]
    assert plan(nodes, workers=64) == Resources(64, 8, 64, 1.0, cores=8)
    assert plan(nodes, workers=0) == Resources(64, 8, 64, 1.0, cores=8), "one a GPU"
    assert plan(nodes, workers=64, device="cuda").gpu_share == 1.0


@pytest.mark.parametrize(("workers", "share", "cores"), [(8, 1.0, 64), (65, 0.5, 7), (128, 0.5, 4), (192, 0.3333, 2)])
def test_the_share_is_the_largest_and_the_cores_the_most_with_room_for_all(workers, share, cores) -> None:
    found = plan([HEAD] + [GPUS] * 8, workers=workers)
    assert (found.gpu_share, found.cores, found.threads) == (share, cores, cores)


def test_nodes_of_different_sizes_are_counted_one_by_one() -> None:
    small = {"CPU": 4.0, "GPU": 1.0, "memory": 16 * GIB}
    assert plan([HEAD, GPUS, small], workers=9) == Resources(9, 4, 9, 1.0, cores=4)
    assert plan([HEAD, GPUS, small], workers=10).gpu_share == 0.5
    starved = {"CPU": 2.0, "GPU": 8.0}
    assert plan([GPUS, starved], workers=10) == Resources(10, 1, 16, 1.0), "8 there and 2 here"
    assert plan([GPUS, starved], workers=11).gpu_share == 0.5, "a GPU without a core holds nobody"


def test_a_cluster_without_gpus_is_counted_by_its_cores_and_by_memory_where_nobody_says_how_many() -> None:
    assert plan([{"CPU": 0.0}, CORES, CORES], workers=4) == Resources(4, 8, 0, 0.0, cores=8), "two on each"
    assert plan([{"CPU": 0.0}, CORES, CORES], workers=0) == Resources(32, 1, 0, 0.0)
    assert plan([CORES, {"CPU": 16.0, "memory": 6 * GIB}], workers=0).workers == 16 + 4
    assert plan([GPUS] * 8, workers=8, device="cpu") == Resources(8, 64, 0, 0.0, cores=64)


def test_a_node_that_is_gone_counts_for_nothing() -> None:
    assert plan([HEAD, GPUS, {}], workers=8).gpus == 8


@pytest.mark.parametrize(
    ("nodes", "engine", "said"),
    [
        (
            [HEAD, CORES],
            {"workers": 4, "device": "cuda"},
            r"engine.device = 'cuda': none .* \(n0 10.0.0.0: 2 CPUs, 0 G",
        ),
        ([HEAD, CORES], {"workers": 19}, r"engine.workers = 19: the cluster has room for 18, one a core \(n0"),
        ([CORES, GPUS], {"workers": 65}, r"room for 64, one a core of a node with a GPU"),
        ([{"CPU": 0.0}], {"workers": 1}, "room for 0"),
        ([], {"workers": 1}, r"room for 0, one a core \(no node\)"),
    ],
)
def test_what_has_no_room_is_refused_with_what_there_is(nodes, engine, said) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(nodes, **engine)
