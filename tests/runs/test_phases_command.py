"""`lacquer run` with phases: from a file to a run folder that says what it guarantees."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.names import CONFIG_FILE, STAMP_FILE
from server.run_folder.phase_progress import PhaseFolder, PhaseResult
from server.runs.guarantee import guarantee_of
from server.runs.phase_config import load_phases
from server.runs.phase_plan import plan_noise
from simulations.benchmarks.papers.atdp import chains
from simulations.benchmarks.papers.atdp.chains import NULL, ORDER, comparison
from simulations.cli.app import app
from simulations.engines import launcher
from simulations.engines.inprocess import run_inprocess
from simulations.presets.load import PRESETS, find
from simulations.report.notation import percent_text
from simulations.report.read_run import read_run
from tests.runs.test_report import Page

SMALL = """
name = "small"
[privacy]
epsilon = 8.0
delta = 1e-3
[model]
name = "random:llama"
task = "causal-lm"
rank = 2
targets = "q_proj,v_proj"
max-length = 40
[data]
source = "jsonl:texts.jsonl"
partition = "iid"
validation-records = 8
test-records = 8
[[phases]]
kind = "ordinary"
name = "redacted"
text = "redacted"
[[phases]]
kind = "private"
name = "atdp"
text = "weighted"
steps = 2
batch-size = 16
noise-multiplier = 4.0
controller = "rise-reset"
"""


def test_a_run_in_phases_runs_from_its_file_and_says_what_it_is_worth(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"Ann wrote {i} times"}) for i in range(40)))
    (tmp_path / "small.toml").write_text(SMALL)
    ended = CliRunner().invoke(app, ["run", "small.toml", "--set", "seed=1"])
    assert ended.exit_code == 0, ended.output
    said = " ".join(ended.output.split())
    assert "NOT PRIVATE at record level (epsilon infinite)" in said
    assert "selective-DP (policy regex, detector assumed perfect)" in said
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / STAMP_FILE).is_file()
    assert load_phases(folder / "recipe.toml").run.seed == 1  # all settings, those of the command line too
    assert json.loads((folder / "results.json").read_text())["test_perplexity"] > 1
    # a mistake is said in a line, and nothing is left behind
    wrong = CliRunner().invoke(app, ["run", "small.toml", "--set", "privacy.epsilon=0.001"])
    assert wrong.exit_code == 2
    refused = CliRunner().invoke(app, ["run", "small.toml", "--set", "privacy.delta=0.5"])
    assert refused.exit_code == 2
    assert "delta must be < 1/population" in refused.output
    assert "selective-DP" not in refused.output  # nothing is promised first
    assert "Traceback" not in refused.output
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a child process."""

    def run_child(config: RunConfig, folder: Path, *, keys: Any = None, **_: Any) -> None:
        (folder / CONFIG_FILE).write_text(config.to_toml())
        run_inprocess(config, folder, keys=keys)

    monkeypatch.setattr(launcher, "run_child", run_child)


REDACTED, ATDP = (f"[[phases]]{phase}" for phase in SMALL.split("[[phases]]")[1:])


@pytest.mark.parametrize("kind", ["record", "selective", "none"])
@pytest.mark.usefixtures("in_this_process")
def test_the_report_of_a_run_in_phases_says_what_it_did_and_guarantees(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"Ann wrote {i} times"}) for i in range(40)))
    first = {"record": "", "selective": REDACTED, "none": REDACTED.replace('text = "redacted"', 'text = "original"')}
    (tmp_path / "small.toml").write_text(SMALL.split("[[phases]]")[0] + first[kind] + ATDP)
    ended = CliRunner().invoke(app, ["run", "small.toml"])
    assert ended.exit_code == 0, ended.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run folder: runs/{folder.name}; report.html" in ended.output
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["sentence"] in page.text
    assert "Completed" in page.text
    for wrong in ("Damaged", "unknown", "no readable ledger", "nothing to draw"):
        assert wrong not in page.text
    phases = 1 if kind == "record" else 2
    assert f"Phases {phases} of {phases}" in page.text
    assert re.search(r"Phase atdp with noise, weighted texts: \d+ s, validation loss \d", page.text)
    assert 'load_base("random:llama", "causal-lm")' in page.text
    alerts = [attributes["class"] for _, attributes in page.elements if attributes.get("role") == "alert"]
    assert alerts == ([] if kind == "record" else ["banner bad"])
    tile = {
        "record": "Privacy ε ≤",
        "selective": "Privacy none at record level; selective-DP: ε ≤ ",
        "none": "none no g",
    }
    assert tile[kind] in page.text
    assert ("no guarantee of any kind" in page.text) == (kind == "none")
    # a ledger that is not the one of the statement is still noticed
    statement["ledger"]["ledger"]["head"] = "3:" + "0" * 64
    (folder / "privacy.json").write_text(json.dumps(statement))
    (folder / "files.sha256").unlink()  # and whoever takes the digests away as well
    with pytest.raises(CorruptRun, match=r"was not made from ledger\.jsonl as it is now"):
        read_run(folder)
    (folder / "phases" / "1" / "done.safetensors").write_text("damaged")
    with pytest.raises(CorruptRun, match=r"1/done\.safetensors is not of this run"):
        read_run(folder)


