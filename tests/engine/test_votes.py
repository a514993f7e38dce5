"""Votes for the first threshold, on a real model: seeded, and where the simulated noise sends them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from client.data.records import Records
from client.engine.cohort import CohortEngine
from client.engine.local_training import LocalTraining
from client.engine.sequential import SequentialEngine
from client.models.base import load_base
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.tasks import SequenceClassification
from client.votes import clip_votes
from privacy.queries import OneHotVote
from privacy.randomness.rng import simulation_generator

SPEC = LoraSpec(2, 4.0, ("query", "value"), heads=("classifier",))
LABELS, CLIENTS = 2, 3
BINS = tuple(2.0 ** (j / 2) for j in range(-12, 13))
SEEDS = [11, 12, 13]


def query(simulated_noise: float) -> OneHotVote:
    return OneHotVote(BINS, 2.0, simulated_noise_std_per_bound=simulated_noise)


@pytest.fixture(scope="module")
def clients() -> list[Records]:
    result = []
    for client in range(CLIENTS):
        generator = simulation_generator(client, "records")
        labels = generator.integers(0, LABELS, 6)
        # The label shows in the tokens, so that training moves the loss.
        sequences = [[4 + 40 * int(label) + int(t) for t in generator.integers(0, 40, 8)] for label in labels]
        result.append(Records.from_lists(sequences, labels))
    return result


@pytest.fixture(scope="module")
def engines() -> dict[str, CohortEngine | SequentialEngine]:
    made = {}
    for kind in (CohortEngine, SequentialEngine):
        model, _ = load_base("random:bert", "classification", LABELS)
        made[kind.__name__] = kind(model, SPEC, SequenceClassification(LABELS), token_budget=256, precision="fp32")
    return made


@pytest.fixture(scope="module")
def trained(engines, clients: list[Records]) -> tuple[Tensor, Tensor]:
    """Where clients started, and their updates."""
    model, _ = load_base("random:bert", "classification", LABELS)
    start = initial_adapter(adapter_layout(model, SPEC), model, 0)
    local = LocalTraining(learning_rate=0.5, epochs=4, batch_size=3)
    return start, engines["CohortEngine"].train_all(start, clients, local, SEEDS)


@pytest.fixture
def vote(engines, trained: tuple[Tensor, Tensor], clients: list[Records]) -> Callable[..., list[int]]:
    def cast(
        noise: float,
        seeds: Sequence[int] = SEEDS,
        deltas: Tensor | None = None,
        records: Sequence[Records] = clients,
        engine: str = "CohortEngine",
    ) -> list[int]:
        start, updates = trained
        deltas = updates if deltas is None else deltas
        votes = clip_votes(engines[engine], start, deltas, records, query(noise), seeds)
        assert votes.dtype == torch.int64
        assert votes.shape == (len(records),)
        return votes.tolist()

    return cast


def bins_of(deltas: Tensor, share: float) -> list[int]:
    return [query(0.0).nearest_bin(share * float(delta.double().norm())) for delta in deltas]


def test_without_noise_the_largest_candidate_wins(vote, trained) -> None:
    """It does not clip, so its loss is that of the update itself."""
    assert vote(0.0) == bins_of(trained[1], 1.0)


@pytest.mark.parametrize("noise", [10.0, 100.0, 1e4])
def test_under_overwhelming_noise_the_smallest_candidate_wins(noise: float, vote, trained) -> None:
    """Candidates share their draw, so the largest threshold carries the most of the same noise."""
    assert vote(noise) == bins_of(trained[1], 0.25)
    assert bins_of(trained[1], 0.25) != bins_of(trained[1], 1.0)


def test_votes_are_for_one_of_the_clients_own_candidates(vote, trained) -> None:
    own = [bins_of(trained[1], share) for share in (0.25, 0.5, 1.0)]
    for noise in (0.03, 0.1, 0.3):
        for client, voted in enumerate(vote(noise)):
            assert voted in [bins[client] for bins in own]


def test_a_seed_decides_a_clients_vote_and_nothing_else_does(vote, trained, clients: list[Records]) -> None:
    _, deltas = trained
    for noise in (0.1, 0.2):
        votes = vote(noise)
        assert vote(noise) == votes
        alone = [vote(noise, SEEDS[i : i + 1], deltas[i : i + 1], clients[i : i + 1])[0] for i in range(CLIENTS)]
        assert alone == votes
        backwards = vote(noise, SEEDS[::-1], deltas.flip(0), clients[::-1])
        assert backwards[::-1] == votes
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    vote(0.1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_other_seeds_draw_other_noise(vote) -> None:
    votes = {tuple(vote(noise, [seed, seed, seed])) for seed in range(8) for noise in (0.1, 0.2)}
    assert len(votes) > 1


def test_the_plain_engine_votes_alike(vote) -> None:
    for noise in (0.0, 0.1, 3.0):
        assert vote(noise, engine="SequentialEngine") == vote(noise)


def test_who_has_nothing_to_say_does_not_vote(vote, trained, clients: list[Records]) -> None:
    deltas = trained[1].clone()
    deltas[1] = 0
    assert vote(0.1, deltas=deltas)[1] == -1
    for bad in (float("nan"), float("inf")):
        deltas[1] = trained[1][1]
        deltas[1, 0] = bad
        voted = vote(0.1, deltas=deltas)
        assert voted[1] == -1
        assert voted[0] == vote(0.1)[0]
    assert vote(0.1, records=[clients[0], Records.from_lists([], []), clients[2]])[1] == -1


def test_updates_beyond_the_grid_vote_for_its_ends(vote, trained) -> None:
    """The grid ends at 1/64 and 64; a threshold beyond is a vote for its end."""
    assert vote(0.0, deltas=trained[1] * 1e4) == [len(BINS) - 1] * CLIENTS
    assert vote(0.0, deltas=trained[1] * 1e-5) == [0] * CLIENTS
