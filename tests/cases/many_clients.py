"""Nodes with many clients each, and the simulation of the same clients with the same cohorts. Not a test."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from safetensors.torch import load_file
from torch import Tensor

import client.worker
import server.app
from client.app import app as client_app
from client.node_state.joined import Joined
from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from privacy.randomness.rng import simulation_generator
from privacy.randomness.sampling import Cohort, CohortSampler
from server.config.load import parse
from server.config.schema import RunConfig
from server.run_folder.names import ROSTER_FILE, write_config
from simulations.engines.inprocess import InProcessGrid, identity, run_inprocess
from tests.cases.drawn import always
from tests.cases.instructions import server as signer

Rows = list[dict[str, Any]]

SETTINGS = """
rounds = {rounds}
sampling-rate = {rate}
output = "runs"
[privacy]
epsilon = 8.0
delta = 1e-3
{privacy}
[strategy]
controller = "fixed"
controller-options = {{ clip-norm = 0.05 }}
[model]
rank = 2
{model}
[local]
batch-size = 2
"""
NOTES = 'name = "random:bert"\nmax-length = 16'
CHAT = 'name = "random:llama"\ntask = "instruction"\ntargets = "q_proj,v_proj"\nmax-length = 128'
WITHOUT_NOISE = 'noise = "insecure-zero"\nnon-private = true'


def record(text: str, number: int, user: str, chat: bool = False) -> dict[str, Any]:
    """One record of a client: a note with its label, or a conversation."""
    label = ("calm", "urgent")[number % 2]
    if not chat:
        return {"text": text, "label": label, "user": user}
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": f"that is {label}"}]
    return {"messages": said, "user": user}


def of_clients(node: object, clients: int, largest: int = 3, *, chat: bool = False) -> Rows:
    """Records of a node's clients, of 1 to ``largest`` records each, no two texts alike."""
    return [
        record(
            f"note {number} of user {user} at {node}: since {user % 7} days", user + number, f"{node}-{user:05d}", chat
        )
        for user in range(clients)
        for number in range(1 + user % largest)
    ]


