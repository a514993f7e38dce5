"""Secure sums through Flower's own engine: states of parties survive between the five messages of a round."""

import json
from pathlib import Path

import pytest

from privacy.ledger.ledger import Ledger
from tests.end_to_end.lacquer_process import TINY, Lacquer

# Secure sums over real nodes; those of a simulation without Flower are in tests/runs.
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


def test_five_nodes_open_their_sums_together(tmp_path: Path) -> None:
    text = TINY.replace("clients = 60", "clients = 5").replace("sampling-rate = 0.2", "sampling-rate = 1.0")
    text = text.replace("delta = 1e-3", 'delta = 1e-3\ntrust = "secagg"\nmode = "filter"\nnoise = "discrete"')
    (tmp_path / "tiny.toml").write_text(text + "[simulation]\nclients-per-node = 1\n")
    run = Lacquer(tmp_path, "tiny.toml", "--quiet")
    try:
        assert run.finish() == 0, run.stderr()
        folder = run.run_folder
    finally:
        run.end()
    statement = json.loads((folder / "privacy.json").read_text())
    assert "against anyone, the server included" in statement["sentence"]
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [event.label for event in ledger.events] == ["histogram", "round", "round"]
        assert all(charge.released_at for charge in ledger.charges)
