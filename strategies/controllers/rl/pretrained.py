"""The policy that ships with the project; ``simulations/benchmarks/rl_pretraining.py`` makes it.

``policy.json`` holds the bytes of a safetensors file in base64, and its card: Flower's bundles take no binary file,
and a plain ``flwr run`` must find it too.
"""

import base64
import json
from functools import cache
from importlib import resources
from typing import Any

from safetensors.torch import load, save

from strategies.controllers.rl.networks import Weights

FILE = "policy.json"


@cache
def _shipped() -> dict[str, Any]:
    text = (resources.files("strategies.controllers.rl") / FILE).read_text(encoding="utf-8")
    shipped: dict[str, Any] = json.loads(text)
    return shipped


def card() -> dict[str, Any]:
    """Where the shipped policy comes from."""
    return dict(_shipped()["card"])


def pretrained_weights() -> Weights:
    """Weights of actor and critics learnt on synthetic federated problems; a fresh copy."""
    weights = load(base64.b64decode(_shipped()["safetensors"]))
    return dict(sorted(weights.items()))  # safetensors gives them in any order


def document(weights: Weights, card: dict[str, Any]) -> str:
    """The text of ``policy.json``: weights, and in words and numbers where they come from."""
    return json.dumps({"card": card, "safetensors": base64.b64encode(save(weights)).decode()}, indent=1) + "\n"
