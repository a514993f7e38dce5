"""The sweep command on a tiny model: checks first, skips what is done, keeps what was spent, survives a failed cell."""

import io
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from privacy.ledger.ledger import Ledger
from server.config.schema import RunConfig
from simulations import preflight
from simulations.engines import rehearsal
from simulations.engines.cluster.nodes import Node
from simulations.engines.flower import RunFailed
from simulations.report.notation import epsilon_text
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import read_run
from simulations.sweep import cluster, runner
from simulations.sweep.cells import Cell, count_cell, read_cells
from simulations.sweep.display import Progress, progress_table
from simulations.sweep.rows import read_results, row, write_results
from simulations.sweep.runner import Outcome, Store, attempts, finished_folder, fresh_folder, run_cells
from tests.cases.recorded_runs import record_run_in
from tests.cases.sweeps import BROKEN, HELD, RunSweep

SWEEP = """
name = "tiny"
[variants.fixed]
[variants.floor]
kind = "public-only"
public.warm-start-epochs = 1
[variants.broken]
strategy.optimizer = "own_broken:Mine"
[[grids]]
name = "g"
base = "base.toml"
variants = ["broken", "fixed", "floor"]
seeds = [0]
"""


@pytest.fixture
def sweep(tmp_path: Path, run_sweep: RunSweep) -> RunSweep:
    (tmp_path / "tiny.toml").write_text(SWEEP)
    return run_sweep


def cells_of(folder: Path) -> list[Cell]:
    return read_cells(folder / "tiny.toml", folder)[1]


def test_a_dry_run_lists_the_cells_with_their_noise_and_runs_nothing(sweep, tmp_path: Path) -> None:
    code, output = sweep("--dry-run", "--only", "g/f*")
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0].startswith("g/fixed/seed=0  z ")
    assert float(lines[0].split()[2]) > 0.3
    assert lines[0].endswith("to do")
    assert lines[1] == "g/floor/seed=0  z none  to do"
    assert not (tmp_path / "runs").exists()
    code, output = sweep("--dry-run", "--only", "g/f*", "--json")
    fixed, floor = json.loads(output)["cells"]
    assert (code, fixed["cell"], fixed["done"]) == (0, "g/fixed/seed=0", False)
    assert min(fixed["noise_multipliers"]) > 0.3
    assert floor["noise_multipliers"] == []


