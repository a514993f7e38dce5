"""Identities and lists: made once, shown again, refused if they cannot be."""

from pathlib import Path

from typer.testing import CliRunner, Result

from privacy.secagg.federation import Federation, load_identity
from simulations.cli.app import app


def lacquer(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))


def test_three_clients_make_a_list(tmp_path: Path) -> None:
    public = [lacquer("identity", str(tmp_path / f"{i}.key")).output.strip() for i in range(3)]
    assert lacquer("identity", str(tmp_path / "0.key")).output.strip() == public[0], "an identity is made once"
    assert len(load_identity(tmp_path / "0.key")) == 32
    path = tmp_path / "federation.json"
    members = [word for one in public for word in ("--member", one)]
    refused = lacquer("federation", str(path), *members, "--survivors", "2")
    assert refused.exit_code == 2
    assert "--epsilon and --delta must be > 0" in refused.output
    budget = ("--epsilon", "4", "--delta", "1e-2")
    made = lacquer("federation", str(path), *members, "--survivors", "2", "--least-noise", "1.5", *budget)
    assert made.exit_code == 0, made.output
    assert made.output == lacquer("federation", str(path)).output
    assert "3 clients, 2 must hand in a vector, 0 may collude, 2 open a sum" in made.output
    federation = Federation.from_text(path.read_text())
    assert [one.hex() for one in federation.members] == public
    assert federation.least_noise_multiplier == 1.5
    assert (federation.commitment.epsilon, federation.commitment.delta) == (4.0, 1e-2)
    assert "all runs together: epsilon 4 at delta 0.01" in made.output
    assert federation.digest.hex() in made.output
    assert lacquer("federation", str(path), *members).exit_code == 2, "a list is never overwritten"


def test_what_is_no_federation_is_refused(tmp_path: Path) -> None:
    for arguments in (["--member", "00" * 32], ["--member", "zz"], [], ["--member", "00" * 32, "--member", "00" * 32]):
        assert lacquer("federation", str(tmp_path / "f.json"), *arguments).exit_code == 2
    named = lacquer("federation", str(tmp_path / "f.json"), "--member", "zz")
    assert "--member zz: is no public identity" in named.output
    assert "`lacquer identity`" in named.output
    (tmp_path / "open.key").write_text("00" * 32)
    (tmp_path / "open.key").chmod(0o644)
    refused = lacquer("identity", str(tmp_path / "open.key"))
    assert refused.exit_code == 2
    assert "group or others" in refused.output
