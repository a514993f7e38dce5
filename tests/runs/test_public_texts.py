"""A site in the span of gradients of its own model's texts: from configuration to artefacts, and after a break."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from client.record_level.dp_sgd import PrivateSgd
from client.record_level.training import record_level_engine
from privacy.ledger.ledger import Ledger
from server.config.load import ConfigError, flatten, parse, unflatten
from server.config.schema import RunConfig
from server.run_folder.checkpoint import load_checkpoint
from server.runs.public_data import PublicTraining, public_span
from server.runs.record_level_assembly import assemble_record_level
from server.runs.start import run_in_folder

SPAN = {"samples": 6, "directions": 3, "openings": "Notes: |A patient", "warm-start-epochs": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def config(cache: Path, method: str, **settings: Any) -> RunConfig:
    table = {
        "rounds": 3,
        "clients": 1,
        "sampling-rate": 1.0,
        "privacy": {"unit": "record", "delta": 1e-3},
        "strategy": {"controller": "fixed", "optimizer": "fedadam"},
        "model": {
            "name": "random:llama", "task": "causal-lm", "rank": 2, "max-length": 16, "targets": "q_proj,v_proj",
        },
        "data": {
            "partition": "iid", "records-per-client": 30, "validation-records": 5, "test-records": 5,
            "cache": str(cache),
        },
        "site": {"batch-size": 8, "checkpoint-every": 1, "span": {**SPAN, "method": method}},
    }  # fmt: skip
    return parse(unflatten({**flatten(table), **settings}))


def run(settings: RunConfig, folder: Path, *, resume: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    run_in_folder(settings, folder, resume=resume)


@pytest.mark.parametrize(
    "method",
    [
        "coefficients",
        "projection",
        "embedding-residual",
    ],
)
def test_a_method_of_the_span_runs_from_its_name(method: str, cache: Path, tmp_path: Path) -> None:
    run(config(cache, method), tmp_path / "run")
    statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert statement["rounds"] == {"committed": 3, "charged": 3, "released": 3}
    assert 0 < statement["epsilon"] <= 4.0
    ledger = Ledger.open(tmp_path / "run" / "ledger.jsonl", read_only=True)
    dims = [charge.event.components[0].dim for charge in ledger.charges]
    values = 2 * (2 * 32 + 32 + 16) * 2  # two layers, rank 2: q_proj 32 -> 32 and v_proj 32 -> 16, A and B
    assert dims == [{"coefficients": 6, "projection": values, "embedding-residual": 3 + values}[method]] * 3
    assert json.loads((tmp_path / "run" / "results.json").read_text())["rounds_done"] == 3


def test_what_is_public_to_a_site_is_none_of_its_records(cache: Path) -> None:
    """Neither the texts of its span nor what it warms up on."""
    made = assemble_record_level(config(cache, "projection", **{"public.warm-start-epochs": 1}))
    site = made.data.client(0)
    own = {tuple(site.select([record]).tokens) for record in range(len(site))}
    span = public_span(made, record_level_engine(made.job, "stacked"))[1]
    assert span is not None
    for public in (span.start().texts, PublicTraining.of(made).records):
        assert len(public) > 1
        assert not own & {tuple(public.select([record]).tokens) for record in range(len(public))}
    assert len(own) > 20


def test_texts_that_evolved_are_there_after_a_break(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings, states = tmp_path / "run", config(cache, "coefficients"), []
    whole = PrivateSgd.step

    def breaks(training: PrivateSgd) -> Any:
        if len(states) == 2:
            raise OSError("the machine is gone")
        release = whole(training)
        states.append(training.state)
        return release

    monkeypatch.setattr(PrivateSgd, "step", breaks)
    with pytest.raises(OSError, match="machine is gone"):
        run(settings, folder)
    monkeypatch.setattr(PrivateSgd, "step", whole)
    assert not torch.equal(states[0].subspace.tokens, states[1].subspace.tokens)
    stored = load_checkpoint(folder, states[0]).state
    assert torch.equal(stored.subspace.tokens, states[1].subspace.tokens)
    assert torch.equal(stored.subspace.basis, states[1].subspace.basis)
    run(settings, folder, resume=True)
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["rounds"] == {"committed": 3, "charged": 3, "released": 3}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model.task": "classification", "model.name": "random:bert", "model.targets": "query"}, "causal-lm"),
        ({"site.gradients": "opacus"}, "stacked"),
        ({"site.span.samples": 7}, "multiple of variants"),
        ({"site.span.openings": " | "}, "openings must be non-empty"),
        ({"site.span.directions": 60}, "site.span.directions = 60 must be at most site.span.samples"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    settings: dict[str, Any], reason: str, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(config(cache, "projection", **settings), tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