def test_what_all_cells_and_earlier_runs_on_the_same_data_add_up_to_is_said_first(sweep, tmp_path: Path) -> None:
    rows = [f"{'burning' if number % 2 else 'itching'} pain {number},{number % 2}" for number in range(400)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label", *rows]))
    own = SWEEP.replace("[variants.fixed]", '[settings]\ndata.source = "csv:own.csv"\nclients = 40\n[variants.fixed]')
    (tmp_path / "tiny.toml").write_text(own.replace("seeds = [0]", "seeds = [0, 1]"))
    options = ("--dry-run", "--only", "g/f*", "--json")
    code, output = sweep(*options)
    assert code == 0, output
    (text,) = json.loads(output)["warnings"]
    assert text.startswith("The 2 cells to run use the same data (csv:")  # the public-only ones cost nothing
    checked = preflight.check_cells([cell for cell in cells_of(tmp_path) if cell.variant == "fixed"])
    (tmp_path / "runs" / "sweeps").mkdir(parents=True)
    before = record_run_in(tmp_path / "runs" / "sweeps")
    (before / "source.digest").write_text(next(iter(checked.values())).source)
    (more,) = json.loads(sweep(*options)[1])["warnings"]
    assert more.startswith("The 2 cells to run and 1 earlier run in runs use the same data")
    first, second = (float(re.search(r"at most (\S+)", each)[1]) for each in (text, more))
    assert first < second
    assert "Warning: The 2 cells to run and" in sweep(*options[:-1])[1]


@pytest.mark.parametrize(
    ("jobs", "gpus", "seen"), [(3, ["4", "7"], "447"), (2, ["4", "7"], "47"), (2, [], [None, None])]
)
def test_cells_at_a_time_take_a_gpu_each(sweep, tmp_path: Path, monkeypatch, jobs: int, gpus: list, seen) -> None:
    at_once, given = threading.Barrier(jobs), []

    def run_child(*_, gpu: str | None, **__) -> None:
        at_once.wait(60)
        given.append(gpu)
        at_once.wait(60)
        raise RunFailed("enough is seen")

    monkeypatch.setattr(runner, "run_child", run_child)
    monkeypatch.setattr(runner, "gpu_names", lambda device: gpus)
    cells = [replace(cells_of(tmp_path)[0], key=str(number)) for number in range(2 * jobs)]
    run_cells(cells, lambda cell: tmp_path, jobs, tmp_path, lambda *_: None, lambda _: None, lambda: None)
    assert [sorted(given[:jobs], key=str), sorted(given[jobs:], key=str)] == 2 * [list(seen)]


def test_64_cells_are_placed_at_once_on_8_nodes_of_8_gpus_each_with_its_own(sweep, tmp_path, monkeypatch) -> None:
    """The nodes and Ray are stand-ins, which count what is set aside."""
    asked, taken, freed = list[dict[str, float]](), list[Any](), list[Any]()

    class Task:
        def options(self, **kept: float) -> "Task":
            asked.append(kept)
            return self

        def remote(self, config: RunConfig, *_: Any) -> str:
            taken.append(config)
            return f"cell {len(taken)}"

    def done(task: str) -> str:
        freed.append(task)
        return f"{task} was placed"

    stand_in = SimpleNamespace(
        remote=lambda function: Task(), get=done, wait=lambda tasks, timeout: (tasks if len(taken) == 64 else [], [])
    )
    nodes = [Node("head", 0.0), *[Node(f"gpu-{i}", 64.0, 8.0) for i in range(8)]]
    monkeypatch.setattr(cluster, "cluster_nodes", lambda address: nodes)
    monkeypatch.setattr(cluster, "join_cluster", lambda init: None)
    monkeypatch.setattr(cluster, "check_nodes", lambda *_: None)
    monkeypatch.setattr(cluster, "ray", stand_in)
    monkeypatch.setattr(cluster, "cluster_environment", lambda address: {})
    cells = [replace(cells_of(tmp_path)[0], key=str(number)) for number in range(64)]
    launch = cluster.OnCluster("head:6379", cells, 0, tmp_path)
    assert (launch.plan.workers, asked) == (64, [{"max_retries": 0, "num_cpus": 8, "num_gpus": 1.0}])
    ended: list[Outcome] = []
    run_cells(cells, lambda cell: tmp_path, 64, tmp_path, lambda *_: None, ended.append, lambda: None, launch)
    assert (len(taken), len(freed)) == (64, 64)
    assert all(outcome.error.endswith("was placed") for outcome in ended), "what a node says of a failure is told"


def test_what_a_private_sweep_releases_is_no_table(sweep) -> None:
    code, output = sweep("--private", "--json")
    assert code == 2
    assert "--json does not go with --private" in output


@pytest.mark.nightly
def test_clients_that_the_data_name_are_counted(sweep, tmp_path: Path) -> None:
    rows = [f"itching {number},{number % 2},{number // 2}" for number in range(400)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label,customer", *rows]))
    natural = """[settings]
data.source = "csv:own.csv"
data.partition = "natural"
data.client-column = "customer"
clients = 0
sampling-rate = 0.2
data.train-records = 0
[variants.fixed]"""
    (tmp_path / "tiny.toml").write_text(SWEEP.replace("[variants.fixed]", natural))
    cell = cells_of(tmp_path)[1]
    assert (cell.config.clients, count_cell(cell).digest) == (0, cell.digest)
    assert 100 < count_cell(cell).config.clients < 200, "less those that are held out"
    code, output = sweep("--dry-run", "--only", "g/fixed")
    assert code == 0, output
    assert "g/fixed/seed=0  z " in output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("own_broken:Mine", "own_broken:Nobody", "g/broken/seed=0: strategy.optimizer"),
        ("public.warm-start-epochs = 1", "", "g/floor/seed=0: public.warm-start-epochs = 0"),
        ("[variants.fixed]", '[variants.fixed]\ndata.source = "csv:lost.csv"', "lost.csv"),
        (
            "[variants.fixed]",
            '[variants.fixed]\nprivacy.unit = "record"\nstrategy.controller = "dp-lac"',
            "public loss",
        ),
    ],
)
def test_every_cell_is_checked_before_any_runs(sweep, tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP.replace(old, new))
    code, output = sweep()
    assert code == 2
    assert message in output
    assert not (tmp_path / "runs").exists()


