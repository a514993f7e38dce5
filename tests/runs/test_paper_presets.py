"""Every paper runs by its name, on data in the form that they are published in."""

import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from simulations.cli.app import app
from simulations.presets.load import PURPOSES, find
from tests.engine.data.test_corpora import ENCOUNTER, MAPPING

ONE_ROUND = {
    "dp-lac": ("rounds=1", "data.train-records=200", "clients=50", "sampling-rate=0.2", "privacy.delta=1e-3"),
    "rldp": ("rounds=1", "data.train-records=200", "privacy.delta=1e-3", "site.batch-size=16", "site.warm-up=0"),
    "dp-adam-ac": ("rounds=1", "data.train-records=200", "privacy.delta=1e-3", "site.batch-size=16", "site.warm-up=0"),
    "atdp": ("privacy.delta=1e-3", "data.validation-records=20", "data.records-per-client=200"),
    "pe-sgd": (
        "rounds=1", "data.train-records=200", "data.validation-records=20", "privacy.delta=1e-3", "site.batch-size=16",
        "site.span.samples=4",
    ),
}  # fmt: skip


def sentences(generator: np.random.Generator, count: int) -> list[str]:
    words = "the patient was seen with pain and treated by a drug for some days in our ward".split()
    return [" ".join(generator.choice(words, 24)) + f" number {number} ." for number in range(count)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the data of the papers are published, with invented content."""
    folder, generator = tmp_path_factory.mktemp("published"), np.random.default_rng(0)
    for name in ("diabetes130", "wikitext2", "pesgd_pubmed"):
        (folder / name).mkdir()
    rows = [
        ENCOUNTER | {
            "encounter_id": number, "patient_nbr": 1000 + number, "time_in_hospital": 1 + number % 14,
            "num_lab_procedures": number // 14, "num_medications": 1 + number % 31,
        }
        for number in range(900)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "diabetes130/full.parquet")
    mapping = pandas.DataFrame(MAPPING, columns=["field", "id", "description"])
    mapping.to_parquet(folder / "diabetes130/ids_mapping.parquet")
    for part, articles in (("train", 300), ("validation", 40)):
        lines = [
            line
            for number in range(articles)
            for line in (
                "",
                f" = {part.title()} {number} = ",
                "",
                *(f" {text} " for text in sentences(generator, 4)),
                "",
            )
        ]
        pandas.DataFrame({"text": lines}).to_parquet(folder / f"wikitext2/{part}.parquet")
    for part, count in (("validation", 300), ("test", 60)):
        texts = pandas.DataFrame({"text": sentences(generator, count)})
        texts.to_parquet(folder / f"pesgd_pubmed/{part}.parquet")
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", PURPOSES["The papers"])
def test_a_paper_runs_by_its_name(
    preset: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"--set={setting}" for setting in (*ONE_ROUND[preset], f"data.cache={tmp_path / 'cache'}")]
    engine = ["--engine", "inprocess"] if preset == "dp-lac" else []
    name = preset
    if preset == "atdp":  # whose steps stand in its phases
        name = "small.toml"
        text = find(preset).read_text()
        Path(name).write_text(re.sub(r"steps = \d+", "steps = 2", text).replace("batch-size = 256", "batch-size = 16"))
    done = CliRunner().invoke(app, ["run", name, "--data", str(published), "--json", *engine, *settings])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    results = json.loads((Path(said["folder"]) / "results.json").read_text())
    assert results["missing"] == {}
    assert results["rounds_done"] >= 1
