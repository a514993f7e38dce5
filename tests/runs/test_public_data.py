"""Training on the server's public records: a warm start that learns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.config.load import parse
from server.runs import public_data
from server.runs.assembly import Assembly, assemble_client_level
from server.runs.public_data import PublicTraining, train_without_noise


def assembly(cache: Path, settings: Mapping[str, Any] | None = None, **public: object) -> Assembly:
    return assemble_client_level(
        parse(
            {
                "rounds": 3,
                "clients": 40,
                "sampling-rate": 0.2,
                "privacy": {"delta": 1e-3},
                "strategy": {"aggregation": "ffa"},
                "model": {"name": "random:bert", "rank": 2, "max-length": 48},
                "data": {"validation-records": 60, "test-records": 20, "records-per-client": 3, "cache": str(cache)},
                "public": public,
                **(settings or {}),
            }
        )
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_nothing_switched_on_uses_no_public_record(cache: Path) -> None:
    made = assembly(cache)
    public = PublicTraining.of(made)
    assert public.num_records == 0
    assert public.warm_start(made.start) is made.start


def test_a_warm_start_lowers_the_loss_on_the_records_it_used(cache: Path) -> None:
    made = assembly(cache, **{"warm-start-epochs": 10, "warm-start-learning-rate": 0.003})
    public = PublicTraining.of(made)
    assert public.num_records == 30
    assert public.records.tokens.tolist() == made.data.validation.select(np.arange(30)).tokens.tolist()
    assert public.engine is not None
    before = public.engine.evaluate(made.start, public.records).loss
    after = public.engine.evaluate(public.warm_start(made.start), public.records).loss
    assert after < before - 0.01


def test_a_warm_start_of_both_factors_leaves_ffa_an_a_that_public_records_chose(cache: Path) -> None:
    change = {}
    for factors in ("trained", "both"):
        settings = {"warm-start-epochs": 10, "warm-start-learning-rate": 0.003, "warm-start-factors": factors}
        made = assembly(cache, **settings)
        start = PublicTraining.of(made).warm_start(made.start)
        change[factors] = {entry.factor: entry.of(start) - entry.of(made.start) for entry in made.layout.entries}
    assert {factors: bool(moved["A"].any()) for factors, moved in change.items()} == {"trained": False, "both": True}
    assert all(moved["B"].any() for moved in change.values())


WARM = {"warm-start-epochs": 2, "warm-start-learning-rate": 0.003}


def counted(made: Assembly, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, int]:
    """The warm start, and how often it was trained."""
    trainings = []

    def trained(*arguments: Any) -> torch.Tensor:
        trainings.append(arguments)
        return train_without_noise(*arguments)

    monkeypatch.setattr(public_data, "train_without_noise", trained)
    return PublicTraining.of(made).warm_start(made.start), len(trainings)


def test_a_warm_start_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, trained = counted(assembly(tmp_path, **WARM), monkeypatch)
    second, again = counted(assembly(tmp_path, **WARM), monkeypatch)
    assert (trained, again) == (1, 0)
    assert torch.equal(first, second)
    next((tmp_path / public_data.KEPT).iterdir()).unlink()
    anew, trained = counted(assembly(tmp_path, **WARM), monkeypatch)
    assert trained == 1
    assert torch.equal(first, anew), "not repeatable"


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"public": {**WARM, "warm-start-epochs": 3}},
        {"public": {**WARM, "training-fraction": 0.4}},
        {"public": {**WARM, "warm-start-factors": "both"}},
        {"model": {"name": "random:bert", "rank": 4, "max-length": 48}},
        {"engine": {"precision": "bf16-model"}},
    ],
    ids=repr,
)
def test_another_warm_start_is_trained(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(assembly(tmp_path, **WARM), monkeypatch)
    assert counted(assembly(tmp_path, settings, **WARM), monkeypatch)[1] == 1


def test_other_code_and_another_model_train_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(assembly(tmp_path, **WARM), monkeypatch)
    monkeypatch.setattr(public_data, "fingerprint", lambda name: "another")
    assert counted(assembly(tmp_path, **WARM), monkeypatch)[1] == 1
    monkeypatch.setattr(public_data, "code_version", lambda config: {"client/engine/cohort.py": "changed"})
    assert counted(assembly(tmp_path, **WARM), monkeypatch)[1] == 1


def test_settings_that_clients_train_by_share_a_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(assembly(tmp_path, **WARM), monkeypatch)
    others = {"local": {"learning-rate": 0.3}, "strategy": {"aggregation": "ffa", "controller": "quantile"}}
    assert counted(assembly(tmp_path, others, **WARM), monkeypatch)[1] == 0


@pytest.mark.parametrize("damage", [b"", b"no safetensors"])
def test_a_damaged_warm_start_is_trained_again(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = counted(assembly(tmp_path, **WARM), monkeypatch)
    next((tmp_path / public_data.KEPT).iterdir()).write_bytes(damage)
    second, trained = counted(assembly(tmp_path, **WARM), monkeypatch)
    assert trained == 1
    assert torch.equal(first, second)
    assert "is damaged" in caplog.text
    assert counted(assembly(tmp_path, **WARM), monkeypatch)[1] == 0
