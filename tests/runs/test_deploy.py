"""`lacquer deploy` believes neither Flower nor the ServerApp alone, and stops what it has started."""

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.config.load import parse
from server.run_folder.telemetry import Telemetry
from simulations import preflight
from simulations.cli.app import app
from simulations.cli.federation import deploy
from simulations.engines.control import Control
from simulations.engines.flower import RunFailed
from simulations.engines.staging import PACKAGE
from simulations.tools.sample_records import write_records

RUNNER = CliRunner()
CONFIG = parse({"clients": 3, "sampling-rate": 1.0, "privacy": {"delta": 1e-2}, "data": {"held-by": "nodes"}})


class SuperLink:
    """Answers as a SuperLink whose run ends with the second question."""

    def __init__(self, home: Path, *, end: str = "finished:completed", broken: bool = False) -> None:
        self.home, self.end, self.broken = home, end, broken
        self.asked, self.stopped, self.app = 0, [], Path()

    def start(self, app: Path) -> str:
        self.app = app
        return "17"

    def status(self, run: str) -> tuple[str, str]:
        self.asked += 1
        if self.broken:
            raise KeyboardInterrupt
        return ("running", "") if self.asked < 2 else (self.end, "what Flower says")

    def stop(self, run: str) -> None:
        self.stopped.append(run)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = deploy._asking
    monkeypatch.setattr(deploy, "_asking", lambda superlink, run: asking(superlink, run, every=0.0))


def follow(tmp_path: Path, superlink: Any, state: str | None) -> None:
    if state is not None:
        with Telemetry(tmp_path, tensorboard=False) as telemetry:
            telemetry.status(state, "what the ServerApp says")
    deploy.follow_deployed(superlink, CONFIG, tmp_path, {"resume": "/runs/x"}, quiet=True)


def test_nothing_of_ours_travels_but_a_wrapper(tmp_path: Path) -> None:
    superlink = SuperLink(tmp_path / "home")
    follow(tmp_path, superlink, "completed")
    assert superlink.stopped == []
    files = sorted(path.relative_to(superlink.app) for path in superlink.app.rglob("*") if path.is_file())
    names = [f"{PACKAGE}/__init__.py", f"{PACKAGE}/client.py", f"{PACKAGE}/server.py", "pyproject.toml"]
    assert [str(file) for file in files] == names
    assert "client.fork_server" in (superlink.app / PACKAGE / "client.py").read_text()
    assert "simulations.engines.ray_actors" not in (superlink.app / PACKAGE / "server.py").read_text()
    keys = tomllib.loads((superlink.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert keys == {
        "config-file": str(tmp_path / "config.toml"),
        "run-folder": str(tmp_path),
        "resume": "/runs/x",
    }


@pytest.mark.parametrize(
    ("end", "state", "says"),
    [
        ("finished:completed", "failed", "what the ServerApp says"),
        ("finished:completed", None, "what Flower says"),
        ("finished:failed", "running", "what Flower says"),
        ("finished:failed", "completed", "what Flower says"),
    ],
)
def test_a_run_has_completed_if_both_say_so(end: str, state: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=says):
        follow(tmp_path, SuperLink(tmp_path / "home", end=end), state)


def test_an_interrupted_command_stops_its_run(tmp_path: Path) -> None:
    superlink = SuperLink(tmp_path / "home", broken=True)
    with pytest.raises(KeyboardInterrupt):
        follow(tmp_path, superlink, None)
    assert superlink.stopped == ["17"]


def test_each_command_refuses_the_others_runs(tmp_path: Path) -> None:
    simulated = RUNNER.invoke(app, ["deploy", "quickstart"])
    assert simulated.exit_code == 2
    assert "use `lacquer run`" in simulated.output
    (tmp_path / "nodes.toml").write_text(CONFIG.to_toml())
    deployed = RUNNER.invoke(app, ["run", str(tmp_path / "nodes.toml")])
    assert deployed.exit_code == 2
    assert "use `lacquer deploy`" in deployed.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["deploy"], 'give a TOML file with data.held-by = "nodes", or --resume FOLDER'),
        (["deploy", "quickstart"], 'give a TOML file with data.held-by = "nodes", or --resume FOLDER'),
        (["deploy", "nodes.toml", "--ca", "gone.crt"], "--ca gone.crt: there is no such file"),
        (["clients", "--ca", "gone.crt"], "--ca gone.crt: there is no such file"),
        (["expel", "foo"], "no client is called foo; see `lacquer clients`"),
        (["keys", "/proc/foo"], "/proc/foo: cannot keep keys there"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes.toml").write_text(CONFIG.to_toml())
    monkeypatch.setattr(preflight, "check", lambda config: pytest.fail("data would be prepared"))
    refused = RUNNER.invoke(app, arguments)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["nodes.toml"]


def test_a_superlink_that_does_not_answer_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"success": False, "error-message": "Unable to connect"}
    monkeypatch.setattr(Control, "ask", lambda self, *arguments: answer)
    (tmp_path / "ca.crt").touch()
    refused = RUNNER.invoke(app, ["clients", "--ca", str(tmp_path / "ca.crt")])
    assert refused.exit_code == 1
    assert refused.stderr == "the clients were not listed: Unable to connect\n"
    with pytest.raises(RunFailed, match=r"run 17 .*Unable to connect"):
        Control(tmp_path, "localhost:8000", None).status("17")


def test_clients_keep_the_names_of_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, str] = {}

    class Registry:
        def register(self, key: Path) -> str | None:
            if key.read_text() in known:
                return None
            known[key.read_text()] = str(len(known) + 70)
            return known[key.read_text()]

        def nodes(self) -> list[dict[str, str]]:
            return [{"node-id": node, "status": "online"} for node in known.values()]

        def unregister(self, node: str) -> None:
            assert node in known.values()
            gone.append(node)

    gone: list[str] = []
    monkeypatch.setattr(deploy, "control", lambda address, ca: contextlib.nullcontext(Registry()))
    monkeypatch.setattr(deploy, "CLIENT_NAMES", str(tmp_path / "clients.json"))
    for name in ("clinic", "ward"):
        (tmp_path / f"{name}.pub").write_text(f"the key of {name}")
    keys = [str(path) for path in sorted(tmp_path.glob("*.pub"))]
    assert RUNNER.invoke(app, ["admit", *keys]).output.splitlines() == [
        "clinic: let in as node 70",
        "ward: let in as node 71",
    ]
    (tmp_path / "ward.pub").write_text("another key of ward")
    assert RUNNER.invoke(app, ["expel", "ward"]).exit_code == 0
    assert RUNNER.invoke(app, ["admit", *keys]).output.splitlines() == [
        "clinic: was let in before",
        "ward: let in as node 72",
    ]
    assert [line.split() for line in RUNNER.invoke(app, ["clients"]).output.splitlines()] == [
        ["70", "online", "clinic"],
        ["71", "online", "ward"],
        ["72", "online", "ward"],
    ]
    RUNNER.invoke(app, ["expel", "ward"])
    RUNNER.invoke(app, ["expel", "70"])
    assert gone == ["71", "72", "70"]


def test_sample_clients_share_no_patient(tmp_path: Path) -> None:
    patients, labels = [], set()
    for path in write_records(tmp_path, 3, 30):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == 30
        patients.append({row["patient"] for row in rows})
        labels |= {row["label"] for row in rows}
    assert len(set.union(*patients)) == sum(map(len, patients))
    assert labels == {"routine", "urgent"}
