"""Checkpoints: the server's state after a round, written whole or not at all, and the position of the ledger.

    checkpoint/state.safetensors    adapter, served adapter, optimizer tensors (names prefixed ``optimizer.``)
    checkpoint/state.json           round, controller state, ledger head

Nothing is pickled. The folder is made beside the old one and renamed over it, so that a reader finds the old or the new
one. The ledger's head is in it, so that a ledger restored from an older backup is noticed.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from privacy.errors import CorruptRun
from strategies.dp_fedavg import ServerState

FOLDER = "checkpoint"
_OPTIMIZER = "optimizer."


def save_checkpoint(run_folder: Path, state: ServerState, ledger_head: str) -> None:
    """Write the state after a round. A crash at any moment leaves the previous checkpoint or this one."""
    target, draft, old = (run_folder / name for name in (FOLDER, f".{FOLDER}.new", f".{FOLDER}.old"))
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    tensors = {"adapter": state.adapter.contiguous(), "served": state.served.clone().contiguous()}
    tensors |= {_OPTIMIZER + name: value.contiguous() for name, value in state.optimizer.items()}
    if state.basis is not None:
        tensors["basis"] = state.basis.contiguous()
    save_file(tensors, draft / "state.safetensors")
    document = {
        "round": state.round,
        "basis_round": state.basis_round,
        "controller": _plain(state.controller),
        "ledger_head": ledger_head,
    }
    (draft / "state.json").write_text(json.dumps(document, indent=1))
    for path in (*draft.iterdir(), draft):
        _sync(path)
    if target.exists():  # else the only checkpoint may be the old one: a crash fell between the two renames
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    draft.rename(target)
    _sync(run_folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(run_folder: Path, fresh: ServerState) -> tuple[ServerState, str]:
    """The state and the ledger head of the last checkpoint.

    Args:
        run_folder: of the run.
        fresh: a state as at the start of the same run; it gives types and shapes.

    Raises:
        CorruptRun: there is no checkpoint, or it is not of this run.
    """
    folder = next((p for p in (run_folder / FOLDER, run_folder / f".{FOLDER}.old") if p.is_dir()), None)
    if folder is None:
        raise CorruptRun(f"{run_folder} has no checkpoint; the run ended before its first round was done")
    try:
        tensors = load_file(folder / "state.safetensors")
        document = json.loads((folder / "state.json").read_text())
        state = ServerState(
            round=_integer(document["round"]),
            adapter=tensors["adapter"],
            served=tensors["served"],
            optimizer={n.removeprefix(_OPTIMIZER): t for n, t in tensors.items() if n.startswith(_OPTIMIZER)},
            controller=_restored(fresh.controller, document["controller"]),
            basis=tensors.get("basis"),
            basis_round=_integer(document["basis_round"]),
        )
        head = str(document["ledger_head"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptRun(f"{folder} is not a checkpoint of this run: {type(error).__name__}: {error}") from error
    if (found := _shapes(state)) != (expected := _shapes(fresh)):
        raise CorruptRun(f"{folder} is of another run: it holds {found}, this run has {expected}")
    return state, head


def _plain(controller: Any) -> dict[str, Any]:
    """A controller state as JSON: its fields but the setting, which the configuration gives again."""
    return {
        field.name: getattr(controller, field.name)
        for field in dataclasses.fields(controller)
        if field.name != "setting"
    }


def _shapes(state: ServerState) -> dict[str, str]:
    tensors = {"adapter": state.adapter, "served": state.served, **state.optimizer}
    return {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())}


def _restored(fresh: Any, values: dict[str, Any]) -> Any:
    if values.keys() != _plain(fresh).keys():
        raise ValueError(f"the controller's state has {sorted(values)}, this run's has {sorted(_plain(fresh))}")
    typed = {name: tuple(value) if isinstance(getattr(fresh, name), tuple) else value for name, value in values.items()}
    return dataclasses.replace(fresh, **typed)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"round must be an integer, got {value!r}")
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
