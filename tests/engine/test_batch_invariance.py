"""In one thread of a CPU a unit's contribution is the same, bit by bit, whatever other units it is computed with."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.models.base import load_base
from client.models.frozen.kernels import OneDnnWeight, add_shared_expansion, shared_product
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import make_task
from strategies.adapter.residual import residual_size
from tests.cases.cohorts import pairs, threads

HEAD = ("classifier",)
JOBS = {
    "minilm": ("classification", 3, LoraSpec(4, 8.0, ("query", "value"), heads=HEAD), 0),
    "minilm, upper layers": ("classification", 3, LoraSpec(4, 8.0, ("query", "value"), (4, 5), heads=HEAD), 2**22),
    "minilm, head alone": ("classification", 3, LoraSpec(4, 8.0, (), heads=HEAD), 2**22),
    "minilm, upper layers, moved": (
        "classification",
        3,
        LoraSpec(4, 8.0, ("query", "value"), (4, 5), heads=HEAD),
        2**22,
    ),
    "lacquer-small": ("causal-lm", 0, LoraSpec(4, 8.0, ("q_proj", "v_proj")), 0),
    "lacquer-small, pairs": ("preference", None, LoraSpec(4, 8.0, ("q_proj", "v_proj"), (2, 3)), 2**22),
    "lacquer-small, checkpointed": ("causal-lm", 0, LoraSpec(4, 8.0, ("q_proj", "v_proj")), 0),
    "lacquer-small, int8 and checkpointed": ("causal-lm", 0, LoraSpec(4, 8.0, ("q_proj", "v_proj")), 0),
    "lacquer-small, nf4": ("causal-lm", 0, LoraSpec(4, 8.0, ("q_proj", "v_proj")), 0),
    "minilm, int8": ("classification", 3, LoraSpec(4, 8.0, ("query", "value"), heads=HEAD), 0),
    "minilm, nf4, upper layers, checkpointed": (
        "classification",
        3,
        LoraSpec(4, 8.0, ("query", "value"), (4, 5), heads=HEAD),
        2**22,
    ),
}
BF16_IN_HARDWARE = pytest.mark.skipif(
    not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()),
    reason="no bfloat16 products in hardware, so nobody gets them unasked",
)
LONGEST = {"few words": 10, "a sentence": 40, "a paragraph": 90}


def _some_slow(cases: dict[str, Any], *fast: str) -> list[Any]:
    return [case if case in fast else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


FAST = (
    *("minilm, upper layers", "minilm, head alone", "lacquer-small"),
    *(
        "lacquer-small, pairs",
        "lacquer-small, checkpointed",
        "lacquer-small, int8 and checkpointed",
        "lacquer-small, nf4",
    ),
)
SOME_JOBS = [
    *(pytest.param(job, "fp32", marks=[] if job in FAST else pytest.mark.nightly) for job in JOBS),
    *(
        pytest.param(job, "bf16", marks=[BF16_IN_HARDWARE, *([] if job == FAST[0] else [pytest.mark.nightly])])
        for job in JOBS
    ),
]
SOME_LENGTHS = _some_slow(LONGEST, "a sentence")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def _made(job: str, precision: str) -> tuple[CohortEngine, Tensor, int | None]:
    """An engine, where it starts, and the number of classes: 0 for texts, None for pairs of them."""
    task, classes, spec, prefix = JOBS[job]
    model, _ = load_base(job.split(",")[0], task, classes or None)
    layout = adapter_layout(model, spec)
    vector = initial_adapter(layout, model, 0)
    vector = vector + 0.02 * torch.randn(vector.shape, generator=torch.Generator().manual_seed(1))
    engine = CohortEngine(
        model,
        spec,
        make_task(task, classes or 0),
        precision=precision,
        prefix_memory=prefix,
        quantisation=next((kind for kind in ("int8", "nf4") if kind in job), "none"),
        checkpoint_blocks="checkpointed" in job,
    )
    if job.endswith("moved"):
        engine.set_residual(0.01 * torch.randn(residual_size(layout), generator=torch.Generator().manual_seed(2)))
    return engine, vector, classes


def _records(rng: np.random.Generator, count: int, longest: int, classes: int | None, shortest: int = 2) -> Records:
    if classes is None:
        lengths = rng.integers(shortest, longest, (count, 2))
        return pairs(0, made=[tuple(rng.integers(5, 2000, n).tolist() for n in both) for both in lengths])
    tokens = [rng.integers(5, 2000, rng.integers(shortest, longest)).tolist() for _ in range(count)]
    return Records.from_lists(tokens, rng.integers(0, classes, count) if classes else None)


@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_a_row_of_a_product_does_not_know_how_many_there_are(rank: int, width: int) -> None:
    draws = torch.Generator().manual_seed(rank)
    x, u, y = (torch.randn(600, columns, generator=draws) for columns in (width, rank, width))
    factor = torch.randn(rank, width, generator=draws)

    def expanded(u: Tensor) -> Tensor:
        result = y[: len(u)].clone()
        add_shared_expansion(result, u, factor)
        return result

    frozen = OneDnnWeight(torch.randn(3 * width, width, generator=draws), None)
    for product, rows in ((lambda x: shared_product(x, factor), x), (expanded, u), (frozen.forward, x)):
        many = product(rows)
        for count in (*range(1, 40), 48, 96, 127, 257):
            assert torch.equal(product(rows[:count]), many[:count])


@pytest.mark.parametrize(("job", "precision"), SOME_JOBS)
@pytest.mark.parametrize("length", SOME_LENGTHS)
def test_a_records_gradient_does_not_know_its_company(job: str, precision: str, length: str) -> None:
    engine, vector, classes = _made(job, precision)
    rng = np.random.default_rng(LONGEST[length])
    records = _records(rng, 24, LONGEST[length], classes)

    def rows(chosen: np.ndarray) -> Tensor:
        found = torch.zeros(len(records), engine.layout.dim)
        for chunk in engine.per_record_gradients(vector, records.select(chosen)):
            found[torch.from_numpy(chosen[chunk.records])] = chunk.rows.float()
        return found

    everybody = rows(np.arange(len(records)))
    for count in (1, 2, 3, 11):
        some = rng.permutation(len(records))[:count]
        assert torch.equal(rows(some)[some], everybody[some])
    assert everybody.norm(dim=1).min() > 0


@pytest.mark.parametrize(("job", "precision"), SOME_JOBS)
@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_a_clients_update_does_not_know_its_company(job: str, precision: str, batch: int) -> None:
    engine, vector, classes = _made(job, precision)
    rng = np.random.default_rng(batch)
    local = LocalTraining(
        optimizer="adamw", learning_rate=1e-3, batch_size=batch, epochs=1
    )  # magnifies what is rounded
    ragged = [_records(rng, int(rng.integers(1, 10)), 30, classes) for _ in range(4)]
    alike = [_records(rng, 8, 25, classes, shortest=24) for _ in range(3)]  # share products
    clients = [*ragged, *alike]
    together = engine.train_all(vector, clients, local, range(len(clients)))
    for chosen in ([0], [5, 2], [6, 4, 1, 5]):
        engine.slots = 2 if len(chosen) > 2 else None
        alone = engine.train_all(vector, [clients[i] for i in chosen], local, chosen)
        assert torch.equal(alone, together[chosen])
    assert together.norm(dim=1).min() > 0
