"""Every optimizer and every aggregation goes on from a checkpoint as if nothing had happened, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from privacy.errors import CorruptRun
from server.config.load import parse
from server.config.methods import methods
from server.run_folder.checkpoint import Checkpoint, Times, load_checkpoint, save_checkpoint
from strategies import AGGREGATIONS, OPTIMIZERS
from strategies.aggregations.aggregation import Adapters
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.dp_fedavg import DpFedAvg

OPTIONS: dict[str, dict[str, Any]] = {"zero-pad": {"ranks": "1,2"}, "rolora": {"scale-a": 0.5}}
SUMS = [name for name in AGGREGATIONS if name not in ("flora", "fedex", "fedgsa")]
PAIRS = [(name, "fedadam") for name in SUMS] + [("rolora", name) for name in OPTIMIZERS if name != "fedadam"]


def make(fed, aggregation: str, optimizer: str, **parts: Any) -> DpFedAvg:
    strategy = {"aggregation": aggregation, "aggregation-options": OPTIONS.get(aggregation, {}), "optimizer": optimizer}
    made = methods(parse({"strategy": strategy, "public": {"warm-start-epochs": 1}}))
    adapters = Adapters(2, fed.N, 7)
    layouts = tuple(
        made.aggregation.part(adapters, round).layout(fed.LAYOUT).blocks() for round in range(1, fed.ROUNDS + 1)
    )
    return fed.make(
        aggregation=made.aggregation,
        optimizer=made.optimizer,
        info=RunInfo(fed.ROUNDS, layouts, fed.SAMPLING, (1.5,) * fed.ROUNDS),
        served_average=0.5,
        seed=7,
        **parts,
    )


def release(strategy: DpFedAvg, nodes: Any) -> None:
    """One round up to the moment when the run saves it."""
    round = strategy.next_release().round
    messages = list(strategy.configure_train(round, ArrayRecord(), ConfigRecord(), nodes))
    strategy.aggregate_train(round, nodes.send_and_receive(messages))


def tell(strategy: DpFedAvg, fed: Any) -> None:
    round = fed.state_of(strategy).round
    strategy.observe(PublicSignals(round, 0.9**round))


@pytest.mark.parametrize(("aggregation", "optimizer"), PAIRS)
def test_it_goes_on_as_if_nothing_had_happened(fed, tmp_path: Path, aggregation: str, optimizer: str) -> None:
    whole = make(fed, aggregation, optimizer)
    for _ in range(fed.ROUNDS):
        release(whole, fed.Nodes())
        tell(whole, fed)
    broken = make(fed, aggregation, optimizer)
    for round in range(1, fed.ROUNDS + 1):
        release(broken, fed.Nodes())
        save_checkpoint(tmp_path, Checkpoint.after(fed.state_of(broken), broken.release, broken.ledger.head, Times()))
        after = make(fed, aggregation, optimizer, ledger=broken.ledger)
        kept = load_checkpoint(tmp_path, fed.state_of(after))
        after.restore(kept.state, kept.update, kept.answers)
        assert after.release is not None
        assert after.release.plan == broken.release.plan
        tell(after, fed)
        broken = after
        assert fed.state_of(broken).round == round
    expected, found = fed.state_of(whole), fed.state_of(broken)
    assert torch.equal(found.adapter, expected.adapter)
    assert torch.equal(found.served, expected.served)
    assert found.optimizer.keys() == expected.optimizer.keys()
    for name, tensor in expected.optimizer.items():
        assert torch.equal(found.optimizer[name], tensor), name
    assert not torch.equal(found.adapter, fed.START)


def test_a_checkpoint_of_another_optimizer_is_refused(fed, tmp_path: Path) -> None:
    one, other = make(fed, "plain", "fedadam"), make(fed, "plain", "fedavgm")
    release(one, fed.Nodes())
    save_checkpoint(tmp_path, Checkpoint.after(fed.state_of(one), one.release, one.ledger.head, Times()))
    with pytest.raises(CorruptRun, match="another run"):
        load_checkpoint(tmp_path, fed.state_of(other))
