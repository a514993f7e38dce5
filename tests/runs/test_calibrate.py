"""`lacquer calibrate`: the page says what was asked, bad arguments end with 2."""

import json

import pytest
from typer.testing import CliRunner, Result

from simulations.cli.app import app
from simulations.cli.calibrate import page as calibrate_page

SMALL = ["--epsilon", "2", "--clients", "500", "--rate", "0.2", "--rounds", "5"]


def calibrate(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, ["calibrate", *arguments])


def test_the_page() -> None:
    done = calibrate(*SMALL, "--dimension", "1000", "--histogram", "10")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Epsilon 2 at delta 1e-5, add_remove: 500 clients, Poisson rate 0.2, 5 rounds"
    rows = {line.split("  ")[1].strip(): line for line in lines if line.startswith("  ")}
    assert "upper bound, nearly exact; calibrated with it" in rows["pld"]
    assert "never report it" in rows["gdp-approx"]
    assert [name for name in rows if " x " in name] == [
        "2 x clients",
        "4 x clients",
        "4 x clients, rate/4",
        "2 x rate",
        "2 x rounds",
    ]
    assert rows["now"].split()[1:4] == ["500", "100", "5"]
    assert rows["now"].rstrip().endswith("1.00 x")
    assert rows["2 x clients"].rstrip().endswith("0.50 x")
    assert max(map(len, lines)) <= 100


def test_narrow_terminals_and_other_sampling() -> None:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(
        app, ["calibrate", *SMALL, "--rate", "1", "--adjacency", "replace_one"]
    )
    assert done.exit_code == 0, done.output
    assert "cannot account this sampling" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert "…" not in done.output


def test_a_generous_delta_is_noted_once() -> None:
    done = calibrate(*SMALL, "--rate", "1", "--delta", "0.0015")
    assert done.exit_code == 0, done.output
    assert done.output.count("smaller is the custom") == 1
    assert "4 x clients: delta must be < 1/population" in done.output


def test_no_epsilon_is_printed_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PLD of this much noise is covered by delta alone; a table that says 0.0000 would promise too much."""
    monkeypatch.setattr(calibrate_page, "by_accountant", lambda setting, noise: {"pld": 0.0, "rdp": 3e-9})
    monkeypatch.setattr(calibrate_page, "alternatives", lambda now: [])
    done = calibrate(*SMALL)
    assert done.exit_code == 0, done.output
    assert [line.split()[1] for line in done.output.splitlines() if line.split()[:1] in (["pld"], ["rdp"])] == [
        "0.0001",
        "0.0001",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delta", "0.1"], "delta must be < 1/population"),
        (["--epsilon", "-1"], "epsilon must be > 0"),
        (["--dimension", "0"], "dimension must be an integer >= 1"),
        (["--epsilon", "500"], "protects no one"),
        (["--query", "0.5"], "which the extra releases and queries cost"),
    ],
)
def test_bad_arguments_end_with_two(arguments: list[str], message: str) -> None:
    done = calibrate(*SMALL, *arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_noise_of_clients_stands_beside_that_of_a_trusted_server() -> None:
    done = calibrate("--trust", "secagg", "--clients", "20", "--rounds", "5", "--rate", "0.5", "--colluding", "2")
    assert done.exit_code == 0, done.output
    rows = {line.split("  ")[1].strip(): line.split() for line in done.output.splitlines() if line.startswith("  ")}
    least, whole = rows["secagg, 16 clients left: what is guaranteed"], rows["secagg, all 20 left"]
    assert float(least[-1]) == float(whole[-1]) == pytest.approx(float(least[-3]) / 14**0.5, rel=1e-3)
    assert float(whole[-3]) == pytest.approx(float(least[-3]) * (20 / 14) ** 0.5, rel=1e-3)
    central = float(rows["trusted server, everybody in every round"][-2])
    assert central < float(least[-3]) < 1.15 * central, "Rényi accounting costs some percent, nothing more"
    assert "12 open a sum" in done.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--survivors", "3"], "survivors must be in 11..20"),
        (
            ["--colluding", "19"],
            "colluding = 19 is too large for 20 clients of which 20 must be left; it may be at most 18",
        ),
        (["--colluding", "10", "--survivors", "15"], "colluding = 10 is too large"),
        (["--histogram", "10"], "trust secagg goes with"),
        (["--clients", "3000"], "parties must be <= 1024"),
    ],
)
def test_what_clients_cannot_agree_on_is_refused(arguments: list[str], named: str) -> None:
    done = calibrate("--trust", "secagg", "--clients", "20", *arguments)
    assert done.exit_code == 2
    assert named in done.output


def test_a_program_gets_the_noise_as_json() -> None:
    done = calibrate(*SMALL, "--dimension", "100", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["noise_norm_on_mean"] == pytest.approx(10 * said["noise_multiplier"] / said["expected_cohort"])
    assert calibrate(*SMALL, "--trust", "secagg", "--json").exit_code == 2
