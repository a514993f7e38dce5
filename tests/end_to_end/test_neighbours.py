"""A simulation on a host with neighbours: another user of the host, and another machine of the network.

The run has a network namespace of its own, which a second one reaches over a cable, as another machine would. The
attackers are processes without privileges that have Lacquer's own packages, so they speak Ray's and Flower's protocols.
"""

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from privacy.ledger.ledger import Ledger
from tests.end_to_end.lacquer_process import TINY, Lacquer
from tests.end_to_end.test_lacquer_run import OWN_METHOD

PROGRAMS = ("ip", "unshare", "mount", "setpriv")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)), reason="makes network namespaces"),
]

HERE, THERE = "198.51.100.1", "198.51.100.2"  # the ends of the cable; addresses for documentation, used nowhere
NOBODY = 65534

ATTACK = r"""
import json, os, socket, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

host, ports, private = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
assert os.getuid() == 65534
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo", "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/RequestWorkerLease", "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/PushTask", "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ObjectManagerService/FreeObjects", "/ray.rpc.RayletDriver/Init",
)

def connects(port):
    try:
        socket.create_connection((host, port), timeout=5).close()
        return True
    except OSError:
        return False

def calls(port):  # what a caller without the token is told by each service that may listen there
    said = {}
    for token in ("", "0" * 64):
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        with grpc.insecure_channel(f"{host}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
            for method in METHODS:
                try:
                    channel.unary_unary(method)(b"", timeout=5, metadata=metadata)
                    said[method + token] = "OK"
                except grpc.RpcError as error:
                    said[method + token] = error.code().name
    return said

def http(port):
    said = set()
    for path in ("/health", "/", "/get_or_create_runtime_env", "/api/v0/nodes"):
        try:
            with socket.create_connection((host, port), timeout=5) as line:
                line.settimeout(5)
                line.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
                answer = line.recv(64)
            said.add(answer.split()[1].decode() if answer.startswith(b"HTTP/") else "no HTTP")
        except OSError:
            said.add("no HTTP")
    return sorted(said)

def command(*arguments, **further):
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")} | further
    code = f"import sys; sys.argv = {list(arguments)!r}; {STARTS[arguments[0]]}"
    try:
        start = [sys.executable, "-c", code]
        done = subprocess.run(start, env=environment, timeout=120, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return 124, "ray went on trying"
    return done.returncode, (done.stdout + done.stderr)[-300:]

STARTS = {
    "ray": "from ray.scripts.scripts import main; main()",
    "flwr": "from flwr.cli.app import app; app()",
    "driver": "import ray; ray.init(address=sys.argv[1], logging_level='ERROR'); print(ray.nodes())",
}

def readable(folder):
    try:
        return os.listdir(folder)
    except PermissionError:
        return None

reached = [port for port in ports if connects(port)]
found = {"reached": reached, "readable": readable(private)}
if reached:
    with ThreadPoolExecutor(16) as side_by_side:  # most of them answer nothing, and are waited for
        found["calls"] = dict(zip(reached, side_by_side.map(calls, reached)))
        found["http"] = dict(zip(reached, side_by_side.map(http, reached)))
    (head,) = [port for port in reached if found["calls"][port][METHODS[0]] in ("OK", "UNAUTHENTICATED")]
    gcs = f"{host}:{head}"
    home = Path(os.environ["HOME"])
    for port in reached:
        (home / f"flwr-{port}").mkdir()
        (home / f"flwr-{port}" / "config.toml").write_text(
            f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "{host}:{port}"\ninsecure = true\n'
        )
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    commands = {
        "driver": (("driver", gcs), wrong),
        "ray start": (("ray", "start", f"--address={gcs}", "--num-cpus=0", "--disable-usage-stats"), wrong),
    }
    for port in reached[:2]:
        commands[f"flwr {port}"] = (("flwr", "ls", "x", "--format=json"), {"FLWR_HOME": f"{home}/flwr-{port}"})
    with ThreadPoolExecutor(4) as side_by_side:
        done = side_by_side.map(lambda one: command(*one[0], **one[1]), commands.values())
        found["commands"] = dict(zip(commands, done))
print(json.dumps(found))
"""