@pytest.mark.usefixtures("in_this_process")
def test_the_report_of_a_classifier_shows_its_accuracy_and_the_names_of_its_classes(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"text": f"Ann wrote {i}", "label": ("loan", "card")[i % 2]} for i in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = SMALL.split("[[phases]]")[0].replace("llama", "bert").replace("causal-lm", "classification")
    table = table.replace("q_proj,v_proj", "query,value")
    (tmp_path / "small.toml").write_text(table + ATDP.replace("weighted", "original"))
    ended = CliRunner().invoke(app, ["run", "small.toml", "--quiet"])
    assert ended.exit_code == 0, ended.output
    folder = Path(ended.output.strip())
    results = json.loads((folder / "results.json").read_text())
    assert results["label_names"] == ["card", "loan"]
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert f"Test accuracy {percent_text(results['test_accuracy'])}".replace("\xa0", " ") in page.text
    assert "labels = ['card', 'loan']" in page.text


@pytest.mark.usefixtures("in_this_process")
def test_a_run_in_phases_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"Ann wrote {i} times"}) for i in range(40)))
    (tmp_path / "small.toml").write_text(SMALL)
    finish = PhaseFolder.finish

    def interrupted(place: PhaseFolder, result: PhaseResult) -> None:
        if result.name == "atdp":
            raise KeyboardInterrupt
        finish(place, result)

    with monkeypatch.context() as patch:
        patch.setattr(PhaseFolder, "finish", interrupted)
        ended = CliRunner().invoke(app, ["run", "small.toml"])
    assert ended.exit_code == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"lacquer resume {folder}" in ended.output.replace("\n", "")
    half = Page((folder / "report.html").read_text(encoding="utf-8")).text
    assert "Failed. It did 1 of 2 phases" in half
    assert re.search(r"Phase redacted without noise, redacted texts: \d+ s, validation loss \d", half)
    assert "Phase atdp with noise, weighted texts: not ended" in half
    assert "NOT PRIVATE" in half
    started = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(started.replace("steps = 2", "steps = 3"))
    refused = CliRunner().invoke(app, ["resume", str(folder)])
    assert (refused.exit_code, f"{folder / 'recipe.toml'} is not as the run has written it" in refused.output) == (
        2,
        True,
    )
    (folder / "recipe.toml").write_text(started)
    ended = CliRunner().invoke(app, ["resume", str(folder)])
    assert ended.exit_code == 0, ended.output
    whole = Page((folder / "report.html").read_text(encoding="utf-8")).text
    assert "Completed" in whole
    assert "Resumed." in whole
    results = json.loads((folder / "results.json").read_text())
    assert [(resumed["round"], resumed["lost"]) for resumed in results["resumed"]] == [(2, 0)]
    again = CliRunner().invoke(app, ["resume", str(folder)])
    assert (again.exit_code, "has ended" in again.output) == (2, True)


def test_the_phases_that_come_with_lacquer_guarantee_what_their_comments_say() -> None:
    kinds = {}
    for file in sorted((PRESETS / "phases").glob("*.toml")):
        config = load_phases(file, {})
        given = [phase for phase in config.private_phases if phase.noise_multiplier]
        assert len(given) == len(config.private_phases) - 1
        kinds[file.stem] = "record" if not config.non_private_phases else "selective"
        assert ("Selective DP only" in file.read_text()) == (kinds[file.stem] == "selective")
    assert kinds == {"dp-atdp": "record", "atdp": "selective"}
    with pytest.raises(ConfigError, match="atdp"):
        find("jft")


