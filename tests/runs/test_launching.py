"""What the launcher hands to Flower: the wrapper app, resources, the environment; and what it notices meanwhile.

Whole runs: tests/end_to_end.
"""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from server.config.load import parse
from server.run_folder.telemetry import Telemetry
from simulations.engines import flower, launcher
from simulations.engines.flower import RunFailed, clean_environment, environment, simulation, tail
from simulations.engines.hardware import Resources
from simulations.engines.launcher import RayDaemons, judge
from simulations.engines.processes import TAG, Family
from simulations.engines.staging import PACKAGE, App, packages_root, stage


def staged(tmp_path, app=None, plugins=None):
    return stage(
        tmp_path / "app",
        app or App(),
        config_file=tmp_path / "config.toml",
        run_folder=tmp_path,
        log=tmp_path / "flower.log",
        plugins=plugins or tmp_path / "plugins",
    )


def load_part(folder, part, **environment):
    code = f"import {PACKAGE}.{part} as p; print('app of', p.app)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wrapper_app_is_one_flower_accepts(tmp_path):
    from flwr.cli.config_utils import load_and_validate

    folder = staged(tmp_path)
    config, warnings = load_and_validate(folder / "pyproject.toml")
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["config"] == {
        "config-file": str(tmp_path / "config.toml"),
        "run-folder": str(tmp_path),
    }
    assert config["project"]["dependencies"] == []
    assert tomllib.loads((folder / "pyproject.toml").read_text()) == config


def test_the_wrapper_finds_a_users_modules_and_logs_to_the_run_folder(tmp_path):
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "their_client.py").write_text("import own_method\napp = own_method.NAME\n")
    (plugins / "own_method.py").write_text("NAME = 'their own'\n")
    (plugins / "server.py").write_text("raise ImportError('not ours')\n")
    folder = staged(tmp_path, App("server.config", "their_client"))
    done = load_part(folder, "client")
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "flower.log").read_text() == "app of their own\n"
    done = load_part(folder, "server")
    assert "no attribute 'app'" in (tmp_path / "flower.log").read_text(), "server.config was found, not their server"


def test_the_wrapper_refuses_a_foreign_file_of_the_same_name(tmp_path):
    foreign = tmp_path / "foreign" / "server"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").touch()
    (foreign / "app.py").write_text("app = 'not ours'\n")
    done = load_part(staged(tmp_path, App("server.app")), "server", PYTHONPATH=str(foreign.parent))
    assert done.returncode == 1
    log = (tmp_path / "flower.log").read_text()
    assert "ImportError: server.app was found at" in log
    assert str(packages_root() / "server" / "app.py") in log


