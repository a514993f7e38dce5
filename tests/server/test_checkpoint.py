"""A checkpoint comes back bit for bit, a crash leaves the old one or the new one, and what is none is refused."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from privacy.errors import CorruptRun
from privacy.events import Poisson
from privacy.rng import torch_generator
from server import checkpoint
from server.checkpoint import load_checkpoint, save_checkpoint
from strategies.controller import PublicSignals, Setting
from strategies.controllers.dp_lac import DpLac, LacState
from strategies.controllers.fixed import Fixed
from strategies.dp_fedavg import ServerState

SETTING = Setting(3, ((5, 3),), Poisson(0.1, 100), (1.25,) * 3)
HEAD = "12:abcdef"


def fresh(controller: Any = None) -> ServerState:
    controller = controller or DpLac()
    state = controller.init(SETTING, PublicSignals(0, 0.7))
    return ServerState(-1, torch.zeros(11), torch.zeros(11), {"momentum": torch.zeros(8)}, state)


def state_after(round: int) -> ServerState:
    """A state whose every number is unlike the one it starts with, odd floats included."""
    generator = torch_generator(round, "state")
    adapter = torch.randn(11, generator=generator)
    adapter[:4] = torch.tensor([math.nan, -0.0, 1e-45, math.inf])
    lac = LacState(SETTING, 1 / 3 / round, 0.1 + 0.2, math.nan, 5e-324)
    served = torch.randn(11, generator=generator)
    return ServerState(round, adapter, served, {"momentum": torch.randn(8, generator=generator)}, lac)


def same(one: ServerState, other: ServerState) -> bool:
    def bits(state: ServerState) -> Any:
        tensors = {"adapter": state.adapter, "served": state.served, **state.optimizer}
        return state.round, repr(state.controller), {n: t.view(torch.int32).tolist() for n, t in tensors.items()}

    return bool(bits(one) == bits(other))


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        save_checkpoint(tmp_path, state_after(round), HEAD + str(round))
        loaded, head = load_checkpoint(tmp_path, fresh())
        assert same(loaded, state_after(round))
        assert head == HEAD + str(round)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_an_adapter_that_is_served_as_it_is_is_kept_once_each(tmp_path: Path) -> None:
    adapter = torch.arange(11.0)
    state = replace(fresh(), adapter=adapter, served=adapter)
    save_checkpoint(tmp_path, state, HEAD)
    loaded, _ = load_checkpoint(tmp_path, fresh())
    assert torch.equal(loaded.served, adapter)
    assert loaded.served.data_ptr() != loaded.adapter.data_ptr()


def test_a_controller_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    for controller in (DpLac(clip_norm=2.0), DpLac(clip_norm=2.0, smooth=True), Fixed(0.3)):
        state = controller.init(SETTING, PublicSignals(0, 0.7))  # type: ignore[attr-defined]
        losses = [0.6, 0.65, 0.5, 0.41]
        for round, loss in enumerate(losses, start=1):
            state = controller.update(state, None, PublicSignals(round, loss))  # type: ignore[attr-defined]
            save_checkpoint(tmp_path, replace(fresh(controller), round=round, controller=state), HEAD)
            loaded, _ = load_checkpoint(tmp_path, fresh(controller))
            assert loaded.controller == state
            assert controller.plan(loaded.controller, round + 1 if round < 3 else 3) == controller.plan(
                state, round + 1 if round < 3 else 3
            )
            state = loaded.controller


@dataclass(frozen=True)
class Remembering:
    """A controller's state with a tuple in it."""

    setting: Setting
    losses: tuple[float, ...]


def test_tuples_come_back_as_tuples(tmp_path: Path) -> None:
    state = replace(fresh(), controller=Remembering(SETTING, (0.1, 0.2)))
    save_checkpoint(tmp_path, state, HEAD)
    loaded, _ = load_checkpoint(tmp_path, replace(fresh(), controller=Remembering(SETTING, ())))
    assert loaded.controller == Remembering(SETTING, (0.1, 0.2))


# --- crashes ------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """What kill -9 would do, at a place of our choice."""


STEPS = ["shutil.rmtree", "Path.mkdir", "save_file", "Path.write_text", "_sync", "Path.rename"]


