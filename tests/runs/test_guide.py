"""The page "Your own strategy": its examples are files that work, conform, and run end to end."""

import importlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity

from privacy.events import Poisson
from privacy.ledger.ledger import Ledger
from server.config.load import load
from simulations.engines.inprocess import run_inprocess
from simulations.preflight import check
from simulations.presets.load import configure
from strategies.conformance import check_controller, check_optimizer
from strategies.controllers.controller import RunInfo
from strategies.optimizers.optimizer import ServerStep
from tests.end_to_end.lacquer_process import TINY

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, EXAMPLES = (DOCS / "strategy.md").read_text(encoding="utf-8"), DOCS / "examples"
NAME, OPTIMIZERS, SCHEDULES = "my_methods", "my_optimizers", "my_schedules"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with the examples in it, on the path as `lacquer run` puts it there."""
    (tmp_path / f"{NAME}.py").write_text(blocks("python")[0])
    for name in (OPTIMIZERS, SCHEDULES):
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    yield tmp_path
    for name in (NAME, OPTIMIZERS, SCHEDULES):
        sys.modules.pop(name, None)


def test_the_examples_are_short_and_conform(folder: Path) -> None:
    for example in folder.glob("my_*.py"):
        assert len([line for line in example.read_text().splitlines() if line.strip()]) <= 50
    exec(blocks("python")[1], {})
    check_optimizer(importlib.import_module(OPTIMIZERS).SoftThreshold(momentum=0.5))
    check_controller(importlib.import_module(SCHEDULES).Cosine(clip_norm=0.5))


def test_the_formula_is_that_of_the_threshold(folder: Path) -> None:
    info = RunInfo(4, ((8,),), Poisson(0.1, 100), (1.0,) * 4, None)
    cosine = importlib.import_module(SCHEDULES).Cosine(clip_norm=2.0)
    bounds = [cosine.plan(None, info, round).clip.bound for round in range(1, 5)]
    assert bounds == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])


def test_the_optimizer_does_what_it_says(folder: Path) -> None:
    optimizer = importlib.import_module(OPTIMIZERS).SoftThreshold(learning_rate=2.0, momentum=0.5, threshold=0.5)
    parameters, update = torch.zeros(3), torch.tensor([1.0, -3.0, 0.1])
    state = optimizer.init(parameters)
    for round, moved in ((1, [1.0, -5.0, 0.0]), (2, [2.5, -12.5, 0.0])):
        step = ServerStep(round, update, torch.tensor(1.0, dtype=torch.float64))
        state, parameters = optimizer.step(state, parameters, step)
        assert parameters.tolist() == moved


def guide_settings(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:3] == ["lacquer", "run", "quickstart"]
    return [words[i + 1] for i, word in enumerate(words) if word == "--set"]


def test_the_optimizer_of_the_guide_in_a_whole_run(folder: Path) -> None:
    (command,) = (block for block in blocks("sh") if OPTIMIZERS in block)
    config = configure(str(folder / "tiny.toml"), guide_settings(command), {"engine.workers": 1}, folder)
    check(config)
    run_folder = folder / "run"
    run_folder.mkdir()
    run_inprocess(config, run_folder)
    resolved = load(run_folder / "config.toml").strategy
    assert (resolved.optimizer, resolved.optimizer_options) == (f"{OPTIMIZERS}:SoftThreshold", {"threshold": 0.25})
    assert json.loads((run_folder / "results.json").read_text())["rounds_done"] == config.rounds


def test_the_example_does_what_it_says(folder: Path, released) -> None:  # type: ignore[no-untyped-def]
    from privacy.contribution import Contribution
    from privacy.events import Poisson
    from strategies.controllers.controller import PublicSignals, RunInfo

    controller = importlib.import_module(NAME).HalveWhenQuiet(clip_norm=0.8, patience=2)
    setting = RunInfo(4, ((5,),), Poisson(0.1, 100), (1.5,) * 4)
    state, bounds = controller.init(setting, PublicSignals(0, None)), []
    for round in range(1, 5):  # nobody comes and no noise is added: the signal is below what the noise would be
        plan = controller.plan(state, setting, round)
        state = controller.update(
            state, setting, released(plan, Contribution.zero(plan), setting.sampling), PublicSignals(round, None)
        )
        bounds.append(state.bound)
    assert bounds == [0.8, 0.4, 0.4, 0.2]


def test_the_command_of_the_guide_and_a_whole_run_in_process(folder: Path) -> None:
    """The guide's own --set arguments, on a preset of two rounds and a model of random weights."""
    settings = [line.replace("patience=2", "patience=1") for line in guide_settings(blocks("sh")[0])]
    config = configure(str(folder / "tiny.toml"), settings, {"engine.workers": 1, "rounds": 3}, folder)
    assert config.strategy.controller == f"{NAME}:HalveWhenQuiet"
    check(config)
    run_folder = folder / "run"
    run_folder.mkdir()
    run_inprocess(config, run_folder)
    start, *rounds = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert start["phase"] == "start"
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert [line["clip_bound"] for line in rounds] == [1.0, 0.5, 0.25], "three of a thousand values of noise are signal"
    assert load(run_folder / "config.toml").strategy.controller_options == {"patience": 1}
    with Ledger.open(run_folder / "ledger.jsonl", read_only=True) as ledger:
        assert len(ledger.events) == 3
        assert ledger.epsilon_spent() <= config.privacy.epsilon
        assert ledger.not_private is None
