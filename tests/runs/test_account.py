"""Runs debit the account of their data once, before their first charge, and are refused when it is spent."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client.settings import state_folder
from privacy.errors import AccountRefused, CorruptRun
from privacy.ledger.account import TOLD, Account
from privacy.ledger.ledger import Ledger
from privacy.ledger.lifetime import Terms
from privacy.randomness.noise import GaussianNoise
from server.config.load import ConfigError
from server.runs.phase_plan import PhasesConfig
from server.runs.phases import PhasesRun
from simulations.cli.app import app
from simulations.preflight import check_run
from simulations.presets.asked import Asked
from strategies.calibration import Calibrated
from tests.cases.kinds import KINDS, Config, begin_or_resume
from tests.cases.runs import tiny
from tests.cases.sweeps import RunSweep, cache, run_sweep  # noqa: F401
from tests.runs.test_private_sweep import SWEEP


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "account" / "notes.jsonl"


def lifetime(file: Path, epsilon: float, delta: float = 0.1, unit: str = "client") -> None:
    Account.create(file, Terms("notes", unit, epsilon, delta, rule="sum"), state_folder()).close()


def paying(config: Any, file: Path) -> Any:
    """The settings, with this account."""
    if isinstance(config, PhasesConfig):
        return replace(config, run=paying(config.run, file), phases=config.phases[1:])
    return config.replace(privacy=config.privacy.replace(account=str(file)))


def debits(file: Path) -> list[str]:
    with Account.open(file, state_folder(), read_only=True) as account:
        return [debit.what for debit in account.debits.values()]


class Killed(BaseException):
    """The end of a process, which nothing catches."""


@pytest.mark.parametrize(("kind", "unit"), [("clients", "client"), ("records", "record"), ("phases", "record")])
def test_a_run_debits_before_it_charges_and_once_though_it_is_resumed(
    kind: str, unit: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = paying(KINDS[kind](tmp_path / "cache"), file)
    cost = PhasesRun(config).commitment.epsilon if isinstance(config, PhasesConfig) else config.privacy.epsilon
    lifetime(file, 1.5 * cost, unit=unit)
    seen: list[list[str]] = []

    def charged(self: Ledger, *given: Any) -> Any:
        seen.append(debits(file))
        return charge(self, *given)

    def killed(*given: Any) -> Any:
        raise Killed

    charge = Ledger.charge
    with monkeypatch.context() as patch:
        patch.setattr(GaussianNoise, "draw", killed)
        patch.setattr(Ledger, "charge", charged)
        with pytest.raises(Killed):
            begin_or_resume(config, tmp_path / "run")
    assert seen == [[str(tmp_path / "run")]]
    begin_or_resume(config, tmp_path / "run")
    assert debits(file) == seen[0]
    with pytest.raises(AccountRefused, match=r"epsilon [\d.]+ is left of [\d.]+, the run asks for"):
        begin_or_resume(config, tmp_path / "another")
    assert debits(file) == seen[0]


def test_a_run_goes_on_with_an_older_account_under_no_pretext(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though this machine's head was put back too: the run has spent, so it was debited."""
    config = paying(KINDS["clients"](tmp_path / "cache"), file)
    lifetime(file, 10.0)
    before = {path: path.read_bytes() for path in (file, *state_folder().iterdir())}
    with monkeypatch.context() as patch:
        patch.setattr(GaussianNoise, "draw", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            begin_or_resume(config, tmp_path / "run")
    for path, content in before.items():
        path.write_bytes(content)
    with pytest.raises(CorruptRun, match=r"has no debit of .*run, which has spent"):
        begin_or_resume(config, tmp_path / "run")


def test_a_run_that_is_closed_gives_back_its_rest_and_is_not_resumed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = paying(KINDS["clients"](tmp_path / "cache"), file)
    Account.create(file, Terms("notes", "client", 60.0, 0.1, order=2), state_folder()).close()
    with monkeypatch.context() as patch:
        patch.setattr(GaussianNoise, "draw", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            begin_or_resume(config, tmp_path / "run")
    with Account.open(file, state_folder(), read_only=True) as account:
        (whole,) = account.debits.values()
    done = CliRunner().invoke(app, ["account", "close", str(file), str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert f"{tmp_path / 'run'} is closed\n" in done.output
    assert "closed before its end" in done.output
    with Account.open(file, state_folder(), read_only=True) as account:
        (used,) = account.debits.values()
    assert used.closed
    assert 0 < (used.rho or 0) < (whole.rho or 0)
    with pytest.raises(AccountRefused, match="is closed, and its rest given back"):
        begin_or_resume(config, tmp_path / "run")


def test_the_command_refuses_the_third_run_before_it_begins(file: Path, tmp_path: Path) -> None:
    config = paying(tiny(tmp_path / "cache", output=str(tmp_path / "runs")), file)
    lifetime(file, 20.0)
    (tmp_path / "run.toml").write_text(config.to_toml())
    commitment = Calibrated.from_json(check_run(Asked(config)).noise).commitment
    with Account.open(file, state_folder()) as account:
        account.debit("a", commitment, "runs/first")
        account.debit("b", commitment, "runs/second", basis=TOLD)
    third = CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--engine=inprocess", "-q"])
    assert third.exit_code == 2, third.output
    assert "privacy.account: account" in third.output
    assert "epsilon 4 is left of 20, the run asks for 8" in third.output
    assert "privacy.epsilon = 4 with privacy.delta = 0.01 fits" in third.output
    assert not (tmp_path / "runs").exists()
    shown = json.loads(CliRunner().invoke(app, ["account", "show", str(file), "--json"]).output)
    assert shown["spent"] == {"epsilon": 16.0, "delta": 0.02}
    assert [run["what"] for run in shown["runs"]] == ["runs/first", "runs/second"]
    words = CliRunner().invoke(app, ["account", "show", str(file)]).output
    assert "epsilon 8.00 at delta 1e-2  runs/second (as its server says: a policy, not a proof)\n" in words
    assert "spent: epsilon 16.00 at delta 2e-2, all together\n" in words
    assert "left: 20.0\N{NO-BREAK SPACE}% (epsilon 4, delta 0.08)  [########################......]\n" in words


def test_an_account_is_made_handed_over_and_refused_by_the_command(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(code: int, *command: str) -> str:
        done = CliRunner().invoke(app, ["account", *command])
        assert done.exit_code == code, done.output
        return done.output

    lifelong = ("--data=notes", "--unit=client", "--delta=1e-5")
    assert "by a Rényi filter at order 6\nspent: nothing\nleft: 100.0" in said(
        0, "create", str(file), *lifelong, "--epsilon=4"
    )
    assert "is an account already" in said(2, "create", str(file), *lifelong, "--epsilon=9")
    assert "epsilon must be > 0" in said(2, "create", str(tmp_path / "b"), *lifelong, "--epsilon=-1")
    head = said(0, "verify", str(file)).rsplit(maxsplit=1)[-1]
    assert "line 1 is not the line seen before" in said(2, "verify", str(file), "--head", f"1:{'0' * 64}")
    here = state_folder()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert "this machine does not hold the account" in said(0, "show", str(file))
    seat = said(0, "seat").strip()
    assert "is held by another machine" in said(2, "move", str(file), "--to", "0" * 64)
    monkeypatch.setenv("XDG_STATE_HOME", str(here.parent))
    assert "is closed here" in said(0, "move", str(file), "--to", seat)
    assert "is held by another machine" in said(2, "move", str(file), "--to", "0" * 64)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert "does not hold" not in said(0, "show", str(file), "--head", head)


def test_a_run_without_a_guarantee_or_without_an_account_is_refused(file: Path, tmp_path: Path) -> None:
    config = paying(tiny(tmp_path / "cache"), file)
    with pytest.raises(ConfigError, match="there is no account; make one"):
        check_run(Asked(config))
    lifetime(file, 20.0)
    bare = config.replace(privacy=config.privacy.replace(noise="insecure-zero", non_private=True))
    with pytest.raises(ConfigError, match="the run gives no guarantee"):
        check_run(Asked(bare))
    with pytest.raises(ValueError, match="each names an account in the settings of its node"):
        paying(KINDS["sites"](tmp_path / "cache"), file)


@pytest.fixture
def sweep_of(file: Path, tmp_path: Path, run_sweep: RunSweep) -> Callable[..., tuple[int, str]]:  # noqa: F811
    """A sweep of one variant over these seeds, on an account that pays for one."""
    lifetime(file, 7.0)

    def run(seeds: str, *options: str) -> tuple[int, str]:
        text = SWEEP.replace('["fixed", "held", "broken"]\nseeds = [0]', f'["fixed"]\nseeds = {seeds}')
        paid = f'name = "tiny"\n[settings]\nprivacy.account = "{file}"\n'
        (tmp_path / "tiny.toml").write_text(text.replace('name = "tiny"\n', paid, 1))
        return run_sweep(*options)

    return run


def test_a_sweep_that_is_too_much_is_refused_whole(file: Path, sweep_of: Callable[..., tuple[int, str]]) -> None:
    code, output = sweep_of("[0, 1]")
    assert (code, "the 2 runs ask for 8" in output) == (2, True), output
    assert "privacy.epsilon = 3.5 with privacy.delta = 0.001 fits for each" in output
    assert debits(file) == []


@pytest.mark.nightly  # a minute
def test_a_private_sweep_is_one_debit(
    file: Path, sweep_of: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.sweep.candidates.draw", lambda tries, cells: [0, 0])
    for _ in range(2):  # the second time it is done
        code, output = sweep_of("[0]", "--private", "--tries=2")
        assert code == 0, output
        assert len(debits(file)) == 1