def run_command(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, a cable between them; nothing else of the host is touched."""
    mark = uuid.uuid4().hex[:6]
    run, other = f"lq-run-{mark}", f"lq-other-{mark}"
    try:
        for name in (run, other):
            run_command("ip", "netns", "add", name)
            run_command("ip", "-n", name, "link", "set", "lo", "up")
        ends = f"v{mark}a", f"v{mark}b"
        run_command("ip", "-n", run, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", other)
        for name, end, address in ((run, ends[0], HERE), (other, ends[1], THERE)):
            run_command("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            run_command("ip", "-n", name, "link", "set", end, "up")
        # As on any host of a network: Ray takes the address of this route for its own, unless it is told otherwise.
        run_command("ip", "-n", run, "route", "add", "default", "via", THERE)
        yield run, other
    finally:
        for name in (run, other):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def listening(process: psutil.Process) -> dict[int, str]:
    """Address of every port that anybody listens on in a process's network namespace, TCP and UDP."""
    found = {}
    for name, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, status = line.split()[:4]
            address, port = local.split(":")
            words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
            if status == state:
                found[int(port, 16)] = str(ipaddress.ip_address(b"".join(words)))
    return found


def attack(namespace: str, host: str, ports: Sequence[int], private: str, folder: Path) -> dict:
    """Run the attack as nobody, with Python and the packages bound to where nobody may read them."""
    for name in ("python", "site", "home"):
        (folder / name).mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp(dir=folder / "home"))
    os.chown(home, NOBODY, NOBODY)
    (folder / "attack.py").write_text(ATTACK)
    python = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
    script = (
        f"mount --bind {sys.base_prefix} {folder}/python && "
        f"mount --bind {sysconfig.get_path('purelib')} {folder}/site && "
        f"cd {home} && exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups env -i HOME={home} "
        f"PATH=/usr/bin:/bin PYTHONPATH={folder}/site LD_LIBRARY_PATH={folder}/python/lib "
        f"timeout 900 {folder}/python/{python} {folder}/attack.py "
        f"{host} '{json.dumps(list(ports))}' {private}"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, "unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_is_out_of_reach_of_other_users_and_of_the_network(namespaces: tuple[str, str], tmp_path: Path) -> None:
    ours, theirs = namespaces
    outside = Path(tempfile.mkdtemp(dir="/tmp"))
    outside.chmod(0o755)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "own.py").write_text(OWN_METHOD.format(folder=tmp_path))
    (tmp_path / "hold").touch()
    run = Lacquer(
        tmp_path, "tiny.toml", "--set", "strategy.optimizer=own:Mine", "--quiet", under=("ip", "netns", "exec", ours)
    )
    try:
        run.wait_for_round(0)
        driver, processes = run.server(), run.living()
        private = next(part for part in driver.cmdline() if part.startswith("/tmp/lq-"))
        ports = listening(driver)
        open_to_all = {port: at for port, at in ports.items() if not loopback(at)}
        assert open_to_all == {}
        assert len(ports) >= 4, "Ray's services were found"

        assert attack(theirs, HERE, list(ports), private, outside)["reached"] == []
        seen = attack(ours, "127.0.0.1", list(ports), private, outside)
        assert len(seen["reached"]) >= 4, "a neighbour reaches what listens on the host's loopback interface"
        assert seen["readable"] is None, "the run's private folder"
        for port, said in seen["calls"].items():
            if set(said.values()) == {"UNAVAILABLE"}:  # no gRPC
                assert seen["http"][port] == ["401"]
            else:
                assert set(said.values()) == {"UNAUTHENTICATED", "UNIMPLEMENTED"}, (port, said)
                assert seen["http"][port] == ["no HTTP"]
        for name, (code, said) in seen["commands"].items():
            refused = '"success": false' in said if name.startswith("flwr") else code != 0 and "ray" in said
            assert refused, (name, code, said)

        secrets = [path.read_text().strip() for path in (Path(private) / "ray").glob("token")]
        assert secrets
        shown = [Path(f"/proc/{process.pid}/cmdline").read_bytes().decode() for process in processes]
        assert not [line for line in shown for secret in secrets if secret in line]
        (tmp_path / "hold").unlink()
        assert run.finish() == 0, run.stderr()
    finally:
        run.end()
        shutil.rmtree(outside, ignore_errors=True)
    with Ledger.open(run.run_folder / "ledger.jsonl", read_only=True) as ledger:
        assert [event.round for event in ledger.events] == [0, 1, 2]


def loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
