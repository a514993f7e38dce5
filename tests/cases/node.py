"""Nodes that own their records, and what a server asks of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from privacy.clipping.norms import FlatClip
from privacy.contribution import Plan
from server.config.load import parse
from server.runs.assembly import Assembly, assemble_client_level
from strategies.aggregations.aggregation import Adapters
from strategies.messages.client_update import TrainRequest
from tests.cases.instructions import server

SECRET = "the patient is John Fingal"


def rows(client: int, count: int) -> list[dict[str, Any]]:
    return [
        {"text": f"note {i} of client {client}: pain since {i * 7 % 5} days", "label": ("calm", "urgent")[i % 2]}
        for i in range(count)
    ]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"jsonl:{path}"


def settings(folder: Path, **data: Any) -> Assembly:
    table = {
        "rounds": 2,
        "clients": 3,
        "sampling-rate": 1.0,
        "privacy": {"delta": 1e-2},
        "strategy": {"controller": "fixed"},
        "model": {"name": "random:bert", "rank": 2, "max-length": 32},
        "data": {"validation-records": 4, "test-records": 4, "cache": str(folder / "cache"), **data},
    }
    return assemble_client_level(parse(table))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Assembly, Path]:
    folder = tmp_path_factory.mktemp("deployed")
    public = write(folder / "public.jsonl", rows(99, 12))
    return settings(folder, **{"held-by": "nodes", "source": public}), folder


def request(assembly: Assembly, clients: list[int] | None = None) -> TrainRequest:
    part = assembly.methods.aggregation.part(Adapters(2, 3, 0), 1)
    plan = Plan(FlatClip(0.5, part.layout(assembly.layout).dim), 1.0)
    ids = np.array([1] if clients is None else clients, dtype=np.int64)
    return TrainRequest(1, assembly.start.numpy(), plan, part, ids, assembly.job.to_json())


def message(content: RecordDict, kind: str) -> Message:
    sent = Message(content, dst_node_id=7, message_type=kind)
    sent.metadata.__dict__["_message_id"] = "one"
    return server().signed(sent)


def context(**node_config: str) -> Context:
    settings = {"authority": server().authority, **node_config}
    return Context(run_id=1, node_id=7, node_config=dict(settings), state=RecordDict(), run_config={})
