"""A deployed node: trains what a simulated client with the same records trains, and tells nobody what went wrong."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import client.data.local
from client.app import app
from client.data.local import ReadSettings, label_ids, open_own
from client.models.base import load_tokenizer
from client.models.files import fingerprint, locate, minilm_folder
from client.node import Node, NodeFailed, OtherModel, own_worker
from client.worker import Worker
from server.runs.assembly import Assembly
from strategies.messages.client_update import EvaluateRequest, read_contribution
from tests.cases.node import SECRET, context, message, request, rows, settings, write


@pytest.fixture(autouse=True)
def no_worker_of_before() -> None:
    own_worker.cache_clear()


def test_a_node_sends_what_the_same_client_sends_in_a_simulation(
    deployed: tuple[Assembly, Path], tmp_path: Path
) -> None:
    everybody = [{**row, "who": f"c{client}"} for client in range(5) for row in rows(client, 4 + client)]
    source = write(tmp_path / "all.jsonl", everybody)
    simulated = settings(tmp_path, **{"source": source, "client-column": "who", "partition": "natural"})
    everywhere = Worker(simulated.job)
    for place in range(3):
        text = load_tokenizer("random:bert").decode(everywhere.data.client(place).select([0]).tokens.tolist())
        number = int(text.replace(" ", "").split("client")[1][0])
        mine = write(tmp_path / f"{place}.jsonl", rows(number, 4 + number))
        expected = everywhere.contribution(request(simulated, [place]))
        asked = request(deployed[0], [place])
        reply = app(
            message=message(asked.to_records(), "train"), context=context(data=mine, cache=str(tmp_path / "own"))
        )
        sent = read_contribution(reply.content, asked.plan, 1, 1)
        assert torch.equal(sent.encoded, expected.encoded)
        assert int(sent.encoded.abs().max()) > 0


@pytest.mark.parametrize("setting", [{"epsilon-limit": "2.0"}, {"privacy-unit": "record"}, {"identity": "x"}])
def test_a_node_that_trusts_the_server_less_sends_no_plain_sum(
    setting: dict[str, str], deployed: tuple[Assembly, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"data": write(tmp_path / "mine.jsonl", rows(1, 6)), "cache": str(tmp_path / "own"), **setting}
    with pytest.raises(NodeFailed, match="BadMessage"):
        app(message=message(request(deployed[0]).to_records(), "train"), context=context(**settings))
    assert f"only: {next(iter(setting))} in its settings" in caplog.text
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["instructions-7.json"]


def test_a_node_prepares_its_records_once(
    deployed: tuple[Assembly, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, mine = deployed[0].job.reading, write(tmp_path / "mine.jsonl", rows(1, 6))
    assert reading is not None
    first = open_own(mine, reading, "random:bert", tmp_path / "own")
    monkeypatch.setattr(client.data.local, "_write", None)
    again = open_own(mine, reading, "random:bert", tmp_path / "own")
    assert again.folder == first.folder
    assert isinstance(again.records.tokens, np.memmap)
    write(tmp_path / "mine.jsonl", rows(1, 7))
    with pytest.raises(TypeError):  # other records are prepared anew
        open_own(mine, reading, "random:bert", tmp_path / "own")


def test_units_of_privacy_are_kept_for_sites(tmp_path: Path) -> None:
    records = [{**row, "patient": f"p{i // 2}"} for i, row in enumerate(rows(1, 6))]
    reading = ReadSettings(
        task="classification",
        max_length=32,
        label_column="label",
        unit_column="patient",
        least_words=3,
        labels=("calm", "urgent"),
    )
    path = write(tmp_path / "mine.jsonl", [*records, {"text": "too short", "label": "calm", "patient": "p9"}])
    own = open_own(path, reading, "random:bert", tmp_path / "own")
    assert own.records.units is not None
    assert own.records.units.tolist() == [0, 0, 1, 1, 2, 2]


def test_records_of_nobody_are_not_one_unit(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("text,label,patient\none,calm,p1\ntwo,urgent,\nthree,calm, \n")
    reading = ReadSettings(
        task="classification", max_length=32, label_column="label", unit_column="patient", labels=("calm", "urgent")
    )
    with pytest.raises(ValueError, match=r"2 rows .*unit .*'patient'"):
        open_own(f"csv:{tmp_path / 'mine.csv'}", reading, "random:bert", tmp_path / "own")


def test_labels_are_the_federations() -> None:
    assert label_ids(["b", "a"], ("a", "b")).tolist() == [1, 0]
    assert label_ids([1, 2.0, 0], ("0", "1", "2")).tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match=r"\['c'\] are none"):
        label_ids(["a", "c"], ("a", "b"))


@pytest.mark.parametrize("data", ["notes", "nyu-mll/glue:sst2", "parquet:", "csv:/nowhere/at/all.csv"])
def test_only_files_of_the_nodes_own_are_records(data: str, deployed: tuple[Assembly, Path], tmp_path: Path) -> None:
    reading = deployed[0].job.reading
    assert reading is not None
    with pytest.raises(ValueError, match="data"):
        open_own(data, reading, "random:bert", tmp_path)


@pytest.mark.parametrize(
    ("what", "kind"),
    [("label", "ValueError"), ("column", "ValueError"), ("two clients", "BadMessage"), ("evaluation", "BadMessage")],
)
def test_the_server_hears_nothing_of_what_went_wrong_but_its_class(
    what: str, kind: str, deployed: tuple[Assembly, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[dict[str, Any]] = rows(1, 4)
    if what == "label":
        records[1]["label"] = SECRET
    if what == "column":
        records = [{SECRET: row["text"], "label": row["label"]} for row in records]
    content = request(deployed[0], [0, 1] if what == "two clients" else [1]).to_records()
    if what == "evaluation":
        content = EvaluateRequest(deployed[0].start.numpy(), "test", 0, 4, deployed[0].job.to_json()).to_records()
    mine = write(tmp_path / "mine.jsonl", records)
    caplog.set_level(logging.ERROR)
    with pytest.raises(NodeFailed) as caught:
        app(
            message=message(content, "evaluate" if what == "evaluation" else "train"),
            context=context(data=mine, cache=str(tmp_path / "own")),
        )
    # Flower sends class and text of the exception to the server, and prints its traceback here.
    assert str(caught.value) == kind
    assert caught.value.__suppress_context__
    if what in ("label", "column"):
        assert SECRET in caplog.text


def test_a_node_opens_its_own_model_and_not_a_path_of_the_servers(
    deployed: tuple[Assembly, Path], tmp_path: Path
) -> None:
    mine = write(tmp_path / "mine.jsonl", rows(1, 4))
    text = deployed[0].job.replace(model="/etc/of-the-server", fingerprint=fingerprint("random:bert")).to_json()
    assert Node.of({"data": mine, "model": "random:bert"}) == Node(mine, "", "random:bert")
    worker = own_worker(text, Node(mine, str(tmp_path / "own"), "random:bert"), several_units=False)
    assert worker.job.model == "random:bert"
    with pytest.raises(ValueError, match="no model of that name"):
        own_worker(text, Node(mine, str(tmp_path / "own")), several_units=False)


def test_a_job_that_some_records_would_make_raise_is_refused_whole(
    deployed: tuple[Assembly, Path], tmp_path: Path
) -> None:
    node, job = Node(write(tmp_path / "mine.jsonl", rows(1, 4)), str(tmp_path / "own")), deployed[0].job
    assert job.reading is not None
    for wrong, says in (
        (job.replace(num_labels=job.num_labels - 1), "would be read for classification with"),
        (job.replace(task="causal-lm", num_labels=0), "trains for causal-lm with 0 labels"),
        (job.replace(reading=job.reading.replace(max_length=1000)), "max-length must be at most"),
    ):
        with pytest.raises(ValueError, match=says):
            own_worker(wrong.to_json(), node, several_units=False)


def test_records_are_read_anew_for_another_model_under_the_same_name(
    deployed: tuple[Assembly, Path], tmp_path: Path
) -> None:
    mine, base = write(tmp_path / "mine.jsonl", rows(1, 4)), tmp_path / "base"
    reading = deployed[0].job.reading
    assert reading is not None
    shutil.copytree(minilm_folder(), base)
    first = open_own(mine, reading, str(base), tmp_path / "own")
    shutil.rmtree(base)
    shutil.copytree(Path(locate("lacquer-small")[0]), base)
    again = open_own(mine, reading, str(base), tmp_path / "own")
    expected = open_own(mine, reading, "lacquer-small", tmp_path / "own").records.tokens
    assert again.folder != first.folder
    assert again.records.tokens.tolist() == expected.tolist() != first.records.tokens.tolist()


def test_a_node_with_another_base_model_is_told(deployed: tuple[Assembly, Path], tmp_path: Path) -> None:
    mine, copy = write(tmp_path / "mine.jsonl", rows(1, 4)), tmp_path / "copy"
    ours = minilm_folder()
    copy.mkdir()
    for file in ours.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    assert fingerprint(str(copy)) == fingerprint("minilm")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    layer = slice(30 << 20, 31 << 20)  # a megabyte of one matrix, as a short training would change it
    weights[layer] = bytes(byte ^ 1 for byte in weights[layer])
    (copy / "model.safetensors").write_bytes(weights)
    text = deployed[0].job.replace(model="minilm", fingerprint=fingerprint("minilm")).to_json()
    with pytest.raises(OtherModel, match="is not the server's"):
        own_worker(text, Node(mine, str(tmp_path / "own"), str(copy)), several_units=False)


def test_a_node_without_records_is_a_worker() -> None:
    assert Node.of({"partition-id": 0, "num-partitions": 2}) is None
