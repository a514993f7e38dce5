"""A run of any kind that is killed anywhere resumes: nothing is charged twice or forgotten, no row is lost or doubled.

A whole run of every kind leaves a copy of its folder at every moment (:mod:`tests.cases.moments`); copies are resumed.
What no checkpoint knew of stays spent and is not made up for; where nothing was lost, the run ends as the whole one
did, bit for bit.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from client.models.lora import WEIGHTS
from server.run_folder.errors import CannotResume
from server.run_folder.names import (
    ADAPTER_FOLDER,
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    PHASE_FILE,
    PRIVACY_FILE,
    RESULTS_FILE,
)
from server.run_folder.resume import read_resumed
from server.run_folder.telemetry import read_metrics, read_status
from tests.cases.kinds import KINDS, Config, begin_or_resume
from tests.cases.moments import KEPT, Moment, Witness, charges

ADAPTER = f"{ADAPTER_FOLDER}/{WEIGHTS}"


def go(config: Config, witness: Witness) -> None:
    """Run to the end in the folder of ``witness``, or resume the run there."""
    with witness.watching():
        begin_or_resume(config, witness.folder)


class Whole:
    """An uninterrupted run of a kind, and its moments."""

    def __init__(self, kind: str, place: Path) -> None:
        self.kind, self.config = kind, KINDS[kind](place / "cache")
        witness = Witness(place / "run", place / "copies")
        go(self.config, witness)
        self.folder, self.moments = witness.folder, witness.moments
        self.charges, self.rows, self.states = charges(self.folder), rows(self.folder), states(self.folder)
        self.tensors = tensors(self.folder)
        self.rounds = json.loads((self.folder / RESULTS_FILE).read_text())["rounds_done"]

    def resumed(self, moment: Moment, place: Path, quiet: bool = True) -> Path:
        """A copy of the moment, resumed; every noise in it was paid for."""
        folder = shutil.copytree(moment.folder, place)
        witness = Witness(folder, quiet=quiet)
        go(self.config, witness)
        assert witness.draws == len(charges(folder)) - moment.charged
        return folder

    def check(self, moment: Moment, folder: Path, lost: int = 0) -> None:
        """What must be so of a run that was killed at ``moment``, having lost some releases before, and resumed."""
        before, after, lost = charges(moment.folder), charges(folder), lost + moment.charged - moment.kept
        for ledger in {ledger for ledger, *_ in after}:
            paid = [charge for charge in before if charge[0] == ledger]
            assert [charge for charge in after if charge[0] == ledger][: len(paid)] == paid, "a charge was forgotten"
        assert len(after) <= len(self.charges), "more was charged than was committed to"
        for path in moment.folder.rglob(PHASE_FILE):
            assert (folder / path.relative_to(moment.folder)).read_bytes() == path.read_bytes(), "done twice"
        rounds = self.rounds - lost if self.kind in ("clients", "correlated", "records") else self.rounds
        if lost and before[-1][1] == "histogram":
            rounds = 0  # there is nothing to start from
        assert json.loads((folder / RESULTS_FILE).read_text())["rounds_done"] == rounds
        assert [row.round for row in rows(folder) if row.phase != "start"][-1:] == [rounds][:rounds]
        assert bool(read_resumed(folder)) >= bool(before)
        statement = json.loads((folder / PRIVACY_FILE).read_text())
        assert statement.get("rounds", {}).get("charged", len(after)) == len(after)
        assert load_file(folder / ADAPTER).keys() == load_file(self.folder / ADAPTER).keys()
        assert "\n# Adapter" in (folder / ADAPTER_FOLDER / "README.md").read_text()
        status = read_status(folder)
        assert status is not None
        assert status.state in (("completed", "stopped-budget") if lost else ("completed",))
        if not lost:
            assert (after, rows(folder), states(folder)) == (self.charges, self.rows, self.states)
            found = tensors(folder)
            assert found.keys() == self.tensors.keys()
            assert [name for name in found if not torch.equal(found[name], self.tensors[name])] == []
        with pytest.raises(CannotResume, match="has ended"):
            go(self.config, Witness(folder))
        assert read_status(folder) == status


Wholes = Callable[[str], Whole]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return cache(lambda kind: Whole(kind, tmp_path_factory.mktemp(kind)))


def rows(folder: Path) -> list[Any]:
    """Records of the rounds but for their times and who was there, which no checkpoint keeps; each of them one line.

    Correlated noise starts anew in a process that resumes, and is louder or less for it: how loud it was is left out.
    """
    records = read_metrics(folder)
    assert len(records) == len((folder / METRICS_FILE).read_text().splitlines())
    if 'noise-correlation = "banded"' in (folder / CONFIG_FILE).read_text():
        records = [replace(record, noise_norm=None, signal_estimate=None) for record in records]
    return [replace(record, seconds=0.0, presence=None) for record in records]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that a run keeps and leaves in files of tensors: adapters, states of optimizers and controllers, releases."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder)}: {name}": each for file in files for name, each in load_file(file).items()}


def states(folder: Path) -> list[Any]:
    """What of states is no tensor: that of the checkpoint, those of sites but for the head, a hash over times."""
    documents = [json.loads(file.read_text()) for file in sorted(folder.glob(f"**/{CHECKPOINT_FOLDER}/state.json"))]
    sites = [json.loads(file.read_text()) for file in sorted(folder.rglob("silo.json"))]
    return [document["state"] for document in documents] + [
        {key: value for key, value in site.items() if key != "head"} for site in sites
    ]


@dataclass(frozen=True)
class Place:
    """Where a kill falls: the moment of such a name, as often as it comes counted from the end."""

    names: tuple[str, ...]
    last: int = 1
    torn: bool = False

    def of(self, moments: list[Moment]) -> Moment:
        return [moment for moment in moments if moment.name in self.names and moment.torn == self.torn][-self.last]


PLACES = {
    "half of a charge is on the disk": Place(("sync charge",), 2, torn=True),
    "the charge is on the disk, and no noise drawn": Place(("noise",), 2),
    "the noise is drawn, and nothing kept of it": Place(("sync released",), 2),
    "the new checkpoint is not in its place": Place(KEPT),
    "before the evaluation behind a checkpoint": Place(("evaluate",), 3),
    "half of a row is on the disk": Place(("sync metrics.jsonl",), torn=True),
    "half of the adapter is on the disk": Place((f"sync {WEIGHTS}",), torn=True),
    "the results are not in their place": Place((f"rename {RESULTS_FILE}",)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_noise_is_drawn_behind_its_charge(kind: str, whole: Wholes) -> None:
    run = whole(kind)
    charged = [moment.charged for moment in run.moments if moment.name == "noise"]
    assert charged == list(range(1, len(run.charges) + 1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_resumes(kind: str, place: str, whole: Wholes, tmp_path: Path) -> None:
    run = whole(kind)
    moment = PLACES[place].of(run.moments)
    run.check(moment, run.resumed(moment, tmp_path / "run"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nightly
def test_a_run_that_is_killed_again_after_a_loss_resumes(kind: str, whole: Wholes, tmp_path: Path) -> None:
    run = whole(kind)
    first = PLACES["the noise is drawn, and nothing kept of it"].of(run.moments)
    witness = Witness(shutil.copytree(first.folder, tmp_path / "run"), tmp_path / "copies", kept=first.charged)
    go(run.config, witness)
    for place in ("half of a row is on the disk", "the results are not in their place"):
        again = PLACES[place].of(witness.moments)
        run.check(again, run.resumed(again, tmp_path / place), lost=first.charged - first.kept)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_a_round_that_is_held_again_is_fresh(kind: str, whole: Wholes, tmp_path: Path) -> None:
    """T3: from one folder and with the same cohorts, two runs differ by their noise, which no run remembers."""
    run = whole(kind)
    moment = Place(("sync charge",), torn=True).of(run.moments)
    one, other = (load_file(run.resumed(moment, tmp_path / name, quiet=False) / ADAPTER) for name in ("1", "2"))
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_at_any_moment_resumes(
    kind: str, whole: Wholes, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Before anything is charged, and once it has ended, it may say instead that there is nothing to resume."""
    run = whole(kind)
    for number, moment in enumerate(run.moments):
        lost = moment.charged - moment.kept
        with subtests.test(f"{number}: {moment.name}{', torn' * moment.torn}, {lost} lost"):
            try:
                folder = run.resumed(moment, tmp_path / str(number))
            except CannotResume:
                if moment.charged and not (moment.folder / RESULTS_FILE).is_file():
                    raise
            else:
                run.check(moment, folder)