def write(path: Path, rows: Rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def deployed(
    folder: Path,
    numbers: list[int],
    rate: float = 0.5,
    privacy: str = WITHOUT_NOISE,
    *,
    chat: bool = False,
    rounds: int = 2,
) -> str:
    """The configuration of a run over nodes with so many clients each."""
    public = write(folder / "public.jsonl", of_clients("the server", 40, chat=chat))
    data = f'''
    [data]
    held-by = "nodes"
    nodes = {len(numbers)}
    client-column = "user"
    source = "{public}"
    {'text-column = "messages"' if chat else ""}
    validation-records = 10
    test-records = 10
    cache = "{folder}/cache"
    '''
    settings = SETTINGS.format(rate=rate, privacy=privacy, rounds=rounds, model=CHAT if chat else NOTES)
    return f"clients = {sum(numbers)}\n{settings}{data}"


class Federation(InProcessGrid):
    """Nodes with many clients each, in this process."""

    def __init__(self, folder: Path, nodes: list[Rows], numbers: list[int]) -> None:
        super().__init__(client_app, len(nodes))
        self.folder = folder
        for (node, context), rows, number in zip(self.contexts.items(), nodes, numbers, strict=True):
            context.node_config = {
                "data": write(folder / f"own-{node}" / "records.jsonl", rows),
                "cache": str(folder / f"own-{node}" / "cache"),
                "clients": number,
                "clients-state": str(state(folder, node)),
                "authority": signer().authority,
            }

    def go(self, run: Path, text: str = "") -> None:
        """Start a run with this configuration; without one, resume it."""
        keys: dict[str, Any] = {"resume": str(run)}
        if text:
            run.mkdir()
            (self.folder / "run.toml").write_text(text)
            keys = {"config-file": str(self.folder / "run.toml"), "run-folder": str(run)}
        with identity(0):
            server.app.app(grid=self, context=Context(1, 0, {}, RecordDict(), keys))


def state(folder: Path, node: object) -> Path:
    """What a node keeps of its runs."""
    return folder / f"own-{node}" / "state"


def kept(folder: Path, nodes: Iterable[object]) -> list[Joined]:
    """What every node keeps of the one run there was."""
    return [Joined.load(next(state(folder, node).iterdir())) for node in nodes]


def drawn(nodes: list[Joined], round: int, rate: float, attempt: int = 0) -> np.ndarray:
    """Who all nodes together have drawn, numbered over all nodes."""
    found, first = [], 0
    for one in nodes:
        found.append(first + one.sampler.draw(Poisson(rate, one.clients), round, attempt).ids)
        first += one.clients
    return np.concatenate(found)


def simulated(
    folder: Path, config: RunConfig, nodes: list[Rows], joined: list[Joined], patch: pytest.MonkeyPatch
) -> Path:
    """The folder of a simulation of all these clients, with the nodes' cohorts and seeds of local randomness.

    Its validation set is one client more, who lies where the held-out client is.
    """
    whose = config.data.client_column
    names = [sorted({str(row[whose]) for row in rows}) for rows in nodes]
    everybody = [name for of_node in names for name in of_node]
    assert [len(of_node) for of_node in names] == [one.clients for one in joined], "no place may be without a client"
    held_out = int(np.argmin(simulation_generator(config.seed, "held-out").permutation(len(everybody) + 1)))
    place = {name: f"{i + (i >= held_out):06d}" for i, name in enumerate(everybody)}
    assert len(place) == len(everybody), "nobody may be a client of two nodes"
    rows = [{**row, "user": place[str(row[whose])]} for of_node in nodes for row in of_node]
    chat = config.model.task == "instruction"
    public = [record("one held out", 0, f"{held_out:06d}", chat), *of_clients("the test", 5, chat=chat)]
    if not chat:  # labels as the nodes spell them
        labels = sorted({str(row["label"]) for row in rows})
        public = [{**row, "label": labels[("calm", "urgent").index(row["label"])]} for row in public]
    test = write(folder / "test.jsonl", public[1:])
    rows += public[:1]
    data = {"source": write(folder / "everybody.jsonl", rows), "test-source": test, "validation-records": 1}
    data |= {"client-column": "user", "partition": "natural", "cache": str(folder / "cache")}
    data |= {"text-column": config.data.text_column}
    table = config.to_table()
    same = parse({**table, "data": data, "engine": {"kind": "inprocess", "workers": 2}})
    patch.setattr(CohortSampler, "draw", _of(joined, config.sampling_rate, config.rounds))
    patch.setattr(client.worker, "local_seed", _seeds(joined))
    run = folder / "simulated"
    run.mkdir()
    write_config(run, same)
    run_inprocess(same, run)
    return run


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def roster_of(run: Path) -> dict[str, list[int]]:
    roster: dict[str, list[int]] = json.loads((run / ROSTER_FILE).read_text())
    return roster


def charges(run: Path) -> int:
    with Ledger.open(run / "ledger.jsonl", read_only=True) as ledger:
        return len(ledger.charges)


def _of(joined: list[Joined], rate: float, rounds: int) -> Any:
    cohorts = {round: drawn(joined, round, rate) for round in range(1, rounds + 1)}

    def draw(self: Any, sampling: Poisson, round: int, attempt: int = 0, *, label: str = "round") -> Cohort:
        cohort: Cohort = always(*cohorts[round])(self, sampling, round, attempt, label=label)
        return cohort

    return draw


def _seeds(joined: list[Joined]) -> Any:
    of_node, ends = client.worker.local_seed, np.cumsum([one.clients for one in joined])

    def seed(seed: int, round: int, number: int) -> int:
        node = int(np.searchsorted(ends, number, side="right"))
        return of_node(joined[node].seed, round, number - int(ends[node] - joined[node].clients))

    return seed
