"""`lacquer deploy` believes neither Flower nor the ServerApp alone, and stops what it has started."""

import contextlib
import json
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.config.load import parse
from server.network.operator_key import VARIABLE
from server.run_folder.names import write_config
from server.run_folder.progress import hold_folder
from server.run_folder.telemetry import Telemetry, read_status
from simulations import preflight
from simulations.cli.app import app
from simulations.cli.federation import clients, deploy, following
from simulations.cli.federation.control import CONNECTION, Control
from simulations.engines.flower import RunFailed
from simulations.engines.staging import PACKAGE
from simulations.tools.sample_records import write_records

RUNNER = CliRunner()
CONFIG = parse({"clients": 3, "sampling-rate": 1.0, "privacy": {"delta": 1e-2}, "data": {"held-by": "nodes"}})


class SuperLink:
    """Answers as a SuperLink whose run ends with the second question. ``said`` comes before that."""

    def __init__(
        self, home: Path, *, end: str = "finished:completed", broken: bool = False, said: tuple[str, ...] = ("running",)
    ) -> None:
        self.home, self.end, self.broken, self.said = home, end, broken, list(said)
        self.asked, self.stopped, self.app = 0, [], Path()
        self.runs: dict[str, str] = {}
        self.logs: list[tuple[str, bool]] = []

    def start(self, app: Path) -> str:
        self.app = app
        return "17"

    def status(self, run: str) -> tuple[str, str]:
        self.asked += 1
        if self.broken:
            raise KeyboardInterrupt
        if self.said and self.said[0] == "no answer":
            self.said.pop(0)
            raise RunFailed("HTTP 500")
        return (self.said.pop(0), "") if self.said else (self.end, "what Flower says")

    def known(self, run: str) -> str | None:
        return self.runs.get(run)

    def stop(self, run: str) -> None:
        self.stopped.append(run)

    def show_log(self, run: str, *, as_it_comes: bool) -> None:
        self.logs.append((run, as_it_comes))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = following._asking
    monkeypatch.setattr(
        following, "_asking", lambda *given, **more: asking(*given, every=0.0, taken_within=0.0, **more)
    )


def follow(tmp_path: Path, superlink: Any, state: str | None) -> None:
    if state is not None:
        with Telemetry(tmp_path, tensorboard=False) as telemetry:
            telemetry.status(state, "what the ServerApp says")
    run = following.hand_over(superlink, tmp_path, {"resume": "/runs/x"})
    with following.stopped_if_interrupted(superlink, run):
        following.watch(superlink, run, CONFIG, tmp_path, quiet=True)
    following.judge(superlink, run, tmp_path)


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


def test_a_run_that_nobody_takes_is_said_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match="what Flower says"):
        follow(tmp_path, SuperLink(tmp_path / "home", said=("pending", "pending")), None)
    assert capfd.readouterr().err.count("nobody takes it, or the host is too busy. See that flower-superexec") == 1
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.message) == ("preparing", following.NOT_TAKEN)


def test_a_superlink_that_fails_for_a_moment_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("no answer", "running", "no answer", "no answer", "running")
    superlink = SuperLink(tmp_path / "home", said=said)
    with hold_folder(tmp_path):
        follow(tmp_path, superlink, "completed")
    assert superlink.stopped == []
    (tmp_path / "second").mkdir()
    asking = following._asking
    monkeypatch.setattr(following, "_asking", lambda *given: asking(*given, patience=0.0))
    superlink = SuperLink(tmp_path / "home-2", said=said)
    with pytest.raises(RunFailed, match="HTTP 500"):
        follow(tmp_path / "second", superlink, "completed")
    assert superlink.stopped == ["17"]


OWNER = """
import sys, time
from pathlib import Path
from server.run_folder.progress import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_process_that_is_killed_is_said_and_its_run_stopped(
    answers: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Flower sees it after a minute, and refuses to resume the run until then."""
    with Telemetry(tmp_path, tensorboard=False) as telemetry:
        telemetry.status("running", "round 3 of 9")
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"

        class Watched(SuperLink):
            def status(self, run: str) -> tuple[str, str]:
                if self.asked == 2:
                    owner.kill()
                    owner.wait()
                assert self.asked < 4  # Flower's word is not waited for
                return super().status(run)

            def stop(self, run: str) -> None:
                super().stop(run)
                if not answers:
                    raise RunFailed("HTTP 500")

        superlink = Watched(tmp_path / "home", said=("running",) * 9)
        with pytest.raises(RunFailed, match="lacquer deploy --resume"):
            follow(tmp_path, superlink, None)
    assert superlink.stopped == ["17"]
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.message) == ("failed", following.GONE.format(tmp_path))
    assert ("HTTP 500" in capfd.readouterr().err) != answers


def test_a_silent_superlink_is_said_at_once_and_so_is_its_return(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ("running", "no answer", "no answer", "running", "no answer", "running")
    with hold_folder(tmp_path):
        follow(tmp_path, SuperLink(tmp_path / "home", said=said), "completed")
    error = capfd.readouterr().err
    assert error.count("the SuperLink does not answer; it is asked again for 300 s") == 2
    assert error.count(following.SPEAKS) == 2
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "completed"  # what the run has said last is not written over


def test_a_deployed_run_for_a_program_ends_with_one_object(
    record_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record_run()
    following.show_end(folder, quiet=False, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["folder"], said["state"], said["results"]["test_accuracy"]) == (str(folder), "completed", 0.8125)
    assert (folder / "report.html").is_file()


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SuperLink, Path]:
    """A SuperLink, and the folder of a run that it was given."""
    superlink = SuperLink(tmp_path / "home")
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, CONFIG)
    following.hand_over(superlink, folder, {})  # type: ignore[arg-type]
    for module in (following, deploy):
        monkeypatch.setattr(module, "control", lambda address, ca: contextlib.nullcontext(superlink))
    return superlink, folder


