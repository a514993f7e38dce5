"""The gateway's configuration: exactly Flower's Fleet API, and every header that Flower needs, in the form it has."""

import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as LARGEST_OBJECT
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from typer.testing import CliRunner

from simulations.cli.app import app
from simulations.cli.federation import clients

DOCKER = Path(__file__).parents[2] / "docker"
TEXT = re.sub(r"(?m)^ *#.*$|  # .*$", "", (DOCKER / "gateway.conf").read_text())
LOCATIONS = dict(re.findall(r"location ([^{]+?) \{([^}]*)\}", TEXT))
SIGNED = (FLEET_HTTP_PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER)


def shape(header: str) -> re.Pattern[str]:
    """What the configuration asks of a header."""
    found = re.search(r"map \$http_" + header.replace("-", "_") + r' \$\w+ \{\s*default 0;\s*"~(.+)" 1;', TEXT)
    assert found is not None, header
    return re.compile(found[1])


@pytest.mark.run  # imports the SuperLink, with its database
def test_the_list_is_flowers_whole_fleet_api() -> None:
    from flwr.superlink.routers.fleet.router import router as fleet

    passed = {name.removeprefix("= ") for name, body in LOCATIONS.items() if "proxy_pass" in body}
    assert passed == {route.path for route in fleet.routes}


def test_everything_else_is_not_there() -> None:
    assert LOCATIONS.pop("/").split() == ["return", "404;"]
    assert all(name.startswith("= /v1/fleet/") for name in LOCATIONS)
    assert TEXT.count("location ") == len(LOCATIONS) + 1
    found = re.search(r'map \$request_uri \$plain \{\s*default 0;\s*"~(.+)" 1;', TEXT)
    assert found is not None
    for path in ("?x=1", "/", "//", "%20", "/../control/start-run", "\n"):
        assert re.search(found[1].replace("$", r"\Z"), "/v1/fleet/pull-messages" + path) is None
    assert all(re.search(found[1], name.removeprefix("= ")) for name in LOCATIONS)


def sent_by(key: ec.EllipticCurvePrivateKey) -> httpx.Headers:
    """The headers with which a node of Flower makes a call."""
    request = httpx.Request("POST", "https://gateway/v1/fleet/get-run")
    context = ProtobufRequestContext(rpc_method="", message=None, request=request)  # type: ignore[arg-type]
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(context, lambda context: httpx.Response(200))
    return request.headers


CURVES = pytest.mark.parametrize(
    "curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name
)


@CURVES
def test_what_flower_signs_passes_and_nothing_like_it(curve: ec.EllipticCurve) -> None:
    headers = sent_by(ec.generate_private_key(curve))
    for header in (TIMESTAMP_HEADER, FLEET_HTTP_SIGNATURE_HEADER):
        value = headers[header]
        assert shape(header).search(value), (header, value)
        for wrong in ("", "x", value[:30], value + " ", "-" + value, value * 9):
            assert not shape(header).search(wrong), (header, wrong)


def listed(folder: Path) -> list[str]:
    """What gateway.sh makes nginx's list of keys of."""
    found = re.search(r"(?s)^list\(\) \{.*?^\}\n", (DOCKER / "gateway.sh").read_text(), re.MULTILINE)
    assert found is not None
    command = f"KEYS={folder}; LIST={folder}/list; {found[0]} list; cat $LIST.new"
    return subprocess.run(["sh", "-ec", command], capture_output=True, text=True, check=True).stdout.splitlines()


@CURVES
def test_the_keys_that_were_let_in_are_the_gateways_list(
    curve: ec.EllipticCurve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[bytes, str] = {}

    class SuperLink:
        def register(self, key: Path) -> str | None:
            return None if key.read_bytes() in known else known.setdefault(key.read_bytes(), str(70 + len(known)))

        def unregister(self, node: str) -> None:
            assert node in known.values()

    @contextmanager
    def control(*_: object):  # type: ignore[no-untyped-def]
        yield SuperLink()

    def lacquer(*arguments: str) -> None:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(clients, "control", control)
    monkeypatch.setattr(clients, "ADMITTED", str(tmp_path / "admitted"))
    monkeypatch.setattr(clients, "CLIENT_NAMES", str(tmp_path / "names.json"))
    (tmp_path / "admitted").mkdir()
    keys = {name: ec.generate_private_key(curve) for name in ("clinic", "practice", "renewed")}
    files = {name: tmp_path / name / f"{'clinic' if name == 'renewed' else name}.pub" for name in keys}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_bytes(keys[name].public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    lines = {name: f'"{sent_by(key)[FLEET_HTTP_PUBLIC_KEY_HEADER]}" 1;' for name, key in keys.items()}

    lacquer("admit", str(files["clinic"]), str(files["practice"]))
    assert listed(tmp_path / "admitted") == sorted((lines["clinic"], lines["practice"]))
    (tmp_path / "admitted/70.key").unlink()  # a federation from before there was a list
    lacquer("admit", str(files["clinic"]))
    lacquer("admit", str(files["renewed"]))
    lacquer("expel", "70")
    assert listed(tmp_path / "admitted") == sorted((lines["practice"], lines["renewed"]))
    lacquer("expel", "clinic")
    (tmp_path / "admitted/9.key").write_text('x" 1; }\n# no key\n')
    assert listed(tmp_path / "admitted") == [lines["practice"]]


def test_every_header_that_flower_sends_is_handed_on() -> None:
    versions = [name for name, _ in RuntimeVersionMetadata("flwr", "1.42.0", "SuperNode").as_metadata()]
    handed_on = {name.lower() for name in re.findall(r"proxy_set_header (\S+) \$http_", TEXT)}
    assert handed_on == {"content-type", "accept", *SIGNED, *versions}


def test_flowers_largest_object_passes() -> None:
    found = re.search(r"client_max_body_size (\d+)m;", LOCATIONS["= /v1/fleet/push-object"])
    assert found is not None
    assert LARGEST_OBJECT + 2**20 < int(found[1]) * 2**20 <= 16 * 2**20


def test_the_superlink_is_known_by_its_certificate() -> None:
    for setting in ("proxy_ssl_verify on", "proxy_ssl_trusted_certificate /keys/ca.crt", "proxy_ssl_name superlink"):
        assert f"{setting};" in TEXT
    assert "https://" in TEXT
    assert "http://" not in TEXT
