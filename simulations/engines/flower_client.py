"""The ClientApp of plain ``flwr run``: :mod:`client.app`, in a simulation on a Ray that nobody else can reach.

Flower loads the ClientApp before it starts Ray, and Ray reads these variables when it starts. ``lacquer run`` sets them
itself (:mod:`simulations.engines.flower`).
"""

import os
import secrets
import sys
from pathlib import Path

import client.app

if Path(sys.argv[0]).name == "flwr-simulation" and "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: a node's address is 127.0.0.1, on Linux too
    }

app = client.app.app
