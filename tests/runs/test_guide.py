"""The page "Your own strategy": its example is a file that works, conforms, and runs end to end."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supercore.task_identity import TaskIdentity

from privacy.ledger.ledger import Ledger
from server.config.load import load
from simulations.engines.inprocess import run_inprocess
from simulations.preflight import check
from simulations.presets.load import configure
from tests.end_to_end.lacquer_process import TINY

GUIDE = (Path(__file__).parents[2] / "docs/strategy.md").read_text(encoding="utf-8")
NAME = "my_methods"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with the example in it, on the path as `lacquer run` puts it there."""
    example, _ = blocks("python")
    (tmp_path / f"{NAME}.py").write_text(example)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    yield tmp_path
    sys.modules.pop(NAME, None)


def test_the_example_is_short_and_conforms(folder: Path) -> None:
    example, check = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 50
    exec(check, {})


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
    command = blocks("sh")[0]
    words = shlex.split(command)
    assert words[:3] == ["lacquer", "run", "quickstart"]
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    settings = [line.replace("patience=2", "patience=1") for line in settings]
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
        assert ledger.spent() <= config.privacy.epsilon
        assert ledger.not_private is None
