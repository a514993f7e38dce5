"""The command: refusals before anything starts, exit codes, what is said. Whole runs: tests/end_to_end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib

import psutil
import pytest
from typer.testing import CliRunner

from privacy.commitment import Commitment, FloorStep
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from server.config.load import ConfigError, parse
from server.run_folder.names import LAUNCH_LOCK, new_run_folder
from server.run_folder.origin import write_origin
from server.run_folder.progress import hold_folder
from server.run_folder.telemetry import Telemetry, read_status
from server.runs.commitment import round_sampling
from simulations import preflight
from simulations.cli.app import app
from simulations.cli.plan import earlier_runs
from simulations.engines import launcher
from simulations.engines.flower import RunFailed
from simulations.report.notation import epsilon_text

runner = CliRunner()
special = []  # further keys that the last engine was given for each of its runs

SMALL = """
clients = 60
sampling-rate = 0.2
[privacy]
delta = 1e-3
[model]
name = "random:bert"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def checked(monkeypatch):
    """What reached the checks; they pass."""
    configs = []

    def check(config):
        configs.append(config)
        return preflight.Checked(config)

    monkeypatch.setattr(preflight, "check", check)
    return configs


def engine(monkeypatch, behaviour):
    """Replaces both engines by a function of the run folder."""
    calls = []
    special.clear()

    def run(name):
        def launch(config, folder, *, follow, plugins, keys, ahead=None):
            calls.append((name, config, plugins))
            special.append(keys)
            behaviour(folder)

        return launch

    monkeypatch.setattr(launcher, "run_flower", run("flower"))
    monkeypatch.setattr(launcher, "run_child", run("inprocess"))
    return calls


def committed(folder):
    """The settings of a run, and a ledger that has charged nothing."""
    config = parse(tomllib.loads(SMALL))
    (folder / "config.toml").write_text(config.to_toml())
    steps = (FloorStep("round", round_sampling(config), 8.0, 3),)
    return Ledger.create(folder / "ledger.jsonl", Commitment("client", "add_remove", 60, 4.0, 1e-3, floor=steps))


def completed(folder):
    begun = (folder / "ledger.jsonl").is_file()
    with Ledger.open(folder / "ledger.jsonl", read_only=True) if begun else committed(folder) as ledger:
        (folder / "privacy.json").write_text(json.dumps(privacy_statement(ledger)))
    (folder / "results.json").write_text("{}")
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status("completed", "done")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quikstart"], "did you mean quickstart"),
        (["small.toml", "--set", "privacy.epsilom=4"], "did you mean privacy.epsilon?"),
        (["small.toml", "--set", "model.targets=foo"], "model.targets = 'foo': "),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(arguments, says, here):
    """One case of each kind: no such preset, no such key, what only the model knows (more: test_preflight.py)."""
    before = psutil.Process().children()
    result = runner.invoke(app, ["run", *arguments, "--set", "data.cache=cache"])
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert {path.name for path in here.iterdir()} <= {"small.toml", "cache"}
    assert psutil.Process().children() == before


def test_a_misspelt_command_is_suggested_once(here):
    assert runner.invoke(app, ["runn"]).stderr.count("Did you mean") == 1


def test_a_run_ends_with_its_folder(here, checked, monkeypatch):
    calls = engine(monkeypatch, completed)
    result = runner.invoke(app, ["run", "small.toml", "--workers", "3", "--set", "name=mine", "--quiet"])
    assert result.exit_code == 0, result.output
    ((name, config, plugins),) = calls
    assert (name, config.engine.workers, config.name, plugins) == ("flower", 3, "mine", here)
    assert checked == [config]
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("mine-")
    assert result.stdout.strip() == str(folder)
    assert (folder / "report.html").is_file()


def test_the_engine_is_chosen(here, checked, monkeypatch):
    calls = engine(monkeypatch, completed)
    assert runner.invoke(app, ["run", "small.toml", "--engine", "inprocess"]).exit_code == 0
    assert calls[0][0] == "inprocess"
    assert runner.invoke(app, ["run", "small.toml", "--engine", "spark"]).exit_code == 2


