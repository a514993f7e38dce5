"""A checkpoint comes back bit for bit, a crash leaves the old one or the new one, and what is none is refused."""

import hashlib
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
from privacy.randomness.rng import torch_generator
from server.run_folder import checkpoint
from server.run_folder.checkpoint import Checkpoint, Times, load_checkpoint, read_mark, save_checkpoint
from strategies.controllers.controller import PublicSignals, RunInfo
from strategies.controllers.dp_lac import DpLac, LacState
from strategies.controllers.fixed import Fixed
from strategies.server_update import ServerState
from strategies.state_files import same_bits

SETTING = RunInfo(3, ((5, 3),), Poisson(0.1, 100), (1.25,) * 3)
HEAD = "12:abcdef"


def fresh(controller: Any = None) -> ServerState:
    controller = controller or DpLac()
    state = controller.init(SETTING, PublicSignals(0, 0.7))
    return ServerState(-1, torch.zeros(11), torch.zeros(11), {"momentum": torch.zeros(8)}, state)


def after(round: int) -> Checkpoint:
    """A checkpoint whose every number is unlike the one a run starts with, odd floats included."""
    generator = torch_generator(round, "state")
    adapter = torch.randn(11, generator=generator)
    adapter[:4] = torch.tensor([math.nan, -0.0, 1e-45, math.inf])
    lac = LacState(1 / 3 / round, 0.1 + 0.2, math.nan, 5e-324)
    served = torch.randn(11, generator=generator)
    optimizer = {"momentum": torch.randn(8, generator=generator), "count": torch.tensor(round)}
    state = ServerState(round, adapter, served, optimizer, lac)
    answers = (torch.randn(3, generator=generator, dtype=torch.float64),)
    return Checkpoint(state, torch.randn(8, generator=generator), answers, f"{HEAD}{round}", Times(1 / 3, 0.1 * round))


def started() -> ServerState:
    """What load_checkpoint is given for form."""
    return replace(fresh(), optimizer={"momentum": torch.zeros(8), "count": torch.tensor(0)})


def only(state: ServerState) -> Checkpoint:
    return Checkpoint(state, None, (), HEAD)


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        save_checkpoint(tmp_path, after(round))
        assert same_bits(load_checkpoint(tmp_path, started()), after(round))
        mark = read_mark(tmp_path)
        assert mark is not None
        assert mark.ledger_head == after(round).ledger_head
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert not same_bits(after(1), after(2))


def test_an_adapter_that_is_served_as_it_is_is_kept_once_each(tmp_path: Path) -> None:
    adapter = torch.arange(11.0)
    save_checkpoint(tmp_path, only(replace(fresh(), adapter=adapter, served=adapter)))
    loaded = load_checkpoint(tmp_path, fresh()).state
    assert torch.equal(loaded.served, adapter)
    assert loaded.served.data_ptr() != loaded.adapter.data_ptr()


def test_a_controller_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    for controller in (DpLac(clip_norm=2.0), DpLac(clip_norm=2.0, smooth=True), Fixed(0.3)):
        state = controller.init(SETTING, PublicSignals(0, 0.7))  # type: ignore[attr-defined]
        losses = [0.6, 0.65, 0.5, 0.41]
        for round, loss in enumerate(losses, start=1):
            state = controller.update(state, SETTING, None, PublicSignals(round, loss))  # type: ignore[attr-defined]
            save_checkpoint(tmp_path, only(replace(fresh(controller), round=round, controller=state)))
            loaded = load_checkpoint(tmp_path, fresh(controller)).state.controller
            assert loaded == state
            plan = controller.plan(loaded, SETTING, min(round + 1, 3))  # type: ignore[attr-defined]
            assert plan == controller.plan(state, SETTING, min(round + 1, 3))  # type: ignore[attr-defined]
            state = loaded


@dataclass(frozen=True)
class Seen:
    """Nested in a controller's state; the template has none of them."""

    loss: float
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Remembering:
    """A controller's state with all that may be in one."""

    losses: tuple[float, ...]
    networks: dict[str, torch.Tensor]
    last: Seen | None = None
    replay: tuple[Seen, ...] = ()
    name: str = ""


def test_nested_states_come_back_with_their_types(tmp_path: Path) -> None:
    seen = [Seen(loss, {"q": torch.full((2,), loss), "n": torch.tensor(3)}) for loss in (0.1, math.nan)]
    networks = {"actor.0.weight": torch.randn(3, 2, generator=torch_generator(0, "w")), "steps": torch.tensor([7])}
    state = Remembering((0.1, 0.2), networks, seen[0], tuple(seen), "x")
    template = replace(fresh(), controller=Remembering((), {}))
    save_checkpoint(tmp_path, only(replace(template, controller=state)))
    loaded = load_checkpoint(tmp_path, template).state.controller
    assert same_bits(loaded, state)
    assert type(loaded.replay) is tuple
    assert type(loaded.last) is Seen


