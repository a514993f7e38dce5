"""How long a preset takes on this machine: the time that was measured for it, by the speed of a training step here.

The step is that of a small transformer in one thread, in processor time, so that what else runs here counts little;
the fastest of some is kept in the cache, for this processor and this torch.
"""

import importlib.metadata
import json
import re
import time
from contextlib import suppress
from typing import Any

from client.settings import cache_folder
from privacy import durable
from server.run_folder.provenance import processor
from simulations.engines.hardware import available_cores

REFERENCE_SECONDS, REFERENCE_CORES = 0.075, 2
"""Of a step on the machine (Intel Xeon, AVX-512) on which the presets were timed, and its cores."""
ONE_CORE = "of one core"
"""In a time that more cores do not shorten."""
_STEPS = 8


def time_here(measured: str) -> str:
    """A time such as "5 to 9 minutes", measured on the machine of the presets, for this machine.

    A text without minutes stays as it is.
    """
    if "minute" not in measured:
        return measured
    factor = step_seconds() / REFERENCE_SECONDS
    if ONE_CORE not in measured:
        factor *= REFERENCE_CORES / available_cores()
    return scaled(measured, factor)


def scaled(text: str, factor: float) -> str:
    """The minutes in a text times `factor`: at least 1, whole, from 10 on in two digits."""

    def number(found: re.Match[str]) -> str:
        minutes = int(found[0]) * factor
        return str(max(1, round(minutes) if minutes < 10 else int(float(f"{minutes:.2g}"))))

    clause, comma, rest = text.partition(",")
    said = re.sub(r"\d+", number, clause)
    said = re.sub(r"\b(\d+) to \1\b", r"about \1", said)
    said = re.sub(r"(\d+) minutes?", lambda found: f"{found[1]} minute{'s' * (found[1] != '1')}", said)
    return said + comma + rest


def step_seconds() -> float:
    """Processor seconds of a training step in one thread; measured once and kept, if there is a place to keep it."""
    here = {"processor": processor(), "torch": importlib.metadata.version("torch")}
    file = cache_folder() / "speed.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not measured yet, or not readable: it is measured
        known = json.loads(file.read_text(encoding="utf-8"))
        if known["of"] == here and known["seconds"] > 0:
            return float(known["seconds"])
    seconds = _measured()
    with suppress(OSError):  # without a place it is measured the next time again
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.write(file, json.dumps({"of": here, "seconds": seconds}))
    return seconds


def _measured() -> float:
    import torch  # a second, which only who has not measured yet pays

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            layer: Any = torch.nn.TransformerEncoderLayer(384, 12, 1536, dropout=0.0, batch_first=True)
            records = torch.randn(10, 64, 384)
        taken = []
        for _ in range(_STEPS):
            begun = time.thread_time()
            layer(records).square().mean().backward()
            taken.append(time.thread_time() - begun)
        return min(taken)
    finally:
        torch.set_num_threads(threads)
