"""Tables in the documentation come from results, and stale ones are noticed."""

import json
from pathlib import Path

import pytest

from simulations import benchmarks
from simulations.benchmarks.harness.tables import ROOT, block, documents, fill, sst2

RESULTS = [
    {
        "seed": seed,
        "epsilon": epsilon,
        "test_accuracy": accuracy,
        "validation_accuracy": 0.8,
        "seconds": 600.0,
        "rounds": 200,
        "dimension": 9218,
        "commit": "abc123",
        "machine": "2 cores",
    }
    for epsilon, seed, accuracy in ((4.0, 0, 0.80), (4.0, 1, 0.82), (2.0, 0, 0.75))
]


def test_sst2_has_one_line_per_privacy_level_with_mean_and_deviation() -> None:
    lines = sst2(RESULTS).splitlines()
    assert lines[2] == "| 2 | 75.0 % | 80.0 % | 200 | 9,218 | 10:00 | 1 |"
    assert lines[3] == "| 4 | 81.0 % ± 1.4 | 80.0 % ± 0.0 | 200 | 9,218 | 10:00 | 2 |"
    assert lines[-1] == "Seeds 0, 1; machine: 2 cores; commit `abc123`."


def test_a_block_is_replaced_whole_and_filling_twice_changes_nothing(tmp_path: Path) -> None:
    text = "before\n<!-- table:sst2 -->\nold numbers\n<!-- end table:sst2 -->\nafter\n"
    assert "Not measured yet" in fill(text, tmp_path)
    (tmp_path / "sst2.json").write_text(json.dumps(RESULTS))
    filled = fill(text, tmp_path)
    assert "old numbers" not in filled
    assert "| 4 | 81.0 % ± 1.4" in filled
    assert filled.startswith("before\n<!-- table:sst2 -->\n|")
    assert filled.endswith("<!-- end table:sst2 -->\nafter\n")
    assert fill(filled, tmp_path) == filled


def test_wrong_markers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no table 'sst3'; known are"):
        block("sst3", tmp_path)
    with pytest.raises(ValueError, match="1 tables are opened but 0 are closed"):
        fill("<!-- table:sst2 -->\n| 81 % |\n", tmp_path)


def test_the_tables_of_this_repository_are_what_the_results_say() -> None:
    stale = [path.name for path in documents() if fill(path.read_text(encoding="utf-8")) != path.read_text()]
    assert stale == [], "run: python -m simulations.benchmarks.harness.tables"
    assert ROOT / "README.md" in documents()


@pytest.mark.parametrize(
    "name",
    [
        "papers/dp_lac_figure",
        "privacy/flower_dp",
        "privacy/mechanism_audit",
        "privacy/noise_throughput",
        "privacy/secure_sums",
        "privacy/published_accounting",
    ],
)
def test_asking_for_help_measures_nothing(name: str) -> None:
    """They take no arguments, and would overwrite their results whatever they are given."""
    text = Path(benchmarks.__file__).parent.joinpath(f"{name}.py").read_text(encoding="utf-8")
    assert "    typer.run(main)" in text.partition('if __name__ == "__main__":')[2]