def test_a_failed_run_exits_with_1_and_its_reason(here, checked, monkeypatch):
    def fail(folder):
        (folder / "config.toml").touch()
        raise RunFailed("the reason [in] brackets")

    engine(monkeypatch, fail)
    result = runner.invoke(app, ["run", "small.toml"])
    assert result.exit_code == 1
    assert "the reason [in] brackets" in result.stderr
    assert str(here / "runs") in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_with_130_and_the_folder_says_so(number, here, checked, monkeypatch):
    engine(monkeypatch, lambda folder: os.kill(os.getpid(), number))
    handler = signal.getsignal(signal.SIGTERM)
    result = runner.invoke(app, ["run", "small.toml"])
    assert result.exit_code == 130
    (folder,) = (here / "runs").iterdir()
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "interrupted")
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.fixture
def broken_off(here):
    """A folder as a run leaves it that was killed in its first round."""
    folder = here / "runs" / "small-1"
    folder.mkdir(parents=True)
    write_origin(folder, parse(tomllib.loads(SMALL)), "digest")
    committed(folder).close()
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status("failed", "interrupted")
    return folder


def test_a_broken_run_is_resumed_in_its_folder_on_any_engine(here, broken_off, monkeypatch):
    told = []
    calls = engine(monkeypatch, lambda folder: told.append(read_status(folder).message) or completed(folder))
    result = runner.invoke(app, ["resume", "runs/small-1", "--engine", "inprocess", "--workers", "2", "--quiet"])
    assert result.exit_code == 0, result.output
    ((name, config, plugins),) = calls
    assert (name, config.engine.workers, plugins) == ("inprocess", 2, here)
    assert special == [{"resume": str(broken_off), "other-code": False}]
    assert told == ["resuming"], "what the run said last is no longer true"
    assert result.stdout.strip() == str(broken_off)
    again = runner.invoke(app, ["resume", "runs/small-1"])
    assert again.exit_code == 2
    assert len(calls) == 1


def test_a_run_that_must_not_go_on_is_refused_in_a_line(here, broken_off, monkeypatch):
    calls = engine(monkeypatch, completed)
    with Ledger.open(broken_off / "ledger.jsonl"):
        result = runner.invoke(app, ["resume", "runs/small-1"])
    assert result.exit_code == 2
    assert "is still running" in result.stderr
    assert "Traceback" not in result.output
    assert runner.invoke(app, ["resume", str(here)]).exit_code == 2
    assert runner.invoke(app, ["resume", "none"]).exit_code == 2
    assert calls == []


def test_a_second_resume_is_refused_before_the_first_has_started_its_process(here, broken_off, monkeypatch):
    second = []

    def resuming(folder):
        second.append(runner.invoke(app, ["resume", "runs/small-1"]))

    calls = engine(monkeypatch, resuming)
    runner.invoke(app, ["resume", "runs/small-1", "--quiet"])
    (refused,) = second
    assert (refused.exit_code, len(refused.stderr.splitlines()), len(calls)) == (2, 1, 1)
    assert "is still running" in refused.stderr


def test_a_failed_run_says_how_to_go_on(here, broken_off, monkeypatch):
    def fail(folder):
        raise RunFailed("the reason")

    engine(monkeypatch, fail)
    result = runner.invoke(app, ["resume", "runs/small-1", "--other-code"])
    assert result.exit_code == 1
    assert f"Resume with: lacquer resume {broken_off}" in result.stderr
    assert special == [{"resume": str(broken_off), "other-code": True}]


@pytest.fixture
def queued(here, broken_off):
    """The folder of a broken run as `lacquer run small.toml` names it."""
    return broken_off.rename(here / "runs" / "run-20260101-000000")


JOB = ["run", "small.toml", "--resume-or-start", "--quiet"]


def test_a_job_of_a_queue_resumes_its_run_and_ends_at_once_when_it_is_done(here, queued, checked, monkeypatch):
    calls = engine(monkeypatch, completed)
    result = runner.invoke(app, [*JOB, "--engine", "inprocess"])
    assert result.exit_code == 0, result.output
    assert (calls[0][0], calls[0][1].engine.kind) == ("inprocess", "inprocess"), "where it trains is this job's"
    assert special == [{"resume": str(queued), "other-code": False}]
    assert f"{queued} is resumed." in result.stderr
    again = runner.invoke(app, JOB)
    assert (again.exit_code, again.stdout.strip(), len(calls)) == (0, str(queued), 1)
    assert "is done already" in again.stderr


def test_a_job_of_a_queue_starts_where_nothing_was_committed_to(here, checked, monkeypatch):
    (here / "runs" / "run-20260101-000000").mkdir(parents=True)
    engine(monkeypatch, completed)
    assert runner.invoke(app, JOB).exit_code == 0
    assert special == [None]
    assert len(list((here / "runs").iterdir())) == 2


