from pathlib import Path

import pytest

from tests.cases.disk import disk  # noqa: F401
from tests.end_to_end.lacquer_process import TINY, Lacquer


@pytest.fixture
def lacquer(tmp_path: Path):
    """Starts `lacquer run SETTINGS ARGUMENTS` in an empty folder; ends what is left of it after the test."""
    (tmp_path / "tiny.toml").write_text(TINY)
    started: list[Lacquer] = []

    def start(*arguments: str, settings: str = "tiny.toml") -> Lacquer:
        started.append(Lacquer(tmp_path, settings, *arguments))
        return started[-1]

    yield start
    for run in started:
        run.end()