@pytest.mark.parametrize("before_that", ["nothing", "crash between the renames", "crash after them"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_leaves_the_old_checkpoint_or_the_new_one(
    step: str, when: str, before_that: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of every step, in a folder that itself may be what an earlier crash left behind."""
    old, new = state_after(1), state_after(2)
    for call in range(10):
        folder = tmp_path / str(call)
        folder.mkdir()
        save_checkpoint(folder, old, HEAD)
        if before_that == "crash between the renames":
            (folder / "checkpoint").rename(folder / ".checkpoint.old")
        elif before_that == "crash after them":
            shutil.copytree(folder / "checkpoint", folder / ".checkpoint.old")
            (folder / ".checkpoint.old" / "state.json").write_text("{")
            shutil.copytree(folder / ".checkpoint.old", folder / ".checkpoint.new")
        with monkeypatch.context() as patch:
            crashing(patch, step, when, call)
            try:
                save_checkpoint(folder, new, HEAD)
                finished = True
            except Crash:
                finished = False
        loaded, _ = load_checkpoint(folder, fresh())
        assert same(loaded, new) or (not finished and same(loaded, old))
        save_checkpoint(folder, new, HEAD)  # and the run goes on
        assert same(load_checkpoint(folder, fresh())[0], new)
        if finished:
            assert call > 0, f"{step} is no step any more"
            return
    raise AssertionError(f"{step} never came to an end")


def crashing(patch: pytest.MonkeyPatch, step: str, when: str, call: int) -> None:
    place: Any = {"shutil": shutil, "Path": Path}.get(step.partition(".")[0], checkpoint)
    name = step.rpartition(".")[2]
    real, count = getattr(place, name), [0]

    def crash(*args: Any, **keywords: Any) -> Any:
        count[0] += 1
        if count[0] <= call:
            return real(*args, **keywords)
        if when == "after":
            real(*args, **keywords)
        raise Crash

    patch.setattr(place, name, crash)


# --- what is no checkpoint ----------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, state_after(2), HEAD)
    return tmp_path / "checkpoint"


def refused(folder: Path, start: ServerState | None = None) -> str:
    with pytest.raises(CorruptRun) as error:
        load_checkpoint(folder.parent, start or fresh())
    return str(error.value)


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CorruptRun, match="has no checkpoint"):
        load_checkpoint(tmp_path, fresh())


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "garbage", "pickle"])
def test_a_damaged_file_is_corrupt(name: str, damage: str, saved: Path) -> None:
    file = saved / name
    content = file.read_bytes()
    match damage:
        case "gone":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "garbage":
            file.write_bytes(b"\xff" * len(content))
        case "pickle":
            torch.save({"adapter": torch.zeros(11)}, file)
    assert "is not a checkpoint of this run" in refused(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"round": None},
        {"round": "2"},
        {"round": 2.5},
        {"round": True},
        {"controller": []},
        {"controller": {}},
        {"controller": {"bound": 1.0}},
        {"controller": {"colour": "red"}},
        {"controller": None},
    ],
)
def test_a_document_of_another_form_is_corrupt(change: dict[str, Any], saved: Path) -> None:
    document = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**document, **change}))
    assert "is not a checkpoint of this run" in refused(saved)


@pytest.mark.parametrize("key", ["round", "controller", "ledger_head"])
def test_a_document_without_a_part_is_corrupt(key: str, saved: Path) -> None:
    document = json.loads((saved / "state.json").read_text())
    del document[key]
    (saved / "state.json").write_text(json.dumps(document))
    refused(saved)
    (saved / "state.json").write_text("[1]")
    refused(saved)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("adapter", torch.zeros(12)),
        ("adapter", torch.zeros(11, dtype=torch.float64)),
        ("served", torch.zeros(1)),
        ("optimizer.momentum", torch.zeros(9)),
        ("optimizer.velocity", torch.zeros(8)),
        ("optimizer.momentum", None),
        ("served", None),
    ],
)
def test_tensors_of_another_run_are_refused(name: str, tensor: torch.Tensor | None, saved: Path) -> None:
    tensors = load_file(saved / "state.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, saved / "state.safetensors")
    refused(saved)


def test_another_controller_or_optimizer_is_refused(saved: Path) -> None:
    assert "controller" in refused(saved, fresh(Fixed()))
    assert "another run" in refused(saved, replace(fresh(), optimizer={}))


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["state.json", "state.safetensors"]
    json.loads((saved / "state.json").read_text())
    head = (saved / "state.safetensors").read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert set(json.loads(head[8 : 8 + length])) >= {"adapter", "served", "optimizer.momentum"}