def test_a_job_of_a_queue_is_refused_in_a_line_where_it_is_not_clear_which_run_is_its(here, queued, monkeypatch):
    calls = engine(monkeypatch, completed)
    other = runner.invoke(app, [*JOB, "--set", "privacy.epsilon=2"])
    assert f"has other settings: in {queued} privacy.epsilon is 2.0, it was 4.0; put them back" in other.stderr
    shutil.copytree(queued, queued.with_name("run-20260102-000000"))
    two = runner.invoke(app, JOB)
    assert "2 unfinished runs have these settings" in two.stderr
    starting = queued.with_name("run-20260103-000000")
    starting.mkdir()
    with hold_folder(starting, LAUNCH_LOCK):
        third = runner.invoke(app, JOB)
    assert "is about to start" in third.stderr
    for refused in (other, two, third):
        assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert calls == []


def test_presets_are_listed():
    result = runner.invoke(app, ["presets"])
    assert result.exit_code == 0
    assert "quickstart" in result.stdout
    assert "sst2" in result.stdout
    assert "atdp" in result.stdout  # in phases
    assert "controllers" in result.stdout  # a sweep


def test_a_report_of_no_run_is_refused(here):
    result = runner.invoke(app, ["report", str(here)])
    assert result.exit_code == 2
    assert "no run folder" in result.stderr


def test_folders_of_runs_that_start_together_differ(tmp_path):
    config = parse({"output": str(tmp_path / "deep" / "runs"), "name": "twin"})
    folders = {new_run_folder(config) for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() and folder.name.startswith("twin-") for folder in folders)


def test_an_output_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output"):
        new_run_folder(parse({"output": str(tmp_path / "file" / "runs")}))


def test_help_is_quick_to_import():
    """What `lacquer --help` imports must not hold what takes a while: half a second is all it may take."""
    heavy = "('torch', 'ray', 'transformers', 'flwr', 'numpy', 'pyarrow', 'scipy')"
    code = f"import sys, simulations.cli.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_m_simulations_is_the_command():
    done = subprocess.run([sys.executable, "-m", "simulations", "presets"], capture_output=True, text=True, check=True)
    assert "quickstart" in done.stdout


def test_the_version_is_said(here):
    assert runner.invoke(app, ["--version"]).stdout.startswith("lacquer 0.")


def test_a_dry_run_says_what_would_be_run_and_leaves_nothing(here, monkeypatch):
    arguments = ["run", "small.toml", "--set", "data.cache=cache", "--set", "sampling-rate=0.1", "--dry-run"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "sampling-rate = 0.1" in done.stdout
    assert "noise multiplier" in done.stdout
    assert "Only 6 clients are expected in a round" in " ".join(done.stdout.split())
    assert not (here / "runs").exists()
    said = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert said["noise"]["expected_cohort"] == 6
    assert said["data"]["clients"] == 60
    assert said["settings"]["clients"] == 60
    assert said["warnings"][0].startswith("Only 6 clients")


def test_a_run_for_a_program_ends_with_one_object(here, checked, monkeypatch):
    engine(monkeypatch, completed)
    result = runner.invoke(app, ["run", "small.toml", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["state"], said["results"]) == ("completed", {})
    assert said["folder"].startswith(str(here / "runs"))


def test_a_resumed_run_and_a_report_for_a_program_end_with_one_object(here, broken_off, monkeypatch):
    engine(monkeypatch, completed)
    said = json.loads(runner.invoke(app, ["resume", "runs/small-1", "--json"]).stdout)
    assert (said["folder"], said["state"], said["results"]) == (str(broken_off), "completed", {})
    said = json.loads(runner.invoke(app, ["report", "runs/small-1", "--json"]).stdout)
    assert (said["page"], said["state"]) == ("runs/small-1/report.html", "completed")


def test_runs_that_add_to_earlier_ones_are_warned_of(here, tmp_path):
    from tests.cases.recorded_runs import record_run_in

    (tmp_path / "runs" / "sweeps").mkdir(parents=True)
    folder = record_run_in(tmp_path / "runs" / "sweeps")
    (folder / "source.digest").write_text("abc\n")
    config = parse({**tomllib.loads(SMALL), "output": str(tmp_path / "runs"), "data": {"source": "csv:a.csv"}})
    (text,) = earlier_runs(preflight.Checked(config, source="abc"))
    own = json.loads((folder / "privacy.json").read_text())["epsilon"]
    assert text.startswith("This run and 1 earlier run in runs use the same data")
    assert f"epsilon at most {epsilon_text(4.0 + own)} at delta 1.01e-3" in text
    assert earlier_runs(preflight.Checked(config, source="abd")) == []
