"""What a run that was broken off is held against before it may go on; every refusal says what differs."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from privacy.commitment import Commitment, FloorStep
from privacy.errors import CorruptRun
from privacy.events import Component, ReleaseEvent
from privacy.ledger.ledger import Ledger
from privacy.randomness.sampling import CohortSampler
from server.config.load import ConfigError, parse
from server.config.schema import RunConfig
from server.run_folder import names, origin, provenance
from server.run_folder.checkpoint import Checkpoint, save_checkpoint
from server.run_folder.errors import CannotResume
from server.run_folder.origin import check_origin, write_origin
from server.run_folder.resume import Resumed, check_resumable, check_sites, claim_ledger, note_resumed, read_resumed
from server.run_folder.telemetry import State, Telemetry
from server.run_folder.verify import VerifiedRun
from server.runs.commitment import round_sampling
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.fixed import Fixed
from strategies.server_update import ServerState
from tests.cases.recorded_runs import recorded_start

TABLE = {"rounds": 3, "clients": 60, "sampling-rate": 0.25, "privacy": {"epsilon": 50.0, "delta": 1e-3}}
CONFIG = parse(TABLE)
SAMPLING = round_sampling(CONFIG)
FLOOR = (FloorStep("round", SAMPLING, 1.5, 3),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that released one round and was killed in the next."""
    (tmp_path / "config.toml").write_text(CONFIG.to_toml())
    commitment = Commitment("client", "add_remove", 60, 50.0, 1e-3, floor=FLOOR)
    noise = {"commitment": commitment.to_json(), "multipliers": [1.5] * 3}
    (tmp_path / "commitment.json").write_text(json.dumps({"of": "", "noise": noise}))
    write_origin(tmp_path, CONFIG, "digest")
    CohortSampler.create().save(tmp_path / "sampling.key")
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.round(recorded_start(3))
    with Ledger.create(tmp_path / "ledger.jsonl", commitment) as ledger:
        for round in (1, 2):
            receipt = ledger.charge(ReleaseEvent("round", round, SAMPLING, (Component("update", 1.0, 1.5, 4),)))
            if round == 1:
                ledger.note_release(receipt)
                save_checkpoint(tmp_path, Checkpoint(state(), None, (), ledger.head))
    said(tmp_path, "running")
    return tmp_path


def state() -> ServerState:
    import torch

    controller = Fixed(0.5).init(RunInfo(3, ((4,),), SAMPLING, (1.5,)), PublicSignals(0, 1.0))
    return ServerState(1, torch.zeros(4), torch.zeros(4), {}, controller)


def said(folder: Path, state: State) -> None:
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status(state, "words")


def refused(folder: Path, error: type[Exception] = CannotResume, **arguments: Any) -> str:
    with pytest.raises(error) as refusal:
        check_resumable(folder, **arguments)
    return str(refusal.value)


@pytest.mark.parametrize("state", ["running", "preparing", "failed"])
def test_a_run_that_was_broken_off_may_go_on(state: State, folder: Path) -> None:
    said(folder, state)
    assert check_resumable(folder) == CONFIG
    with claim_ledger(folder) as ledger:
        assert len(ledger.charges) == 2


@pytest.mark.parametrize("state", ["completed", "stopped-budget"])
def test_a_run_that_has_ended_is_left_alone(state: State, folder: Path) -> None:
    said(folder, state)
    assert f"has ended ({state}: words)" in refused(folder)


def test_a_run_that_still_runs_is_left_alone(folder: Path) -> None:
    with Ledger.open(folder / "ledger.jsonl"):
        assert "is still running" in refused(folder)
    assert check_resumable(folder) == CONFIG


def test_a_ledger_that_was_tampered_with_is_refused(folder: Path) -> None:
    file = folder / "ledger.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"round":2', '"round":1', 1))
    assert "was changed" in refused(folder, CorruptRun)


def test_a_ledger_older_than_the_checkpoint_is_refused(folder: Path) -> None:
    file = folder / "ledger.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]))  # an older backup: a valid chain, in which round 1 was not yet released
    assert "rolled back" in refused(folder, CorruptRun)


def test_a_ledger_of_another_run_is_refused(folder: Path) -> None:
    (folder / "ledger.jsonl").unlink()
    commitment = Commitment("client", "add_remove", 60, 50.0, 1e-3, floor=FLOOR)
    with Ledger.create(folder / "ledger.jsonl", commitment) as ledger:
        for round in (1, 2):
            ledger.note_release(
                ledger.charge(ReleaseEvent("round", round, SAMPLING, (Component("update", 1.0, 1.5, 4),)))
            )
    assert "was rewritten" in refused(folder, CorruptRun)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rounds", 4, "rounds is 4, it was 3"),
        ("seed", 1, "seed is 1, it was 0"),
        ("privacy", {"epsilon": 9.0, "delta": 1e-3}, "privacy.epsilon is 9.0, it was 50.0"),
        ("model", {"rank": 8}, "model.rank is 8, it was 4"),
        ("strategy", {"controller-options": {"floor": 0.5}}, "strategy.controller-options.floor is 0.5, it was None"),
    ],
)
def test_another_configuration_is_refused_by_name(key: str, value: Any, words: str, folder: Path) -> None:
    (folder / "config.toml").write_text(parse({**TABLE, key: value}).to_toml())
    said = refused(folder, CorruptRun)
    assert words in said
    assert str(folder / "config.toml") in said
    assert refused(folder, CorruptRun, other_code=True) == said, "no option makes this one pass"


