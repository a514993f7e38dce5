"""The resident process answers as the ClientApp does, forgets everything, and ends with its SuperNode."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from client import fork_server
from client.app import app
from client.fork_server import SOCKET, VARIABLE
from client.node import NodeFailed
from strategies.messages.client_update import read_contribution
from tests.cases.node import SECRET, context, message, request, rows, write

NODE = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(os.environ["LACQUER_RESIDENT"])
time.sleep(%d)
sys.exit(7)
"""


def start(tmp_path: Path, seconds: int) -> "subprocess.Popen[bytes]":
    told = tmp_path / "folder"
    process = subprocess.Popen(
        [sys.executable, "-m", "client.fork_server", sys.executable, "-c", NODE % seconds, str(told)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    while True:
        ended = process.poll()  # asked first: between the two looks it may tell its folder and end
        if told.exists() and told.read_text():
            break
        assert ended is None
        time.sleep(0.05)
    os.environ[VARIABLE] = told.read_text()
    return process


def test_it_answers_as_the_client_app_and_tells_as_little(deployed, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assembly, _ = deployed
    mine = write(tmp_path / "mine.jsonl", rows(1, 6))
    bad = write(tmp_path / "bad.jsonl", [{"text": "x", "label": SECRET}])
    asked, own = request(assembly), {"cache": str(tmp_path / "own")}
    expected = app(message=message(asked.to_records(), "train"), context=context(data=mine, **own))
    resident = start(tmp_path, 600)
    try:
        for _ in range(2):
            reply = fork_server.app(message=message(asked.to_records(), "train"), context=context(data=mine, **own))
            sent = read_contribution(reply.content, asked.plan, 1, 1)
            assert torch.equal(sent.encoded, read_contribution(expected.content, asked.plan, 1, 1).encoded)
            assert reply.metadata.reply_to_message_id == expected.metadata.reply_to_message_id
        with pytest.raises(fork_server.Failed) as caught:
            fork_server.app(message=message(asked.to_records(), "train"), context=context(data=bad, **own))
        assert str(caught.value) == "ValueError"
    finally:
        resident.terminate()
    assert resident.wait(timeout=60) != 0
    assert not (Path(os.environ[VARIABLE]) / SOCKET).exists()
    with pytest.raises(NodeFailed):  # nobody answers any more: the process does it itself
        fork_server.app(message=message(asked.to_records(), "train"), context=context(data=bad, **own))


def test_it_ends_with_its_supernode_and_as_that_did(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert start(tmp_path, 0).wait(timeout=120) == 7


def test_the_process_that_flower_starts_imports_no_torch() -> None:
    code = "import sys, client.fork_server; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