def test_looking_at_the_app_does_not_redirect_the_looker(tmp_path):
    """`flwr run` imports the package to check that its components exist, and prints its answer afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGE}; print('heard')"],
        cwd=staged(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "heard\n"


def test_as_many_actors_as_workers_are_asked_for():
    asked = simulation(parse({}), Resources(workers=6, threads=2, gpus=0, gpu_share=0.0))
    assert asked["num_supernodes"] == asked["backend_config"]["init_args"]["num_cpus"] == 6
    assert asked["backend_config"]["client_resources"] == {"num_cpus": 1, "num_gpus": 0.0}


def test_a_gpu_share_is_asked_for_where_there_is_a_gpu():
    asked = simulation(parse({}), Resources(workers=4, threads=2, gpus=2, gpu_share=0.5))["backend_config"]
    assert asked["client_resources"]["num_gpus"] == 0.5
    assert asked["init_args"]["num_gpus"] == 2


def test_one_client_per_node_makes_nodes_not_actors():
    table = {"simulation": {"clients-per-node": 1}, "clients": 300, "privacy": {"delta": 1e-4}}
    asked = simulation(parse(table), Resources(2, 1, 0, 0.0))
    assert (asked["num_supernodes"], asked["backend_config"]["init_args"]["num_cpus"]) == (300, 2)


def test_the_environment_is_pinned(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", "somewhere/shared")
    monkeypatch.setenv("RAY_ADDRESS", "another:6379")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}/absolute")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pinned = environment(tmp_path, "tag", Resources(2, 3, 0, 0.0), preload="client.app")
    assert "RAY_ADDRESS" not in pinned, "a run must not join somebody else's cluster"
    assert pinned["FLWR_HOME"] == str(tmp_path / "home")
    assert pinned["FLWR_TELEMETRY_ENABLED"] == "0"
    assert pinned["OMP_NUM_THREADS"] == "3"
    assert pinned["GOMP_SPINCOUNT"] == "2000", "threads that spin on a busy machine stand in each other's way"
    assert pinned["CUDA_VISIBLE_DEVICES"] == "1"
    assert pinned["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert all(os.path.isabs(entry) for entry in pinned["PYTHONPATH"].split(os.pathsep))
    assert (tmp_path / "ray").is_dir()
    assert pinned["RAY_TMPDIR"] == str(tmp_path / "ray")


def test_an_installed_package_leaves_no_empty_entry_in_the_path(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(flower, "packages_root", lambda: tmp_path / "site-packages")
    pinned = environment(tmp_path, "tag", Resources(2, 1, 0, 0.0))
    assert pinned["PYTHONPATH"] == str(tmp_path / "shadow"), "an empty entry is the current folder"


def test_a_grammar_that_slows_every_process_of_rays_is_left_out(tmp_path):
    """It is installed beside JupyterLab; the caller's own path may hold it too."""
    (tmp_path / "rfc3987_syntax.py").write_text("raise SystemExit('the grammar is built')")
    pinned = environment(tmp_path, "tag", Resources(2, 1, 0, 0.0))
    pinned["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    code = "import ray, sys; assert 'jsonschema' in sys.modules; import rfc3987_syntax"
    done = subprocess.run([sys.executable, "-c", code], env=pinned, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: left out"), done.stderr


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_how_threads_wait_is_the_users_to_say(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    pinned = environment(tmp_path, "tag", Resources(2, 3, 0, 0.0))
    assert pinned[name] == value
    assert pinned.get("GOMP_SPINCOUNT") in (None, "7")


@pytest.mark.parametrize(
    ("completed", "state", "reason"),
    [
        (True, "completed", None),
        (True, "stopped-budget", None),
        (True, "running", "Flower says so"),
        (True, None, "Flower says so"),
        (False, "completed", "Flower says so"),
        (False, "failed", "own words"),
        (True, "failed", "own words"),
    ],
)
def test_a_run_completed_only_if_both_sides_say_so(completed, state, reason, tmp_path):
    log = tmp_path / "flower.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    if state is not None:
        with Telemetry(tmp_path, tensorboard=False) as telemetry:
            telemetry.status(state, "own words")
    if reason is None:
        judge(tmp_path, log, completed=completed, otherwise="Flower says so")
        return
    with pytest.raises(RunFailed) as failure:
        judge(tmp_path, log, completed=completed, otherwise="Flower says so")
    said = str(failure.value)
    assert said.startswith(reason)
    if state == "failed":  # it has said why
        assert said.endswith(f"Its log, with the traceback: {log}")
        assert failure.value.log.endswith("line 99")
    else:
        assert said.endswith("line 99")


def test_a_ray_that_could_not_start_is_said_to_be_just_that(tmp_path):
    log = tmp_path / "flower.log"
    log.write_text("Exception: The current node timed out during startup. This could happen because ...\n")
    with pytest.raises(RunFailed, match="Ray did not start"):
        judge(tmp_path, log, completed=False, otherwise="An error was encountered. Ending simulation.")


def test_the_tail_of_a_log(tmp_path):
    assert "never written" in tail(tmp_path / "none")
    (tmp_path / "log").write_bytes(b"a\nb\n\xff\n")
    assert tail(tmp_path / "log", 2).splitlines() == ["b", "\ufffd"]


def test_a_cluster_that_is_there_is_joined_and_not_sized(tmp_path):
    config = parse({"engine": {"workers": 3, "ray-address": "10.0.0.5:6379"}})
    asked = simulation(config, Resources(3, 4, 2, 0.5, cores=4))
    assert asked["num_supernodes"] == 3
    assert not {"num_cpus", "num_gpus"} & set(asked["backend_config"]["init_args"])
    assert asked["backend_config"]["client_resources"] == {"num_cpus": 4, "num_gpus": 0.5}


def test_a_cluster_is_joined_by_the_callers_token(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/their/token")
    joined = environment(tmp_path, "tag", Resources(3, 1, 0, 0.0), ray_address="10.0.0.5:6379")
    assert joined["RAY_ADDRESS"] == "10.0.0.5:6379"
    assert (joined["RAY_AUTH_MODE"], joined["RAY_AUTH_TOKEN_PATH"]) == ("token", "/their/token")
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in joined


def test_a_ray_of_ones_own_has_a_token_that_only_its_owner_reads(tmp_path):
    own = environment(tmp_path, "tag", Resources(3, 1, 0, 0.0))
    token = Path(own["RAY_AUTH_TOKEN_PATH"])
    assert "RAY_ADDRESS" not in own
    assert own["RAY_AUTH_MODE"] == "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64


def test_a_cluster_is_flowers():
    with pytest.raises(ValueError, match="ray-address"):
        parse({"engine": {"ray-address": "h:1", "kind": "inprocess"}})


def test_a_child_does_not_inherit_a_notebooks_or_a_terminals_ways():
    bent = {"FORCE_COLOR": "1", "COLUMNS": "20", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "LC_ALL": "de_DE"}
    bent |= {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONIOENCODING": "ascii", "LANG": "C"}
    kept = {"HOME": "/home/someone", "HTTPS_PROXY": "http://proxy", "PYTHONHASHSEED": "3", "HF_HOME": "/models"}
    clean = clean_environment(bent | kept)
    assert {key: clean[key] for key in kept} == kept
    assert set(bent) & set(clean) == {"LC_ALL"}
    assert clean["LC_ALL"] == "C.UTF-8"


def test_a_dead_daemon_of_ray_ends_the_run_and_a_driver_that_ends_does_not(tmp_path, monkeypatch):
    """Processes of those names stand for Ray's; on real Ray in tests/end_to_end."""
    monkeypatch.setattr(RayDaemons, "GRACE", 0.0)
    shell = "cp $(command -v sleep) gcs_server; cp gcs_server raylet; ./gcs_server 60 & ./raylet 60 & wait"
    surroundings = {**os.environ, TAG: "stand-ins"}
    driver = subprocess.Popen(["sh", "-c", shell], cwd=tmp_path, env=surroundings, start_new_session=True)
    daemons = RayDaemons(Family("stand-ins"), driver.pid, tmp_path)
    try:
        known = watched(daemons, lambda: len(daemons._known) == 2)
        (raylet,) = [process for process, name in known.items() if name == "raylet"]
        raylet.kill()
        with pytest.raises(RunFailed, match=rf"raylet \(process {raylet.pid}\) ended"):
            watched(daemons, lambda: False)
        logs = tmp_path / "ray" / "ray" / "session_now" / "logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(
            "node_manager.cc:3362: Check failed: Timed out waiting for file metrics_agent_port"
        )
        with pytest.raises(RunFailed, match="too busy or too small; nothing was trained or released; try again"):
            watched(daemons, lambda: False)
        driver.kill()
        driver.wait()
        watched(daemons, lambda: True)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)


@pytest.mark.parametrize(("begun", "starts"), [(False, launcher.STARTS), (True, 1)])
def test_ray_is_started_again_only_before_there_is_a_ledger(begun, starts, tmp_path, monkeypatch):
    tried = []

    def too_slow(*given):
        tried.append(given)
        raise launcher.RayTooSlow("too busy")

    monkeypatch.setattr(launcher, "_run_process", too_slow)
    monkeypatch.setattr(launcher, "PAUSE", 0.0)
    if begun:
        (tmp_path / "ledger.jsonl").touch()
    with pytest.raises(RunFailed, match="too busy"):
        launcher.run_flower(parse({}), tmp_path)
    assert len(tried) == starts
    assert begun or "trying again" in (tmp_path / "status.json").read_text()


def watched(daemons, until):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        daemons._next_look = 0.0
        daemons.check()
        if until():
            return daemons._known
        time.sleep(0.05)
    raise AssertionError("nothing was noticed")