@pytest.mark.parametrize("preset", ["atdp-small", "atdp-paper"])
def test_the_presets_of_the_comparison_hold_the_phases_of_its_rows(preset: str) -> None:
    config = load_phases(chains.HERE / f"{preset}.toml", {})
    assert {phase.name for phase in config.phases} == {name for chain in chains.CHAINS for name in chain}
    assert {row for rows in chains.CHAINS.values() for row in rows if row} | {"base model"} == set(ORDER)
    assert config.run.data.canaries >= 100
    phases = {phase.name: phase for phase in config.phases}
    # the noise keeps the limit that the preset states in every chain: units of the part it names and of the secrets
    population = {"atdp-small": 300 + 128 * 2, "atdp-paper": 15_261 - 500 + 128 * 10}[preset]
    for chain in chains.CHAINS:
        chained = replace(config, phases=tuple(phases[name] for name in chain))
        assert (guarantee_of(chained, plan_noise(chained, population)).kind == "record") == (chain[0] == "private")
    private = replace(config, phases=(phases["private"], phases["atdp"]))
    if preset == "atdp-small":  # also among few records
        few = replace(private, run=config.run.replace(privacy=config.run.privacy.replace(delta=1e-4)))
        assert guarantee_of(few, plan_noise(few, 400)).kind == "record"
    else:  # and not in the part of the small one
        with pytest.raises(ValueError, match=r"more than 3\.5"):
            plan_noise(private, 4_886 - 500 + 128 * 10)


@pytest.mark.parametrize(("preset", "part"), [("atdp-small", "held-back"), ("atdp-paper", "train")])
def test_the_comparison_reads_the_part_that_its_preset_names(
    preset: str, part: str, tmp_path: Path, monkeypatch
) -> None:
    seen = []
    monkeypatch.setattr(chains, "cell_rows", lambda config, *_: seen.append(config.run.data) or [])

    def run(*arguments: str) -> None:
        command = typer.Typer()
        command.command()(chains.main)
        ended = CliRunner().invoke(
            command, [str(chains.HERE / f"{preset}.toml"), "--data", str(tmp_path), *arguments, "--seeds", "1",
                      "--detector", "found", "--kind", "six-digit", "--out", str(tmp_path / "rows.json")]
        )  # fmt: skip
        assert ended.exit_code == 0, ended.output

    run()
    assert seen[-1].source == f"wikitext2:{tmp_path}@{part}"
    assert seen[-1].test_source == f"wikitext2:{tmp_path}@validation"
    assert seen[-1].canary_kind == "six-digit"
    run("--set", "data.source=wikitext2:elsewhere@test")
    assert seen[-1].source.endswith("elsewhere@test")
    assert [chains.placed(source, tmp_path, "test") for source in ("wikitext2:a", "notes", "jsonl:a@b")] == [
        f"wikitext2:{tmp_path}@test"
    ] * 3


def test_the_table_says_of_every_row_what_it_guarantees() -> None:
    common = {
        "preset": "p", "kind": "id-record", "detector": "missed", "seed": 0, "delta": 1e-5, "population": 900,
        "canaries": 128, "copies": 4, "model": "m", "dimension": 100, "test_tokens": 5000, "exposure_cap": 11.0,
        "exposure": 2.0, "exposure_low": 1.5, "exposure_high": 2.5, "cpu_seconds": 30.0, "perplexity": 50.0,
        "selective_epsilon": None, "noise_epsilon": 0.0,
    }  # fmt: skip
    rows = [
        {**common, "row": "no DP", "guarantee": "none", "record_epsilon": "infinite"},
        {**common, "row": "JFT", "guarantee": "selective", "record_epsilon": "infinite", "selective_epsilon": 3.0001},
        {**common, "row": "DP-SGD", "guarantee": "record", "record_epsilon": 2.0001},
    ]
    text = comparison({"rows": rows})
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert lines["no DP"].endswith("| none (ε infinite) |")
    assert "record level: none (ε infinite); selective-DP ε 3.01" in lines["JFT"]
    assert "record level: ε 2.01, δ 1e-05" in lines["DP-SGD"]
    assert f"{NULL:.2f} bits" in text
