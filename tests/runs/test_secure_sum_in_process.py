"""A run whose clients make the noise and open the sums, from a configuration to privacy.json, on a very small model."""

import json
from pathlib import Path
from typing import Any

import pytest

from privacy.ledger.ledger import Ledger
from privacy.secagg.aggregator import Aggregator
from server.config.load import ConfigError, parse
from simulations.engines.inprocess import run_inprocess


def settings(cache: Path | str = "", **changed: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "rounds": 2,
        "clients": 6,
        "sampling-rate": 1.0,
        "privacy": {"delta": 1e-3, "trust": "secagg", "mode": "filter", "noise": "discrete"},
        "strategy": {"controller": "dp-lac"},
        "model": {"name": "random:bert", "rank": 4, "max-length": 32},
        "data": {"validation-records": 20, "test-records": 20, "records-per-client": 3, "cache": str(cache)},
        "engine": {"kind": "inprocess", "workers": 1},
        "simulation": {"clients-per-node": 1},
    }
    for key, value in changed.items():
        section, _, name = key.partition("__")
        if name:
            table[section] = table[section] | {name.replace("_", "-"): value}
        else:
            table[key.replace("_", "-")] = value
    return table


@pytest.mark.parametrize("controller", ["dp-lac", "dp-clac"])
def test_a_run_with_histogram_and_queries_is_guaranteed_against_the_server(tmp_path: Path, controller: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_inprocess(parse(settings(tmp_path / "cache", strategy={"controller": controller})), folder)
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["private"]
    assert statement["epsilon"] <= 4.0
    assert statement["adjacency"] == "zero_out"
    assert statement["trust_model"].startswith("no trusted aggregator")
    assert (
        "in a ledger of its own, and refuses beyond what its copy of the federation's list" in statement["trust_model"]
    )
    beyond = (
        "a server that asks for more than it says: the clients refuse beyond epsilon 4.00 at delta 0.001 over all runs"
    )
    assert any(line.startswith(beyond) for line in statement["not_covered"])
    for own in sorted((folder / "secagg").glob("party-*")):
        with Ledger.open(own / "ledger.jsonl", read_only=True) as theirs:
            assert len(theirs.charges) == statement["rounds"]["charged"]
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [event.label for event in ledger.events][-2:] == ["round", "round"]
        assert all(event.noise_shares is not None for event in ledger.events)
        assert all(event.sampling.rate == 1.0 for event in ledger.events)  # type: ignore[union-attr]
        assert all(charge.released_at for charge in ledger.charges)
    assert json.loads((folder / "results.json").read_text())["rounds_done"] == 2
    assert (folder / "secagg").stat().st_mode & 0o077 == 0


def test_a_run_that_broke_off_behind_its_charge_goes_on_and_has_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies in round 2 with all vectors in its hands: there is a round less, and nothing is reused."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = parse(settings(tmp_path / "cache", rounds=3, strategy={"controller": "fixed"}))
    calls, opened = [], Aggregator.open_sum

    def dies(self: Aggregator) -> Any:
        calls.append(self.session)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return opened(self)

    monkeypatch.setattr(Aggregator, "open_sum", dies)
    with pytest.raises(KeyboardInterrupt):
        run_inprocess(config, folder)
    identities = (folder / "secagg" / "federation.json").read_text()
    run_inprocess(config, folder, keys={"resume": str(folder)})
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [charge.released_at is not None for charge in ledger.charges] == [True, False, True]
    assert json.loads((folder / "results.json").read_text())["rounds_done"] == 2
    assert len(set(calls)) == 3, "every attempt is a session of its own"
    assert (folder / "secagg" / "federation.json").read_text() == identities


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sampling_rate": 0.5}, "sampling-rate = 0.5 must be 1"),
        ({"privacy__mode": "floor"}, "privacy.mode must be 'filter'"),
        ({"privacy__noise": "gaussian"}, "privacy.noise must be 'discrete'"),
        ({"simulation__clients_per_node": 0}, "clients-per-node must be 1"),
        ({"clients": 2000}, "parties must be <= 1024"),
        ({"privacy__secagg": {"min-survivors": 2}}, "survivors must be in 4..6"),
        ({"privacy__secagg": {"colluding": 5}}, "colluding = 5 is too large for [0-9]+ clients"),
        ({"privacy__secagg": {"modulus-bits": 20}}, "modulus-bits"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(settings(**changed))


def test_a_modulus_without_room_for_the_plan_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    tight = settings(tmp_path, clients=900, privacy__delta=1e-4, privacy__secagg={"modulus-bits": 16})
    with pytest.raises(ConfigError, match="modulus_bits must be larger"):
        run_inprocess(parse(tight), tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_list_that_says_something_else_is_refused(tmp_path: Path) -> None:
    missing = settings(tmp_path / "cache", privacy__secagg={"federation": str(tmp_path / "nothing.json")})
    with pytest.raises(ConfigError, match=r"privacy\.secagg\.federation"):
        run_inprocess(parse(missing), tmp_path)
