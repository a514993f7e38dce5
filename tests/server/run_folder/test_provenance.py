"""What a run says of the code and the machine it ran on."""

import subprocess
from pathlib import Path

import pytest

from server.run_folder import provenance


def test_the_commit_is_that_of_the_checkout_and_marked_where_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert provenance.commit_of(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    assert provenance.commit_of(tmp_path) == head
    for name in ("README.md", "docs/page.svg", "simulations/benchmarks/results/speed.json"):  # no code
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("new")
        git("add", name)
    assert provenance.commit_of(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert provenance.commit_of(tmp_path) == f"{head}+"


def test_the_environment_asks_the_checkout_it_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "commit_of", lambda folder: str((folder / "pyproject.toml").is_file()))
    assert provenance.describe_environment()["commit"] == "True"
