"""Attacks of an audit find something in a model that learnt its records by heart, and nothing in a private one."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from client.data.canaries import Canaries
from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.engine.local_training import LocalTraining
from client.generation import Decoding, continuations
from client.worker import make_engine
from privacy import durable
from privacy.audit.roc import auc
from server.config.load import parse, unflatten
from server.config.methods import methods
from server.config.schema import RunConfig
from server.evaluation.finished import FinishedRun, read_finished
from server.run_folder import names
from server.runs.artefacts import Final, save_adapter
from server.runs.assembly import data_spec, make_assembly
from server.runs.public_data import train_without_noise
from server.runs.start import run_in_folder
from simulations.audit import extraction, shadows
from simulations.audit.findings import audit_run
from simulations.audit.units import audited_units
from simulations.cli.app import app
from simulations.engines.inprocess import run_inprocess
from tests.cases import finished_runs
from tests.runs.test_audit import write_records

MEMBERS, HELD_OUT, SECRETS = 60, 60, 5

LEARNT = {
    "privacy.non-private": True,
    "privacy.noise": "insecure-zero",
    "rounds": 150,
    "evaluation.every": 150,
    "strategy.optimizer-options.bias-correction": False,
}
PRIVATE = {"privacy.epsilon": 0.3, "rounds": 2}

Runs = Callable[..., FinishedRun]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run over the records of one site, on random texts, made when it is first asked for."""
    place = tmp_path_factory.mktemp("attacks")
    base = finished_runs.base_model(place / "base", "llama", "causal-lm")

    @cache
    def make(kind: str, members: int = MEMBERS, **changed: Any) -> FinishedRun:
        config = finished_runs.settings(
            place, "causal-lm", str(base),
            **{
                "model.targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "model.rank": 16,
                "privacy.delta": 1e-5, "site.batch-size": 60, "evaluation.examples": 0,
                "strategy.optimizer": "fedadam", "strategy.optimizer-options.learning-rate": 0.02,
                "data.validation-records": 20, "data.test-records": HELD_OUT,
                **(LEARNT if kind == "learnt" else PRIVATE),
                **{name.replace("__", ".").replace("_", "-"): of for name, of in changed.items()},
            },
        )  # fmt: skip
        write_records(place / "records.jsonl", count=members + HELD_OUT + 20)  # in the place of the cases' own
        folder = place / f"run-{kind}-{len(list(place.iterdir()))}"
        folder.mkdir()
        run_in_folder(config, folder)
        return read_finished(folder)

    return make


@pytest.fixture(scope="module")
def texts(finished: Runs) -> Callable[[str], tuple[FinishedRun, FinishedRun]]:
    """A private run over few texts with secrets of a kind, and the same with an adapter that learnt them by heart."""

    @cache
    def make(kind: str) -> tuple[FinishedRun, FinishedRun]:
        changed = {"canaries": SECRETS, "canary_copies": 2, "canary_kind": kind}
        few = {"model__name": "lacquer-small", "model__targets": "auto", "privacy__delta": 1e-3, "site__batch_size": 8}
        private = finished("private", 16, **few, **{f"data__{name}": value for name, value in changed.items()})
        folder = private.folder.with_name(f"learnt-{kind}")
        shutil.copytree(private.folder, folder)
        (folder / names.SEAL_FILE).unlink()  # as whoever changes the adapter would
        config, data = private.config, prepare(data_spec(private.config))
        assembly = make_assembly(config, methods(config), data)
        local = LocalTraining(optimizer="adamw", learning_rate=0.01, batch_size=len(data.train), epochs=120)
        adapter = train_without_noise(make_engine(assembly.job), assembly.start, data.train, local, 0)
        save_adapter(folder / names.ADAPTER_FOLDER, config, Final(adapter, assembly.layout, assembly.spec))
        return private, read_finished(folder)

    return make


Texts = Callable[[str], tuple[FinishedRun, FinishedRun]]


@pytest.mark.nightly  # most of a minute
def test_secrets_come_out_of_a_model_that_learnt_them_and_out_of_no_other(texts: Texts) -> None:
    private, learnt = (extraction.extraction(run, run.language_model()) for run in texts("secret-id"))
    assert private is not None
    assert learnt is not None
    assert (learnt["secrets"], learnt["contexts"]) == (SECRETS, SECRETS)
    assert learnt["adapter"]["greedy"]["count"] == learnt["adapter"]["sampled"]["count"] == SECRETS
    assert learnt["adapter"]["sampled"]["lower"] > 0.4
    assert learnt["adapter"]["p_value"] < 1e-4
    assert learnt["chance"] < 1e-10
    assert learnt["adapter"]["sampled_never_planted"]["count"] == 0
    for other in (learnt["base"], private["adapter"], private["base"]):
        assert other["sampled"]["count"] == other["greedy"]["count"] == 0
        assert other["p_value"] == 1


