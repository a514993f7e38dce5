"""The device of a process: a CUDA device or the CPU, and whether a model fits there.

Nothing goes to the CPU in silence: where a GPU is asked for, or seen, and torch cannot use it, that is an error in
words. A GPU hidden by an empty ``CUDA_VISIBLE_DEVICES`` is not seen.
"""

import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DEVICE_FILES = Path("/dev")
"""Where an NVIDIA driver puts a file for each of its devices."""

ACTIVATIONS = 16
"""Values kept for the backward pass per token, layer and unit of width. Measured on a CPU in float32, 512 tokens:
13.7 on SmolLM2, 11.1 on MiniLM. On an H200 in bfloat16, by peak memory of small and large
micro-batches (`engine.gpu`): 13.8 at 1.1 billion parameters, 14.9 at 135 million."""

LEAST_TOKENS = 512
"""In a micro-batch of a GPU whose size is chosen automatically."""


@dataclass(frozen=True)
class Cuda:
    """The facts that a process finds of CUDA.

    Attributes:
        devices: that torch can use.
        reason: why there are none.
        present: what tells of a GPU on this host, whether torch can use it or not.
    """

    devices: int
    reason: str = ""
    present: str = ""


def find_cuda() -> Cuda:
    """Find the CUDA devices of this process."""
    import torch  # slow to import, and launchers read this module

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    device = next((str(path) for path in sorted(DEVICE_FILES.glob("nvidia[0-9]*"))), None)
    present = "" if hidden else device or shutil.which("nvidia-smi") or ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch warns of a driver that is too old
        usable, devices = torch.cuda.is_available(), torch.cuda.device_count()
    if usable and devices:
        return Cuda(devices, present=present)
    return Cuda(0, _reason(torch, hidden, [str(warning.message) for warning in said]), present)


def _reason(torch: Any, hidden: bool, said: list[str]) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if hidden:
        return f"{built}, and CUDA_VISIBLE_DEVICES hides every device"
    if said:
        return f"{built}; {'; '.join(said)}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{built}; {error}"
    return f"{built}, and finds {torch.cuda.device_count()} devices"


def choose_device(asked: str, found: Cuda | None = None) -> str:
    """``"cuda"`` or ``"cpu"`` for ``engine.device``.

    Args:
        found: None looks for it, unless the CPU is asked for.

    Raises:
        ValueError: a GPU is asked for, or there is one and nothing is said, and torch cannot use it; with the reason.
    """
    if asked == "cpu":
        return "cpu"
    found = find_cuda() if found is None else found
    if found.devices:
        return "cuda"
    if asked == "cuda":
        raise ValueError(
            f"engine.device = 'cuda': there is no CUDA device that torch can use here: {found.reason}; "
            "set engine.device = 'cpu' to train on the CPU"
        )
    if found.present:
        raise ValueError(
            f"engine.device = 'auto': this host has an NVIDIA GPU ({found.present}) that torch cannot use: "
            f"{found.reason}; install a torch that fits its driver, or set engine.device = 'cpu' to train on the CPU"
        )
    return "cpu"


def weight_bytes(model: "nn.Module", quantisation: str) -> int:
    """Bytes of the weights of a model, the Linear layers of its blocks quantised as asked. It may be on no device."""
    from client.models.frozen.quantised import block_linears, stored_bytes

    blocks = {id(module.weight) for module in block_linears(model).values()}
    return sum(
        stored_bytes(values.numel(), quantisation)
        if quantisation != "none" and id(values) in blocks
        else values.numel() * values.element_size()
        for values in model.parameters()
    )


def activation_bytes(model: "nn.Module", tokens: int, *, value: int = 4, checkpoint_blocks: bool = False) -> int:
    """Bytes that a step of so many tokens keeps for its backward pass, about; `value` is those of one number."""
    config: Any = model.config
    text = config.get_text_config()
    layers = int(text.num_hidden_layers)
    values = layers + ACTIVATIONS if checkpoint_blocks else layers * ACTIVATIONS
    return tokens * int(text.hidden_size) * values * value


def refuse_too_large(weights: int, activations: int, free: int, tokens: int) -> None:
    """Raise ValueError, with what it would need, where weights and a step of so many tokens do not fit into `free`
    bytes.
    """
    if weights + activations <= free:
        return
    raise ValueError(
        f"the model does not fit the GPU: it needs about {_gib(weights + activations)} ({_gib(weights)} for weights, "
        f"{_gib(activations)} for a step of {tokens} tokens), and {_gib(free)} are free; set "
        "engine.precision = 'bf16-model', engine.quantisation = 'int8' or 'nf4', engine.checkpoint-blocks = true, or a "
        "smaller engine.token-budget and model.max-length, or take a smaller model"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