@pytest.mark.parametrize(("state", "refused"), [("pending", True), ("running", True), ("finished:failed", False)])
def test_a_folder_whose_run_is_unfinished_is_not_resumed(
    state: str, refused: bool, deployed: tuple[SuperLink, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink, folder = deployed
    superlink.runs["17"], given = state, superlink.app
    monkeypatch.setattr("server.run_folder.resume.check_resumable", lambda folder, other_code: CONFIG)
    superlink.home = folder.parent / "second"
    done = RUNNER.invoke(app, ["deploy", "--resume", str(folder), "-q"])
    if refused:
        assert done.exit_code == 2
        assert f"a run of this folder that is {state}" in done.stderr
        assert f"stop it first (lacquer stop {folder})" in done.stderr
    else:
        assert done.exit_code == 1  # nobody wrote that it has completed
    assert (superlink.app == given) is refused


def test_a_run_is_followed_again_and_left_alone(deployed: tuple[SuperLink, Path]) -> None:
    superlink, folder = deployed
    superlink.broken = True  # Ctrl-C
    left = RUNNER.invoke(app, ["follow", str(folder)])
    assert left.exit_code == 0
    assert f"The run goes on; lacquer stop {folder} ends it." in left.stderr
    assert superlink.stopped == []
    superlink.broken, superlink.end = False, "finished:failed"
    ended = RUNNER.invoke(app, ["follow", str(folder)])
    assert ended.exit_code == 1
    assert "The run failed: what Flower says" in ended.stderr


def test_a_run_is_stopped_and_its_log_is_shown(deployed: tuple[SuperLink, Path]) -> None:
    superlink, folder = deployed
    assert RUNNER.invoke(app, ["stop", str(folder)]).exit_code == 2
    superlink.runs["17"] = "running"
    stopped = RUNNER.invoke(app, ["stop", str(folder)])
    assert stopped.output == f"The run is stopped. Go on with: lacquer deploy --resume {folder}\n"
    assert superlink.stopped == ["17"]
    assert RUNNER.invoke(app, ["logs", str(folder), "--follow"]).exit_code == 0
    assert superlink.logs == [("17", True)]


def test_a_run_that_ends_before_the_order_arrives_needs_no_stop(
    deployed: tuple[SuperLink, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink, folder = deployed

    def stop(run: str) -> None:
        superlink.runs[run] = left
        raise RunFailed("Run ID is already finished")

    monkeypatch.setattr(superlink, "stop", stop)
    superlink.runs["17"], left = "running", "finished:completed"
    ended = RUNNER.invoke(app, ["stop", str(folder)])
    assert (ended.exit_code, "there is nothing to stop" in ended.stderr) == (2, True)
    superlink.runs["17"], left = "running", "running"
    failed = RUNNER.invoke(app, ["stop", str(folder)])  # `control`, which is none here, puts it into words
    assert (failed.exit_code, "RunFailed: Run ID is already finished" in failed.stderr) == (1, True)


def test_only_folders_of_deployed_runs_are_followed(tmp_path: Path) -> None:
    for command in ("follow", "stop", "logs"):
        refused = RUNNER.invoke(app, [command, str(tmp_path)])
        assert refused.exit_code == 2
        assert "is no folder of a run that `lacquer deploy` started" in refused.stderr


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
        (["clients", "--ca", "/proc/self/maps"], "/keys/operator.key: cannot be read; run this in the executor's"),
        (["expel", "foo"], "no client is called foo; see `lacquer clients`"),
        (["certificates", "/proc/foo"], "/proc/foo: cannot keep keys there"),
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
    monkeypatch.setattr(Control, "ask", lambda self, *arguments, **how: answer)
    (tmp_path / "ca.crt").touch()
    (tmp_path / "operator.key").write_bytes(b"key")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "operator.key"))
    refused = RUNNER.invoke(app, ["clients", "--ca", str(tmp_path / "ca.crt")])
    assert refused.exit_code == 1
    assert refused.stderr == "the clients were not listed: Unable to connect\n"
    with pytest.raises(RunFailed, match=r"run 17 .*Unable to connect"):
        Control(tmp_path, "localhost:8000", None).status("17")


def test_flower_s_command_is_asked_again_and_again_and_a_superlink_that_is_silent_is_given_up(tmp_path: Path) -> None:
    """A server that takes connections and says nothing, as a process that is stopped does."""
    with socket.create_server(("127.0.0.1", 0)) as silent, closed_port() as closed:
        with Control(tmp_path / "closed", f"127.0.0.1:{closed}", None).open() as superlink:
            said = [superlink.ask("ls", CONNECTION, "--run-id", "17") for _ in range(2)]
            assert said[0] == said[1]
            assert not said[0]["success"]
        with Control(tmp_path / "silent", f"127.0.0.1:{silent.getsockname()[1]}", None).open() as superlink:
            with pytest.raises(RunFailed, match=r"did not answer in 0\.5 s"):
                superlink.ask("ls", CONNECTION, "--run-id", "17", patience=0.5)
            with pytest.raises(RunFailed, match=r"did not answer in 0\.5 s"):  # by another process
                superlink.ask("ls", CONNECTION, "--run-id", "17", patience=0.5)


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that is taken and does not listen."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


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
    monkeypatch.setattr(clients, "control", lambda address, ca: contextlib.nullcontext(Registry()))
    monkeypatch.setattr(clients, "CLIENT_NAMES", str(tmp_path / "clients.json"))
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
