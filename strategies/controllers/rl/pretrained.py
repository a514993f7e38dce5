"""The policy that ships with the project; ``simulations/benchmarks/rl_pretraining.py`` makes it."""

from functools import cache
from importlib import resources

from safetensors.torch import load

from strategies.controllers.rl.networks import Weights

FILE = "policy.safetensors"


@cache
def _content() -> bytes:
    return (resources.files("strategies.controllers.rl") / FILE).read_bytes()


def pretrained_weights() -> Weights:
    """Weights of actor and critics learnt on synthetic federated problems; a fresh copy."""
    return dict(sorted(load(_content()).items()))  # safetensors gives them in any order
