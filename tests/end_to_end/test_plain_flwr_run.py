"""Plain `flwr run` on the checkout: the app section of pyproject.toml is all Flower needs."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import psutil
import pytest

from privacy.ledger.ledger import Ledger
from simulations.engines.flower import environment
from simulations.engines.hardware import Resources
from simulations.engines.launcher import private_processes
from tests.end_to_end.deployment import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CHECKOUT = Path(__file__).resolve().parents[2]
FLWR = Path(sys.executable).with_name("flwr")
PACKAGES = {"client", "privacy", "server", "simulations", "strategies"}
FEDERATION = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
SETTINGS = """
name = "plain"
rounds = 1
clients = 60
sampling-rate = 0.2
privacy.delta = 1e-3
model.name = "random:bert"
model.rank = 2
model.max-length = 32
data.validation-records = 40
data.test-records = 40
data.records-per-client = 4
"""


@pytest.mark.nightly
@pytest.mark.ray
def test_flwr_run_completes_with_settings_from_a_file(tmp_path):
    """On a SuperLink that was started elsewhere; Flower's own gives up after 15 s, which a busy machine may need."""
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS + f'output = "{tmp_path / "runs"}"\ndata.cache = "{tmp_path / "cache"}"\n')
    with private_processes() as (root, family), (tmp_path / "superlink.log").open("wb") as log:
        surroundings = environment(root, family.tag, Resources(workers=2, threads=1, gpus=0, gpu_share=0.0))
        for name in ("PYTHONPATH", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
            surroundings.pop(name, None)  # a user of Flower's own command has none of these
        port, home = free_port(), Path(surroundings["FLWR_HOME"])
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        superlink = [FLWR.with_name("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
        superlink += ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port)]
        subprocess.Popen(superlink, cwd=root, env=surroundings, stdout=log, stderr=log)
        wait_until_reached(port)
        command = [FLWR, "run", CHECKOUT, "--stream", "-c", settings, "--federation-config", FEDERATION]
        done = subprocess.Popen(
            [str(part) for part in command],
            cwd=tmp_path,
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seen = {}
        while done.poll() is None:
            for process in family.members():
                with contextlib.suppress(psutil.Error):
                    seen |= {port: at.ip for _, port, at in listeners(process)}
            time.sleep(1.0)
        said = done.stdout.read()
    assert (tmp_path / "runs").is_dir(), said
    (folder,) = (tmp_path / "runs").iterdir()
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "completed", said
    assert "<h1" in (folder / "report.html").read_text(encoding="utf-8")
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        assert [event.round for event in ledger.events] == [0, 1]
    assert len(seen) > 4, "Ray's services were seen"
    assert {at.removeprefix("::ffff:") for at in seen.values()} == {"127.0.0.1"}


def listeners(process):
    """Name, port and address of what a process listens on."""
    return [
        (process.name(), found.laddr.port, found.laddr)
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    ]


def wait_until_reached(port):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError("the SuperLink did not start")


def test_the_bundle_holds_what_a_run_and_its_report_need(tmp_path):
    """Built from a copy: Flower refuses a folder with an underscore in its name, which a clone may well have."""
    app = tmp_path / "lacquer"
    for folder in (*PACKAGES, "tests"):
        shutil.copytree(CHECKOUT / folder, app / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / file, app)
    surroundings = {**os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [FLWR, "build", "--app", app], cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (bundle,) = tmp_path.glob("*.fab")
    assert bundle.stat().st_size < 3 * 2**20, "Flower takes 10 MB; more than code would be data that no node needs"
    with zipfile.ZipFile(bundle) as archive:
        names = archive.namelist()
        project = tomllib.loads(archive.read("pyproject.toml").decode())
        archive.extractall(tmp_path / "bundle")
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == PACKAGES
    pins = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").split()
    assert project["tool"]["uv"]["constraint-dependencies"] == pins
    alone = "import simulations.flower_app, simulations.report.templating as report; print(report.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", alone], cwd=tmp_path / "bundle", env={**surroundings, "PYTHONPATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.startswith(str(tmp_path / "bundle"))
    assert not [name for name in names if name.startswith("simulations/benchmarks")]
    assert "client/data/catalog/notes_grammar.toml" in names
    assert not [name for name in names if "test" in name.split("/")[0]]