def test_cells_are_rehearsed_before_any_runs_those_of_one_kind_once(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = SWEEP.replace("own_broken", "own_unlike").replace(
        "seeds = [0]", 'seeds = [0, 1]\naxes = { "privacy.epsilon" = [4.0, 8.0] }'
    )
    (tmp_path / "tiny.toml").write_text(grids)
    seen = list[str]()
    rehearse = rehearsal.rehearse

    def counted(ready: Any) -> None:
        seen.append(ready.config.strategy.optimizer)
        rehearse(ready)

    monkeypatch.setattr(rehearsal, "rehearse", counted)
    (tmp_path / "own_unlike.py").write_text(BROKEN.replace("if ", "if True or "))
    code, output = sweep()
    assert code == 2, output
    assert re.search(r"g/broken/\S+: strategy.optimizer = 'own_unlike:Mine'.*planted failure", " ".join(output.split()))
    assert not (tmp_path / "runs").exists()
    assert sorted(seen) == ["fedavg", "own_unlike:Mine"], "of eight cells that spend"


def test_files_are_looked_for_before_anything_is_calibrated(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "check_noise", lambda config: pytest.fail("calibrated"))
    lost = SWEEP.replace("[variants.floor]", '[variants.floor]\ndata.test-source = "wikitext2:lost@test"')
    misspelt = lost.replace("wikitext2:lost@test", "cvs:lost.csv")
    for text, said in (
        (lost, "g/floor/seed=0: data.test-source"),
        (lost.replace("test-source", "source"), "lost"),
        (misspelt, "did you mean csv:lost.csv?"),
    ):
        (tmp_path / "tiny.toml").write_text(text)
        code, output = sweep("--dry-run")
        assert code == 2
        assert said in output


def test_a_base_that_is_no_toml_is_named(sweep, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("rounds = = 2")
    code, output = sweep("--dry-run")
    assert code == 2
    assert "tiny.toml: base" in output
    assert "base.toml is not valid TOML" in output.replace("\n", " ")


def test_an_adapter_that_no_model_can_have_is_refused(sweep, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP.replace("[variants.fixed]", '[variants.fixed]\nmodel.targets = "foo"'))
    code, output = sweep("--dry-run", "--only", "g/f*")
    assert code == 2
    assert output.startswith("g/fixed/seed=0: model.targets = 'foo': ")


def test_a_row_holds_what_a_run_left_and_the_file_keeps_one_row_per_cell(
    sweep, tmp_path: Path, complete_run: Path
) -> None:
    cell = cells_of(tmp_path)[1]
    made = row(cell, complete_run)
    run = read_run(complete_run)
    assert made["epsilon_stated"] == guaranteed_pair(run)[0]
    assert (made["test_accuracy"], made["validation_accuracy"]) == (0.8125, 0.55)
    assert made["best_validation_accuracy"] == pytest.approx(0.55)
    assert (made["first_clip_bound"], made["last_clip_bound"]) == (0.5, 0.1)
    assert made["seconds_per_round"] == 2.5
    assert made["noise_multiplier"] == 1.5
    newer = {**made, "test_accuracy": 0.9}
    store = Store("tiny", tmp_path / "runs", tmp_path / "r.json", cells_of(tmp_path))
    assert store.add(made) == [made]
    assert store.add(newer) == []
    assert [entry["test_accuracy"] for entry in read_results(tmp_path / "r.json")] == [0.9]
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(ValueError, match=r"r.json .*sweep"):
        read_results(tmp_path / "r.json")


@pytest.mark.nightly
def test_cells_that_are_the_same_run_share_its_row(sweep, tmp_path: Path, complete_run: Path) -> None:
    again = '\n[[grids]]\nname = "h"\nbase = "base.toml"\nvariants = ["fixed"]\nseeds = [0, 1]\n'
    (tmp_path / "tiny.toml").write_text(SWEEP + again)
    file = tmp_path / "runs/sweeps/tiny/results.json"
    write_results(file, "tiny", [row(cells_of(tmp_path)[1], complete_run)])
    code, output = sweep("--dry-run", "--only", "*/fixed")
    assert code == 0, output
    states = {line.split()[0]: line.endswith("done") for line in output.splitlines()}
    assert states == {"g/fixed/seed=0": True, "h/fixed/seed=0": True, "h/fixed/seed=1": False}


def test_the_table_shows_what_runs_what_ended_and_what_failed(sweep, tmp_path: Path, complete_run: Path) -> None:
    cells = cells_of(tmp_path)
    progress = Progress(total=3, before=0, rows=[row(cells[1], complete_run)], failed=[(cells[0].key, "lost\nmore")])
    progress.start(cells[2], complete_run)
    console = Console(width=80, color_system=None, record=True, file=io.StringIO())
    console.print(progress_table(progress))
    lines = console.export_text().splitlines()
    assert lines[0].split() == ["cell", "round", "test", "public", "ε", "clip", "time"]
    assert lines[1].strip() == "g/broken/seed=0: lost"
    epsilon = epsilon_text(guaranteed_pair(read_run(complete_run))[0])
    assert lines[2].split() == ["g/fixed/seed=0", "5", "81.2", "%", "55.0", "%", epsilon, "0.1", "2:05"]
    assert lines[3].split()[:4] == ["g/floor/seed=0", "5/2", "55.0", "%"]
    assert lines[4].startswith("1 of 3 cells done, 1 failed, about ")


def test_a_store_takes_what_another_sweep_wrote_and_drops_what_is_stale(
    sweep, tmp_path: Path, complete_run: Path
) -> None:
    file, cells = tmp_path / "r.json", cells_of(tmp_path)
    mine, theirs = row(cells[1], complete_run), row(cells[2], complete_run)
    stale = {**mine, "digest": "of other settings", "test_accuracy": 0.1}
    store = Store("tiny", tmp_path / "runs", file, cells)
    write_results(file, "tiny", [stale, theirs])
    assert [entry["cell"] for entry in store.add(mine)] == [cells[1].key, cells[2].key]
    assert {entry["cell"]: entry["test_accuracy"] for entry in read_results(file)} == {
        cells[1].key: 0.8125,
        cells[2].key: 0.8125,
    }
    write_results(file, "tiny", [stale])
    assert Store("tiny", tmp_path / "runs", file, cells).done == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_survives_a_failing_cell_and_a_second_one_runs_only_what_is_missing(sweep, tmp_path: Path) -> None:
    code, output = sweep("--jobs", "2")
    assert code == 1, output
    assert "2 of 3 cells done, 1 failed" in output
    assert "planted failure" in output
    assert output.count("cell  round  test  public") == 1, "what the lines say, above them"
    assert re.search(r"g/fixed +1 .*\ng/floor +1 ", output), "it ends with its table"
    assert "g/floor" in (tmp_path / "runs/sweeps/tiny/compare.html").read_text()
    file = tmp_path / "runs/sweeps/tiny/results.json"
    rows = {entry["variant"]: entry for entry in json.loads(file.read_text())["cells"]}
    assert rows.keys() == {"fixed", "floor"}
    assert rows["fixed"]["epsilon_stated"] <= 4.0
    assert rows["fixed"]["cpu_seconds"] > 0
    assert rows["floor"]["epsilon_stated"] is None
    assert rows["floor"]["rounds_done"] == 0
    cells = {cell.variant: cell for cell in cells_of(tmp_path)}
    output_folder = tmp_path / "runs/sweeps/tiny"
    with Ledger.open(attempts(cells["broken"], output_folder)[0] / "ledger.jsonl", read_only=True) as ledger:
        assert len(ledger.events) == 1, "what the failed cell spent is kept"
    before = {variant: len(attempts(cell, output_folder)) for variant, cell in cells.items()}
    file.unlink()  # results are found again in the run folders
    (tmp_path / "own_broken.py").write_text(BROKEN.replace("raise RuntimeError", "return arguments[0], arguments[1] #"))
    code, output = sweep("--json")
    assert code == 0, output
    said = json.loads(output)
    assert (said["folder"], said["results"], said["failed"]) == (str(output_folder), str(file), {})
    assert {group["label"] for group in said["groups"]} == {"g/broken", "g/fixed", "g/floor"}
    code, output = sweep()
    assert code == 0, output
    assert "3 of 3 cells done, 3 of them before" in output
    after = {variant: len(attempts(cell, output_folder)) for variant, cell in cells.items()}
    assert after == {**before, "broken": 2}
    assert len(read_results(file)) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_cell_leaves_no_process_and_runs_again_in_a_fresh_folder(sweep, tmp_path: Path) -> None:
    import psutil

    (tmp_path / "own_broken.py").write_text(BROKEN.replace(*HELD))
    cell = next(cell for cell in cells_of(tmp_path) if cell.variant == "broken")
    output = tmp_path / "out"

    def fresh(cell: Cell) -> Path:
        return fresh_folder(cell, output)

    def stop_when_it_spends() -> None:
        if (output / cell.key / "attempt-1" / "ledger.jsonl").is_file():
            raise KeyboardInterrupt

    (tmp_path / "hold").touch()  # the step waits while this file is there, so that the cell cannot end before the stop
    with pytest.raises(KeyboardInterrupt):
        run_cells([cell], fresh, 1, tmp_path, lambda *_: None, lambda _: None, stop_when_it_spends)
    (tmp_path / "hold").unlink()
    command = "simulations.sweep.child"
    children = [p for p in psutil.Process().children(recursive=True) if command in p.cmdline()]
    assert children == []
    assert finished_folder(cell, output) is None
    ended = []
    run_cells([cell], fresh, 1, tmp_path, lambda *_: None, ended.append, lambda: None)
    assert [outcome.error for outcome in ended] == [""]
    assert finished_folder(cell, output) == output / cell.key / "attempt-2"
    assert (output / cell.key / "attempt-1" / "ledger.jsonl").is_file()
