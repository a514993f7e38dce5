"""Before a run: earlier ones on the same data are found wherever they lie below the output folder, and composed."""

from pathlib import Path

import pytest

from privacy.accountants import composition
from privacy.commitment import Commitment, FloorStep
from privacy.events import Poisson
from server.config.load import parse
from simulations.history.earlier import Planned, planned_costs, warn_together
from simulations.report.notation import epsilon_text
from strategies.calibration import Calibrated
from tests.cases.recorded_runs import record_run_in

COHORT = Poisson(0.05, 1000)
STEPS = (FloorStep("histogram", Poisson(1.0, 1000), 10.0), FloorStep("round", COHORT, 1.5, 5))
NOISE = Calibrated(Commitment("client", "add_remove", 1000, 2.0, 1e-5, floor=STEPS), (1.5,) * 5).to_json()
OWN = {"data": {"source": "csv:own.csv"}, "privacy": {"epsilon": 2.0}}


def earlier(place: Path, name: str = "sweep/grid/seed=0", digest: str = "one", **options: object) -> Path:
    (place / name).mkdir(parents=True)
    folder = record_run_in(place / name, **options)  # type: ignore[arg-type]
    (folder / "source.digest").write_text(f"{digest}\n")
    return folder


def new(noise: object = NOISE, digest: str = "one", **tables: dict[str, object]) -> list[Planned]:
    return planned_costs(parse(OWN | tables), digest, noise)  # type: ignore[arg-type]


def test_runs_in_the_folders_of_a_sweep_are_found_and_composed_with_the_new_one(tmp_path: Path) -> None:
    earlier(tmp_path)
    earlier(tmp_path, "alone")
    earlier(tmp_path, "other", digest="two")
    (text,) = warn_together(new(), [tmp_path], "this run")
    assert text.startswith("This run and 2 earlier runs in ")
    three = composition.epsilon([*STEPS] * 3, 1e-5)
    assert f"epsilon at most {epsilon_text(three)} at delta 1e-5 (add-remove; composed by" in text
    assert "lacquer budget" in text


def test_a_folder_that_lies_in_another_counts_once(tmp_path: Path) -> None:
    earlier(tmp_path)
    (text,) = warn_together(new(), [tmp_path, tmp_path / "sweep", tmp_path / "not-there"], "this run")
    assert "1 earlier run in" in text
    assert " and " not in text.partition(" earlier run in ")[2].partition(" use ")[0]


def test_a_new_run_whose_noise_is_calibrated_elsewhere_is_added(tmp_path: Path) -> None:
    earlier(tmp_path)
    (text,) = warn_together(new(noise=None), [tmp_path], "this run")
    assert "where they can be, the others added up" in text


def test_several_new_runs_are_warned_of_without_any_earlier_one(tmp_path: Path) -> None:
    (text,) = warn_together([*new(), *new()], [tmp_path], "the {count} cells")
    assert text.startswith("The 2 cells use the same data (csv:own.csv). Together they have epsilon at most ")
    assert "lacquer budget" not in text
    assert warn_together([*new(), *new(digest="two")], [tmp_path], "the {count} cells") == []


def test_with_a_run_that_guarantees_nothing_all_of_them_guarantee_nothing(tmp_path: Path) -> None:
    earlier(tmp_path, not_private="noise is off")
    (text,) = warn_together(new(), [tmp_path], "this run")
    assert text.endswith("Not all of them have a guarantee, so together they have none.")


@pytest.mark.parametrize(
    "nothing",
    [
        new(digest=""),
        new(digest="two"),
        new(data={"source": "notes"}),
        new(privacy={"non-private": True}),
    ],
)
def test_nothing_is_said_where_nothing_adds_up(tmp_path: Path, nothing: list[Planned]) -> None:
    earlier(tmp_path)
    assert warn_together(nothing, [tmp_path], "this run") == []


def test_the_runs_of_the_sweep_that_goes_on_are_not_counted_again(tmp_path: Path) -> None:
    earlier(tmp_path, "mine/candidates/1")
    assert warn_together(new(), [tmp_path], "this private sweep", but=tmp_path / "mine") == []
