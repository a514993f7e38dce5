"""`lacquer data`: it tells how a data set is fetched, fetches nothing, and writes what presets find."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.data.catalog.published import PUBLISHED
from simulations.cli.app import app
from simulations.presets.load import preset_files


def test_it_lists_writes_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(app, ["data"])
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == list(PUBLISHED)
    assert CliRunner().invoke(app, ["data", "e2e"]).output.strip() == PUBLISHED["e2e"].fetch
    (tmp_path / "dev.csv").write_text("text\nA text.\n")
    done = CliRunner().invoke(app, ["data", "pubmed", "--from", "dev.csv"])
    assert done.exit_code == 0, done.output
    assert "data/pesgd_pubmed/validation.parquet: 1 rows" in done.output
    assert "--data data" in done.output
    again = CliRunner().invoke(app, ["data", "pubmed", "--from", "dev.csv"])
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    other = CliRunner().invoke(app, ["data", "pubmed", "--from", "dev.csv", "--to", "other", "--json"])
    assert json.loads(other.stdout) == {"other/pesgd_pubmed/validation.parquet": 1}
    for arguments, said in ((["pubmd"], "NAME must be one of"), (["--from", "dev.csv"], "needs the name")):
        refused = CliRunner().invoke(app, ["data", *arguments])
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_presets_look_for_its_folders() -> None:
    text = "".join(file.read_text() for file in preset_files().values())
    told = {one.folder for one in PUBLISHED.values()} - {"glue_qnli", "multiwoz_dialogues", "clinc150"}
    assert {folder for folder in told if folder in text} >= told - {"pesgd_biorxiv", "pesgd_congressional"}
