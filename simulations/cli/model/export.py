"""``lacquer export``: what a run has trained, in a folder that needs no Lacquer, and on the hub if asked."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.run_folder.names import shell_quoted
from simulations.cli.exits import refusals
from simulations.cli.progress import say_working

if TYPE_CHECKING:
    from server.evaluation.exported import Form
    from server.evaluation.finished import FinishedRun

CONVERTER = "convert_hf_to_gguf.py"


def export_command(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or an empty folder.")],
    merged: Annotated[bool, typer.Option("--merged", help="The whole model, with the adapter in its weights.")] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="The whole model, also as a GGUF file, by llama.cpp's converter.")
    ] = False,
    push_to_hub: Annotated[
        str, typer.Option("--push-to-hub", metavar="NAME", help="Upload it as OWNER/NAME; a new one is private.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs: folder, form, GGUF file, address.")] = False,
) -> None:
    """Write what a run has trained as a folder that plain libraries load.

    An adapter stays one unless --merged is given; a classifier becomes a model of sentence-transformers.
    """
    with refusals(ValueError):
        with say_working("writing the model"):
            from server.evaluation.finished import read_finished

            run = read_finished(run_folder)
            refuse_taken(folder)
            converter = find_converter(run) if gguf else None
            with replace_folder(folder) as draft:
                form = export(run, draft, folder.resolve().name, merged=merged or gguf, converter=converter)
        if not as_json:
            typer.echo(folder)
        address = None
        if push_to_hub:
            with say_working("uploading it to the hub"):
                from huggingface_hub import HfApi

                address = push(folder, push_to_hub, HfApi())
            if not as_json:
                typer.echo(address)
    if as_json:
        file = str(folder / f"{folder.resolve().name}.gguf") if converter else None
        typer.echo(json.dumps({"folder": str(folder), "form": form, "gguf": file, "hub": address}, indent=2))


def refuse_taken(folder: Path) -> None:
    """Refuse to write where there is a file, or a folder that holds anything.

    Raises:
        ValueError: naming the place.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder; give a new one: nothing is overwritten")


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Make a draft of `folder` beside it, which takes its place once it is whole; of a failure nothing is left."""
    target = folder.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.{os.getpid()}"
    inside = draft / target.name  # a card names the folder that it lies in
    try:
        inside.mkdir(parents=True)
        yield inside
        if target.is_dir():
            target.rmdir()
        inside.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def export(run: "FinishedRun", folder: Path, name: str, *, merged: bool, converter: Path | None = None) -> "Form":
    """Write a run's model into an empty folder, and say in which form.

    Args:
        name: of the GGUF file, without its ending.
        merged: the whole model; a classifier always is.
        converter: of llama.cpp, see :func:`find_converter`; None makes no GGUF file.

    Raises:
        ValueError: the adapter cannot be merged, or the converter failed.
    """
    from client.models import export as writing
    from server.evaluation.exported import describe

    form: Form = "merged" if merged else "adapter"
    if run.label_names:
        form = "classifier"
    file = f"{name}.gguf" if converter else ""
    if form == "adapter":
        shutil.copytree(run.adapter, folder, dirs_exist_ok=True)
    else:
        labels = len(run.label_names) or None
        model = writing.merged_model(run.config.model.name, run.task, labels, run.adapter)
        if form == "classifier":
            longest = run.config.model.max_length
            writing.write_classifier(model, run.tokenizer(), run.label_names, longest, folder)
        else:
            writing.write_language_model(model, run.tokenizer(), run.task, folder)
            if converter:
                convert(converter, folder, folder / file)
    describe(run, folder, form, file)
    return form


def find_converter(run: "FinishedRun") -> Path:
    """Find llama.cpp's converter: in the folder that ``LLAMA_CPP`` names, or on the path.

    Raises:
        ValueError: it is not there, or the run has trained a classifier.
    """
    if run.label_names:
        raise ValueError("--gguf is for language models; this run has trained a classifier")
    place = os.environ.get("LLAMA_CPP", "")
    found = Path(place) / CONVERTER if place else Path(shutil.which(CONVERTER) or CONVERTER)
    if not found.is_file():
        raise ValueError(
            f"--gguf needs llama.cpp's {CONVERTER}, {f'not in LLAMA_CPP={place}' if place else 'not on PATH'}: "
            "git clone --depth 1 https://github.com/ggml-org/llama.cpp, then set LLAMA_CPP to that folder. "
            "`lacquer export --merged` needs none of it"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("--gguf needs the package gguf: pip install gguf")
    return found


def convert(converter: Path, model: Path, target: Path) -> None:
    """Make a GGUF file by llama.cpp's converter; ValueError with its last line if it fails or leaves no file."""
    command = [sys.executable, str(converter), str(model), "--outfile", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not target.is_file():
        said = ((done.stderr or done.stdout).strip().splitlines() or ["it said nothing"])[-1]
        missing = re.search(r"No module named '([\w.]+)'", said)
        remedy = f"; it has requirements of its own: pip install {missing[1].partition('.')[0]}" if missing else ""
        raise ValueError(f"{converter} failed (exit code {done.returncode}): {said}{remedy}")


def push(folder: Path, name: str, api: Any) -> str:
    """Upload a folder to the hub; returns the address.

    Args:
        api: :class:`huggingface_hub.HfApi`.

    Raises:
        ValueError: the hub is out of reach, knows nobody here, or refuses.
    """
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        api.create_repo(name, exist_ok=True, private=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model and card"))
    except (
        HTTPError,
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{folder} is written, and not uploaded to {name!r}: {reason}. With a connection and a token "
            f"(`hf auth login`): hf upload {name} {shell_quoted(folder)}"
        ) from error
