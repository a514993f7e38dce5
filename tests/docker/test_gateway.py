"""The gateway's configuration: exactly Flower's Fleet API, and every header that Flower needs, in the form it has."""

import re
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as LARGEST_OBJECT
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

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


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_what_flower_signs_passes_and_nothing_like_it(curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    request = httpx.Request("POST", "https://gateway/v1/fleet/get-run")
    context = ProtobufRequestContext(rpc_method="", message=None, request=request)  # type: ignore[arg-type]
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(context, lambda context: httpx.Response(200))
    for header in SIGNED:
        value = request.headers[header]
        assert shape(header).search(value), (header, value)
        for wrong in ("", "x", value[:30], value + " ", "-" + value, value * 9):
            assert not shape(header).search(wrong), (header, wrong)


def test_every_header_that_flower_sends_is_handed_on() -> None:
    versions = [name for name, _ in RuntimeVersionMetadata("flwr", "1.41.0", "SuperNode").as_metadata()]
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