@pytest.mark.nightly  # most of a minute
def test_the_chance_of_a_secret_is_how_often_it_is_sampled(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = texts("id-record")[1], []
    monkeypatch.setattr(extraction, "_summary", lambda planted, others: seen.append(planted))
    model, tokenizer = run.language_model(), run.tokenizer()
    extraction.extraction(run, model)
    chances = np.exp(seen[0].chances)  # under the adapter
    assert 0.02 < chances.sum() <= 1  # all five stand behind one context
    planted, count = Canaries.of(run.config.data, run.config.seed).secrets, 2000
    prefix, rows = extraction.split_tokens(tokenizer, "id-record", planted)
    said = continuations(model, tokenizer, [prefix] * count, Decoding(max(map(len, rows)), temperature=1.0))
    shares = [np.mean([tokens[: len(row)] == row for tokens in said]) for row in rows]
    assert np.all(np.abs(shares - chances) < 5 * np.sqrt((chances + 1 / count) / count))


def test_the_chance_to_be_among_many_samples() -> None:
    assert extraction.sampled_at_all(np.log(0.5 / extraction.SAMPLES)) == pytest.approx(1 - np.exp(-0.5), rel=1e-3)
    assert extraction.sampled_at_all(-800.0) == 0
    assert extraction.sampled_at_all(0.0) == 1


def test_behind_one_context_one_secret_can_be_said_greedily_and_several_by_samples(texts: Texts) -> None:
    run = texts("id-record")[1]
    found = extraction.extraction(run, run.language_model())
    assert found is not None
    assert (found["secrets"], found["contexts"], found["never_planted"]) == (SECRETS, 1, extraction.CONTROLS)
    assert found["adapter"]["greedy"]["count"] == 1
    assert found["adapter"]["sampled"]["count"] == SECRETS
    assert found["adapter"]["sampled_never_planted"]["count"] == found["base"]["sampled"]["count"] == 0


def test_what_stands_in_front_of_a_secret_is_not_part_of_it() -> None:
    assert extraction._behind("secret_id=", "=7Q0ZK2M4PA.") == "7Q0ZK2M4PA."
    assert extraction._behind("My ID is ", " 341752") == "341752"
    assert extraction._behind("My ID is ", "341752") == "341752"


@pytest.fixture(scope="module")
def gaussian() -> tuple[np.ndarray, ...]:
    """Targets whose phi is normal, with means of their own, and larger by one where they were trained on."""
    draws = np.random.default_rng(1)
    inside = np.stack([draws.random(400) < 0.5 for _ in range(3)])
    inside = np.concatenate([inside, ~inside])
    truth = draws.random(400) < 0.5
    means = draws.normal(0, 5, 400)
    return means + truth + draws.normal(0, 0.5, 400), means + inside + draws.normal(0, 0.5, inside.shape), inside, truth


def test_likelihood_ratios_allow_for_how_hard_a_unit_is(gaussian: tuple[np.ndarray, ...]) -> None:
    phi, others, inside, truth = gaussian
    scores = shadows.likelihood_ratios(phi, others, inside)
    plain = auc(phi[truth], phi[~truth]).estimate
    assert plain < 0.6
    assert all(auc(found[truth], found[~truth]).lower > 0.75 for found in scores.values())
    # by hand, of one target
    mean_in, mean_out = others[inside[:, 0], 0].mean(), others[~inside[:, 0], 0].mean()
    assert scores["LiRA, offline"][0] * (phi[1] - others[~inside[:, 1], 1].mean()) == pytest.approx(
        scores["LiRA, offline"][1] * (phi[0] - mean_out)
    )
    assert np.sign(scores["LiRA, online"][0]) == np.sign((phi[0] - (mean_in + mean_out) / 2) * (mean_in - mean_out))


def test_the_logit_of_a_loss() -> None:
    losses = np.array([0.1, np.log(2), 3.0, 0.0])
    found = shadows.logit(losses)
    np.testing.assert_allclose(found[:3], np.log(np.exp(-losses[:3]) / (1 - np.exp(-losses[:3]))), atol=1e-12)
    assert 30 < found[3] < 40


def test_a_shadow_trains_on_the_records_that_were_put_in_the_place_of_others(
    finished: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished("private")
    data = prepare(data_spec(run.config))
    turned = data.train.select(np.arange(len(data.train))[::-1])
    shadows._trained(run, data, (turned, np.arange(len(turned))), tmp_path)
    (put,) = (tmp_path / "cache").glob("*/")
    assert np.array_equal(PreparedData.open(put).train.tokens, turned.tokens)
    monkeypatch.setattr(durable, "keep_names", lambda folder, other: None)
    with pytest.raises(RuntimeError, match="not on the records that were put there"):
        shadows._trained(run, data, (turned, np.arange(len(turned))), tmp_path / "again")


@pytest.mark.nightly  # most of a minute
def test_shadow_runs_find_members_of_a_run_without_privacy_and_none_of_a_private_one(finished: Runs) -> None:
    _, shadow = audit_run(finished("learnt"), 1000, 4)["membership"]
    assert (shadow["shadows"], shadow["members"], shadow["held_out"]) == (4, HELD_OUT, HELD_OUT)
    assert [attack["score"] for attack in shadow["attacks"]] == ["LiRA, online", "LiRA, offline"]
    assert all(attack["auc"]["lower"] > 0.65 for attack in shadow["attacks"])
    assert {entry["fpr"] for entry in shadow["attacks"][1]["tpr"]} == {0.01, 0.001}
    run = finished("private")
    found = audit_run(run, 1000, 4)
    assert [text.partition(" ")[0] for text in found["not_tried"]] == ["an", "exposure", "an"]
    assert all(abs(attack["auc"]["estimate"] - 0.5) < 0.22 for attack in found["membership"][1]["attacks"])
    assert found["verdict"].startswith("Consistent with the ledger")
    assert [path.name for path in (run.folder / names.AUDIT_FOLDER).iterdir()] == []  # nothing of a shadow stays


CLIENTS = {
    "privacy.unit": "client", "clients": 20, "sampling-rate": 0.5, "privacy.delta": 1e-3, "privacy.epsilon": 5.0,
    "strategy.controller-options.clip-norm": 0.1, "model.targets": "q_proj,v_proj", "data.validation-records": 8,
    "data.test-records": 40, "evaluation.examples": 0,
}  # fmt: skip
PERSONS = {"privacy.unit": "group", "data.unit-column": "person", "data.test-records": 40, "data.validation-records": 8}
RECORDS = {"privacy.unit": "record", "data.test-records": 40, "data.validation-records": 8}


def config_of(place: Path, changed: dict[str, Any]) -> RunConfig:
    base = finished_runs.base_model(place / "base", "llama", "causal-lm")
    config = finished_runs.settings(place, "causal-lm", str(base), **changed)
    write_records(place / "records.jsonl", count=128)
    return config


@pytest.mark.parametrize("changed", [RECORDS, PERSONS, CLIENTS], ids=["record", "person", "client"])
def test_a_shadow_has_held_out_units_in_the_places_of_members(changed: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, changed)
    data, draws = prepare(data_spec(config)), np.random.default_rng(0)
    targets = shadows._targets(audited_units(config, data, 1000)[0], draws)
    m, slots = len(targets.members), shadows.unit_of_rows(config, data)
    inside, other = shadows._halves(m, 2, draws)
    assert inside.sum() == other.sum() == m
    assert not np.any(inside & other)
    train, units = shadows.exchange_units(config, data, slots, targets, inside)

    def texts(records: Any, of: np.ndarray) -> list[bytes]:
        return sorted(np.asarray(records.tokens[records.offsets[i] : records.offsets[i + 1]]).tobytes() for i in of)

    of_unit = {int(unit): np.flatnonzero(units == unit) for unit in np.unique(slots)}
    found = [texts(train, rows) for rows in of_unit.values()]
    assert len(of_unit) == len(np.unique(units))  # as many units as the run has
    for kept, rows in zip(inside[:m], targets.members, strict=True):
        own = int(slots[rows[0]])
        assert (texts(train, of_unit[own]) == texts(data.train, np.flatnonzero(slots == own))) == kept
    for taken, rows in zip(inside[m:], targets.others, strict=True):
        assert (texts(data.test, rows) in found) == taken
    shadows._write(config, data, train, units, tmp_path / "shadow")
    written = PreparedData.open(tmp_path / "shadow", verify=True)
    assert (written.num_clients, len(written.test)) == (data.num_clients, len(data.test))
    np.testing.assert_array_equal(shadows.unit_of_rows(config, written), units)


def test_shadow_runs_over_clients(tmp_path: Path) -> None:
    config, folder = config_of(tmp_path, CLIENTS), tmp_path / "run"
    folder.mkdir()
    run_inprocess(config, folder)
    result = CliRunner().invoke(app, ["audit", str(folder), "--shadows", "4"])
    assert result.exit_code == 0, result.output
    assert "4 shadow runs, 4 times the run's" in result.stderr
    assert "clients, 4 shadow runs: " in result.stdout
    assert "LiRA, offline" in (folder / names.AUDIT_FOLDER / names.REPORT_FILE).read_text()


@pytest.mark.parametrize(
    ("count", "changed", "said"),
    [
        (3, {}, "must be an even number of at least 4"),
        (2, {}, "must be an even number of at least 4"),
        (4, {"clients": 2}, "sites with ledgers of their own"),
        (4, {"data.sensitive": "weights"}, "have weights"),
        (4, {"data.held-by": "nodes"}, "nodes hold the records"),
    ],
)
def test_shadow_runs_that_cannot_be_made_are_refused(
    count: int, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    settings = {"privacy.unit": "record", "clients": 1, "sampling-rate": 1.0, "model.task": "causal-lm"}
    config = parse(unflatten({**settings, **changed}))
    with pytest.raises(ValueError, match=said):
        shadows.refuse_shadows(FinishedRun(tmp_path, config, {}, {}), count)