def test_where_and_how_fast_it_trains_may_change(folder: Path) -> None:
    engine = {"kind": "inprocess", "workers": 7, "round-timeout": 5.0, "prefix-cache-mb": 0, "device": "cpu"}
    engine["checkpoint-blocks"] = True
    changed = parse({**TABLE, "engine": engine, "output": "elsewhere", "data": {"cache": "there"}})
    assert check_origin(folder, changed, data="digest") == []


def test_another_data_set_is_refused(folder: Path) -> None:
    with pytest.raises(CannotResume, match="data set"):
        check_origin(folder, CONFIG, data="another digest")


@pytest.fixture
def other_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Let the code be different from now on."""
    real = provenance.code_version

    def change(changes: dict[str, str]) -> None:
        def changed(config: RunConfig, methods: Iterable[str] = ()) -> dict[str, str]:
            return {**real(config, methods), **changes}

        monkeypatch.setattr(origin, "code_version", changed)

    return change


def test_other_code_is_refused_unless_it_is_meant(folder: Path, other_code: Callable[..., None]) -> None:
    other_code({"privacy/mechanism.py": "0" * 16, "privacy/backdoor.py": "1" * 16, "torch": "9.9"})
    told = refused(folder)
    for words in ("privacy/backdoor.py is new", "privacy/mechanism.py was changed", "torch ", "-> 9.9", "--other-code"):
        assert words in told
    assert check_resumable(folder, other_code=True) == CONFIG
    assert len(check_origin(folder, CONFIG, other_code=True)) == 3


def test_a_long_list_of_changes_is_cut(folder: Path, other_code: Callable[..., None]) -> None:
    other_code({f"privacy/new_{i}.py": "0" for i in range(20)})
    assert "and 12 more" in refused(folder)


def test_the_code_of_a_users_own_method_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tmp_path / "their_method_of_resuming.py"
    own.write_text("x = 1\n")
    config = parse({**TABLE, "strategy": {"optimizer": "their_method_of_resuming:Mine"}})
    before = provenance.code_version(config)
    assert "server/run_folder/provenance.py" in before
    own.write_text("x = 2\n")
    changes = provenance.differences(before, provenance.code_version(config))
    assert changes == ["their_method_of_resuming:Mine was changed"]


@pytest.mark.parametrize(
    ("file", "error", "words"),
    [
        ("config.toml", CorruptRun, "config.toml is missing"),
        (
            "ledger.jsonl",
            CorruptRun,
            "ledger.jsonl is missing, though the run has begun to spend, as metrics.jsonl shows",
        ),
        ("origin.json", CorruptRun, "origin.json is missing"),
        ("data.digest", CannotResume, "data.digest is missing"),
        ("sampling.key", CorruptRun, "other cohorts would be drawn"),
    ],
)
def test_a_missing_file_is_named(file: str, error: type[Exception], words: str, folder: Path) -> None:
    (folder / file).unlink()
    assert words in refused(folder, error)


@pytest.mark.parametrize("file", ["origin.json", "checkpoint/state.json"])
@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_file_is_named(file: str, text: str, folder: Path) -> None:
    (folder / file).write_text(text)
    assert str(folder / file) in refused(folder, CorruptRun)


def test_what_was_interrupted_before_it_could_spend_may_start_anew(folder: Path) -> None:
    for name in ("ledger.jsonl", "sampling.key", "metrics.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoint")
    assert "was interrupted before it could spend anything; start it anew" in refused(folder)


def test_a_run_with_seeded_cohorts_needs_no_secret(folder: Path) -> None:
    table = {**TABLE, "privacy": {**TABLE["privacy"], "non-private": True, "seeded-cohorts": True}}  # type: ignore[dict-item]
    config = parse(table)
    (folder / "config.toml").write_text(config.to_toml())
    with pytest.raises(ConfigError, match=r"sampling\.key of another run"):
        write_origin(folder, config, "digest")
    os.unlink(folder / "sampling.key")
    write_origin(folder, config, "digest")
    assert check_resumable(folder) == config


def test_resumes_are_noted_and_read_back(tmp_path: Path) -> None:
    assert read_resumed(tmp_path) == ()
    notes = (Resumed(3, 1.5, 0), Resumed(7, 2.5, 1, ("privacy/randomness/noise.py was changed",)))
    for note in notes:
        note_resumed(tmp_path, note)
    assert read_resumed(tmp_path) == notes
    (tmp_path / "resumed.jsonl").write_text(json.dumps({"round": 1}) + "\n")
    with pytest.raises(CorruptRun, match="resumed run"):
        read_resumed(tmp_path)


def test_a_run_killed_while_it_wrote_down_its_start_is_started_anew(tmp_path: Path) -> None:
    """Its origin is written before its settings."""
    (tmp_path / names.ORIGIN_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(CannotResume, match="before it could spend anything"):
        claim_ledger(tmp_path)
    (tmp_path / names.SAMPLING_SECRET).touch()
    with pytest.raises(CorruptRun, match=r"config\.toml is missing"):
        claim_ledger(tmp_path)


def test_a_site_killed_before_its_ledger_has_no_secret_to_lose(tmp_path: Path) -> None:
    site = tmp_path / names.SITES_FOLDER / "0"
    site.mkdir(parents=True)
    (tmp_path / names.SITES_FILE).write_text("{}", encoding="utf-8")
    run = VerifiedRun(tmp_path, CONFIG, (), None, [], ended=False, ledger=None, sites={}, written=None, results=None)
    check_sites(run)
    (site / names.LEDGER_FILE).touch()
    with pytest.raises(CorruptRun, match=r"sampling\.key is missing"):
        check_sites(run)
