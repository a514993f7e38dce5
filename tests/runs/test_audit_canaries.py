"""Canaries in whole runs: right ones stay under their ledger, and every bug of a list is caught by the audit."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import client.record_level.dp_sgd
import privacy.audit.in_run
import privacy.contribution
import strategies.private_training
from client.models.base import load_tokenizer
from privacy.audit.in_run import Observation, audit_canaries
from privacy.clipping.norms import FlatClip
from privacy.clipping.units import Units
from privacy.contribution import Contribution, Plan, contribute
from privacy.randomness.noise import GaussianNoise
from privacy.randomness.sampling import CohortSampler
from server.config.load import ConfigError, parse, unflatten
from server.config.schema import RunConfig
from server.run_folder import names
from server.run_folder.canaries import canaries_of, note_seen
from server.runs.start import run_in_folder
from simulations.audit.canaries import canary_findings, digit_tokens
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from tests.cases import finished_runs

CANARIES = 300
Patch = pytest.MonkeyPatch


def write_records(path: Path, count: int = 2 * CANARIES + 200) -> None:
    draws = np.random.default_rng(0)
    rows = [{"prompt": "".join(draws.choice(list("abcdefgh"), 8))} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_runs.base_model(tmp_path_factory.mktemp("base"), "llama", "causal-lm")


def record_level(place: Path, base: Path, **changes: Any) -> RunConfig:
    config = finished_runs.settings(
        place, "causal-lm", str(base),
        **{
            "model.targets": "q_proj,v_proj", "privacy.epsilon": 2.0, "privacy.delta": 1e-5, "rounds": 40,
            "site.batch-size": 60, "data.validation-records": 100, "data.test-records": 100, "audit.canaries": CANARIES,
            "evaluation.every": 40, "evaluation.examples": 0, **changes,
        },
    )  # fmt: skip
    write_records(place / "records.jsonl")
    return config


def audited(config: RunConfig, place: Path) -> dict[str, Any]:
    """What the audit of a run finds that is made now."""
    folder = place / "run"
    folder.mkdir()
    run_in_folder(config, folder)
    result = CliRunner().invoke(app, ["audit", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def hardly_ever_wrong(monkeypatch: Patch) -> None:
    """One right run in a thousand is refuted by each of three checks; here one in a hundred million."""
    monkeypatch.setattr(privacy.audit.in_run, "CHECK_ALPHA", 1e-8)


@pytest.mark.usefixtures("hardly_ever_wrong")
def test_a_right_run_stays_under_its_ledger_and_says_that_it_holds_canaries(tmp_path: Path, base: Path) -> None:
    found = audited(record_level(tmp_path, base), tmp_path)
    game, folder = found["canaries"], tmp_path / "run"
    assert found["verdict"].startswith("Consistent with the ledger")
    assert game["epsilon_lower"] <= found["upper_bound"]["epsilon"] <= 2.0
    assert 100 < game["included"] < 200
    assert 0.95 < game["noise"]["estimate"] < 1.12  # 14 runs: 1.037 (other records add to it), standard deviation .008
    assert game["presence"]["lower"] < 1 < game["presence"]["upper"]
    assert game["wrong"] == []
    assert found["membership"][0]["members"] == CANARIES  # half of the records; those of canaries were never used
    assert (folder / names.AUDIT_FOLDER / "canaries.key").stat().st_mode & 0o777 == 0o600
    note = (folder / names.CANARIES_FILE).read_text().strip()
    assert f"{CANARIES} canaries" in note
    assert json.loads((folder / names.PRIVACY_FILE).read_text())["canaries"] == note
    assert note in (folder / names.ADAPTER_FOLDER / "README.md").read_text()


def client_level(place: Path, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 12, "clients": 120, "sampling-rate": 0.25, "privacy": {"delta": 1e-3},
        "strategy": {"controller": "dp-lac", "aggregation": "ffa"},
        "model": {"name": "random:bert", "rank": 4, "max-length": 32},
        "data": {"validation-records": 20, "test-records": 60, "records-per-client": 3, "cache": str(place / "c")},
        "engine": {"kind": "inprocess", "workers": 2},
        "audit": {"canaries": 60}, **changes,
    }  # fmt: skip


def of_clients(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the default audit of a run of clients finds, through strategy, workers and ledger."""
    folder.mkdir()
    run_inprocess(parse(table), folder)
    result = CliRunner().invoke(app, ["audit", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.usefixtures("hardly_ever_wrong")
@pytest.mark.parametrize("controller", ["dp-lac", pytest.param("quantile", marks=pytest.mark.nightly)])
def test_clients_are_canaries_too_whatever_is_asked_of_them(controller: str, tmp_path: Path) -> None:
    table = client_level(tmp_path, strategy={"controller": controller, "aggregation": "ffa"})
    folder = tmp_path / "run"
    found = of_clients(table, folder)
    assert found["verdict"].startswith("Consistent with the ledger")
    assert found["canaries"]["epsilon_lower"] <= found["upper_bound"]["epsilon"] <= 4.0
    assert found["canaries"]["wrong"] == []
    assert found["canaries"]["noise"]["lower"] < 1.2
    assert found["canaries"]["presence"]["upper"] > 1
    assert found["membership"][0]["level"] == "client"
    assert len((folder / names.AUDIT_FOLDER / "canaries.jsonl").read_text().splitlines()) == 12
    clean = parse({**table, "audit": {"canaries": 0}})
    (tmp_path / "clean").mkdir()
    run_inprocess(clean, tmp_path / "clean")
    assert not (tmp_path / "clean" / names.AUDIT_FOLDER).exists()
    assert not (tmp_path / "clean" / names.CANARIES_FILE).exists()


def test_planted_secrets_are_ranked_and_their_records_left_out_of_membership(tmp_path: Path, base: Path) -> None:
    changes = {"audit.canaries": 0, "data.canaries": 20, "data.canary-copies": 5, "data.canary-kind": "id-record"}
    found = audited(record_level(tmp_path, base, **{**changes, "rounds": 4, "evaluation.every": 4}), tmp_path)
    exposed = found["exposure"]
    assert (exposed["secrets"], exposed["copies"], len(exposed["adapter"]["bits"])) == (20, 5, 20)
    assert exposed["base"]["p_value"] > 1e-3
    assert 0 < exposed["base"]["mean"]["bits"] < 4  # 1.44 in the mean over models that never saw a secret
    assert found["membership"][0]["members"] == 2 * CANARIES  # 100 records hold a secret
    assert "made-up secrets" in (tmp_path / "run" / names.CANARIES_FILE).read_text()


def test_what_every_release_showed_is_judged_the_last_one_too(tmp_path: Path) -> None:
    config = parse(unflatten({"clients": 100, "audit.canaries": 40, "privacy.delta": 1e-5}))
    canaries, draws = canaries_of(config, tmp_path, 100, fresh=True), np.random.default_rng(0)
    assert canaries is not None
    seen = []
    for round in (1, 2, 3):
        scores = tuple(map(float, draws.normal(0, 1, 40) + canaries.included))
        seen.append(Observation(round, 0.5, 1.0, 10_000, (1.0,) * 40, scores))
        note_seen(tmp_path, seen[-1])
    found = canary_findings(SimpleNamespace(config=config, folder=tmp_path), 100)  # type: ignore[arg-type]
    whole = audit_canaries(canaries, seen, delta=1e-5)
    assert found is not None
    assert (found["canaries"], found["included"]) == (40, int(canaries.included.sum()))
    assert found["noise"] == asdict(whole.noise)
    assert found["presence"] == asdict(whole.presence)
    assert found["noise"] != asdict(audit_canaries(canaries, seen[:-1], delta=1e-5).noise)


def test_numbers_are_ranked_among_all_where_digits_are_tokens() -> None:
    tokenizer: Any = load_tokenizer("random:llama")
    found = digit_tokens(tokenizer, "six-digit", ["123456", "000000"])
    assert found is not None
    assert len(set(found[1])) == 10
    assert digit_tokens(tokenizer, "id-record", ["7Q0ZK2M4PA"]) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clients": 100, "audit.canaries": 60}, "at most half of clients = 100"),
        ({"privacy.noise-correlation": "banded", "strategy.controller": "fixed"}, "correlated noise"),
        ({"data.held-by": "nodes"}, "every node brings its own update"),
    ],
)
def test_canaries_that_nobody_could_plant_or_see_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(unflatten({"clients": 1000, "audit.canaries": 10, **changes}))