def test_a_state_that_has_no_place_in_a_checkpoint_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Secretive:
        values: set[int]

    with pytest.raises(TypeError, match=r"controller\.values .*set"):
        save_checkpoint(tmp_path, only(replace(fresh(), controller=Secretive({1}))))
    assert list(tmp_path.iterdir()) == []


# --- crashes ------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """What kill -9 would do, at a place of our choice."""


STEPS = ["shutil.rmtree", "Path.mkdir", "save_file", "Path.write_text", "sync", "Path.rename"]


@pytest.mark.parametrize("before_that", ["nothing", "crash between the renames", "crash after them"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_leaves_the_old_checkpoint_or_the_new_one(
    step: str, when: str, before_that: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of every step, in a folder that itself may be what an earlier crash left behind."""
    old, new = after(1), after(2)
    for call in range(10):
        folder = tmp_path / str(call)
        folder.mkdir()
        save_checkpoint(folder, old)
        if before_that == "crash between the renames":
            (folder / "checkpoint").rename(folder / ".checkpoint.old")
        elif before_that == "crash after them":
            shutil.copytree(folder / "checkpoint", folder / ".checkpoint.old")
            (folder / ".checkpoint.old" / "state.json").write_text("{")
            shutil.copytree(folder / ".checkpoint.old", folder / ".checkpoint.new")
        with monkeypatch.context() as patch:
            crashing(patch, step, when, call)
            try:
                save_checkpoint(folder, new)
                finished = True
            except Crash:
                finished = False
        loaded = load_checkpoint(folder, started())
        assert same_bits(loaded, new) or (not finished and same_bits(loaded, old))
        save_checkpoint(folder, new)  # and the run goes on
        assert same_bits(load_checkpoint(folder, started()), new)
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
    save_checkpoint(tmp_path, after(2))
    return tmp_path / "checkpoint"


def refused(folder: Path, start: ServerState | None = None) -> str:
    with pytest.raises(CorruptRun) as error:
        load_checkpoint(folder.parent, start or started())
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


CONTROLLER = "strategies.controllers.dp_lac.LacState"


@pytest.mark.parametrize(
    "change",
    [
        {"round": None},
        {"round": "2"},
        {"round": 2.5},
        {"round": True},
        {"round": [2]},
        {"adapter": None},
        {"adapter": {"tensor": "nobody"}},
        {"adapter": {"tensor": "served", "more": 1}},
        {"controller": []},
        {"controller": {}},
        {"controller": {"known": "setting"}},
        {"controller": {"known": "somebody"}},
        {"controller": {"dataclass": CONTROLLER, "fields": {}}},
        {"controller": {"dataclass": CONTROLLER, "fields": {"colour": "red"}}},
        {"controller": {"dataclass": "subprocess.Popen", "fields": {"args": "true"}}},
        {"controller": {"dataclass": "strategies.controllers.fixed.Fixed", "fields": {"clip_norm": 1.0}}},
        {"controller": None},
        {"colour": "red"},
    ],
)
def test_a_state_of_another_form_is_corrupt(change: dict[str, Any], saved: Path) -> None:
    document = json.loads((saved / "state.json").read_text())
    changed = {**document, "state": {**document["state"], **change}}
    (saved / "state.json").write_text(json.dumps(changed))
    assert "its digest is not that of its content" in refused(saved)
    del changed["sha256"]  # and whoever takes the digest away as well
    (saved / "state.json").write_text(json.dumps(changed))
    assert "is not a checkpoint of this run" in refused(saved)


@pytest.mark.parametrize("key", ["format", "state", "release", "ledger_head", "seconds", "tensors_sha256"])
def test_a_document_without_a_part_is_corrupt(key: str, saved: Path) -> None:
    document = json.loads((saved / "state.json").read_text())
    del document[key], document["sha256"]
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
    assert "is not the file that was written" in refused(saved)
    document = json.loads((saved / "state.json").read_text())  # and whoever changes the digest as well
    digest = hashlib.sha256((saved / "state.safetensors").read_bytes()).hexdigest()
    del document["sha256"]
    (saved / "state.json").write_text(json.dumps({**document, "tensors_sha256": digest}))
    refused(saved)


def test_another_controller_or_optimizer_is_refused(saved: Path) -> None:
    other = replace(started(), controller=fresh(Fixed()).controller)
    assert "holds a strategies.controllers.dp_lac.LacState" in refused(saved, other)
    assert "another run" in refused(saved, replace(fresh(), optimizer={}))


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["state.json", "state.safetensors"]
    json.loads((saved / "state.json").read_text())
    head = (saved / "state.safetensors").read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert set(json.loads(head[8 : 8 + length])) >= {"adapter", "served", "optimizer.momentum", "release.update"}
