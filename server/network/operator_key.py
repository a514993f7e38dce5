"""The operator's key: without it a SuperLink takes no order, whoever reaches its port.

Flower 1.41 serves three interfaces on one port. Only the Fleet API asks who calls; the Control API starts runs, and the
Runtime API hands their work out. ``operator.key`` is the secret by which Flower's own executor proves itself to the
Runtime API (``--superexec-auth-secret-file``); a token that is derived from it does so for the Control API, as the
access token of Flower's own command. SuperLink and executor have it, gateway and clients do not.

    python -m server.network.operator_key

ends with 0 if the SuperLink of this container answers a call that reads its database: the container's health check.
"""

import hashlib
import hmac
import os
import ssl
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

VARIABLE = "LACQUER_OPERATOR_KEY"
USUAL = "/keys/operator.key"


def key_file() -> Path:
    """The path of the operator's key: ``LACQUER_OPERATOR_KEY``, else where the containers have it."""
    return Path(os.environ.get(VARIABLE) or USUAL)


def access_token(key: bytes) -> str:
    """The token by which the Control API knows the operator; the key cannot be told from it."""
    return hmac.new(key, b"lacquer: Flower's Control API", hashlib.sha256).hexdigest()


def operators_only(serve: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap Flower's function that serves a SuperLink, so that it takes calls with the operator's key only.

    Args:
        serve: ``flwr.superlink.cli.flower_superlink._run_superlink_http_api``, which takes the SuperLink's settings.

    The function that is returned ends the process with exit code 2 if no key was given.
    """
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class OperatorOnly(NoOpControlAuthnPlugin):
        def __init__(self, key: bytes) -> None:
            super().__init__()
            self._token = access_token(key).encode()

        def validate_tokens_in_metadata(self, metadata: Any) -> Any:
            shown = str(dict(metadata).get(ACCESS_TOKEN_KEY, "")).encode()
            known = hmac.compare_digest(shown, self._token)
            return super().validate_tokens_in_metadata(metadata) if known else (False, None)

        def refresh_tokens(self, metadata: Any) -> Any:
            return None, None

    def guarded(lifespan_config: Any) -> None:
        key = lifespan_config.superexec_auth_secret
        if key is None:
            sys.stderr.write(
                "--isolation=process --superexec-auth-secret-file=FILE: not given; without them whoever reaches this "
                "port starts runs. Give the operator.key that `lacquer certificates` makes\n"
            )
            sys.exit(2)
        serve(replace(lifespan_config, authn_plugin=OperatorOnly(key)))

    return guarded


def keep_credentials(home: Path, address: str, key: bytes) -> None:
    """Write into ``home``, a ``FLWR_HOME``, the credentials by which a SuperLink knows its operator."""
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    store = FileCredentialStore(home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    store.set(ACCESS_TOKEN_STORE_KEY % address, access_token(key).encode())
    store.set(REFRESH_TOKEN_STORE_KEY % address, b"none")  # Flower's command wants one; nothing takes it


def call_superlink() -> None:
    """Call the SuperLink of this container, with the operator's key.

    Raises:
        urllib.error.URLError: it does not answer as it should.
    """
    key = key_file()
    shown = {"content-type": "application/protobuf", "authorization": f"Bearer {access_token(key.read_bytes())}"}
    asked = urllib.request.Request("https://127.0.0.1:8000/v1/control/list-nodes", b"", shown)
    urllib.request.urlopen(asked, context=ssl.create_default_context(cafile=str(key.with_name("ca.crt"))), timeout=20)


if __name__ == "__main__":
    call_superlink()