def a_quarter_of_the_noise(patch: Patch) -> None:
    draw = GaussianNoise.draw
    patch.setattr(GaussianNoise, "draw", lambda self, parts: draw(self, parts) // 4)


def no_noise(patch: Patch) -> None:
    patch.setattr(GaussianNoise, "draw", lambda self, parts: torch.zeros(sum(n for _, n in parts), dtype=torch.int64))


def clipping_left_out(patch: Patch) -> None:
    patch.setattr(FlatClip, "encode", lambda self, rows: rows.double() / (100 * self.bound))
    patch.setattr(privacy.contribution, "squared_norms", lambda rows: torch.zeros(len(rows), dtype=torch.float64))
    without_validation(patch)


def without_validation(patch: Patch) -> None:
    """Sums that cannot be of clipped rows are refused; a bug that is seen by the audit alone has got past that."""
    patch.setattr("strategies.messages.client_update.validate", lambda *parts: None)
    patch.setattr(strategies.private_training, "validate", lambda *parts: None)
    patch.setattr("privacy.mechanism.validate", lambda *parts: None)


def everybody_in_every_batch(patch: Patch) -> None:
    patch.setattr(CohortSampler, "poisson", lambda self, n, *rest, **words: np.arange(n))


def a_unit_counts_ten_times(patch: Patch) -> None:
    def ten_times(units: Units, plan: Plan) -> Contribution:
        one = contribute(units, plan)
        return sum([one] * 9, one)

    without_validation(patch)
    patch.setattr("client.worker.contribute", ten_times)
    patch.setattr(client.record_level.dp_sgd, "contribute", ten_times)


def the_same_noise_in_every_release(patch: Patch) -> None:
    draw, kept = GaussianNoise.draw, list[Any]()

    def again(self: GaussianNoise, parts: Any) -> Any:
        if not kept:
            kept.append(draw(self, parts))
        return kept[0]

    patch.setattr(GaussianNoise, "draw", again)


BUGS = [
    (a_quarter_of_the_noise, "noise in the releases"),
    (clipping_left_out, "one unit moves"),
    (everybody_in_every_batch, "one unit moves"),
    (a_unit_counts_ten_times, "one unit moves"),
    (the_same_noise_in_every_release, "share noise"),
]


@pytest.mark.parametrize(
    ("bug", "said"),
    [BUGS[0], *(pytest.param(*bug, marks=pytest.mark.nightly) for bug in BUGS[1:])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_bug_is_caught_in_a_whole_run(
    bug: Callable[[Patch], None], said: str, tmp_path: Path, base: Path, monkeypatch: Patch
) -> None:
    config = record_level(
        tmp_path, base, **{"privacy.epsilon": 8.0}
    )  # the less noise, the more an audit sees of the code
    bug(monkeypatch)
    found = audited(config, tmp_path)
    assert found["verdict"].startswith("REFUTED"), found["canaries"]
    assert said in found["verdict"]


@pytest.mark.usefixtures("hardly_ever_wrong")
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (a_quarter_of_the_noise, "noise in the releases"),
        pytest.param(no_noise, "noise in the releases", marks=pytest.mark.nightly),
        pytest.param(clipping_left_out, "one unit moves", marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_in_a_whole_run_of_clients_is_caught(
    bug: Callable[[Patch], None], said: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    bug(monkeypatch)
    found = of_clients(client_level(tmp_path), tmp_path / "run")
    assert found["verdict"].startswith("REFUTED"), found["canaries"]
    assert said in found["verdict"]
