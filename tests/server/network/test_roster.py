"""Which node is which client: settled once, kept, and never guessed."""

from pathlib import Path

import pytest

from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.network.grid import roster
from server.run_folder.names import ROSTER_FILE
from strategies.dispatch import RoundFailed


class Nodes:
    """A grid that knows nothing but nodes, which come one after the other."""

    settle = 0.0

    def __init__(self, *steps: list[int]) -> None:
        self._steps = list(steps)

    def get_node_ids(self) -> list[int]:
        return self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]


def settled(folder: Path, grid: Nodes, clients: int = 3, patience: float = 5.0) -> tuple[int, ...]:
    return roster(folder / ROSTER_FILE, grid, clients, patience=patience)  # type: ignore[arg-type]


def test_it_waits_for_all_and_keeps_them_in_order(tmp_path: Path) -> None:
    assert settled(tmp_path, Nodes([], [9], [9, 2], [9, 2, 5])) == (2, 5, 9)
    # who is connected later does not matter
    assert settled(tmp_path, Nodes([1, 2, 3, 4])) == (2, 5, 9)


def test_too_many_nodes_leave_open_who_takes_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clients = 3, but 4 nodes"):
        settled(tmp_path, Nodes([1, 2, 3, 4]))
    assert not (tmp_path / ROSTER_FILE).exists()


def test_too_few_nodes_do_not_start_a_run(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match="2 of 3 nodes connected"):
        settled(tmp_path, Nodes([1, 2]), patience=0.0)


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": [1, 2]}', '{"nodes": ["a", 2, 3]}'])
def test_a_damaged_list_is_not_guessed(text: str, tmp_path: Path) -> None:
    (tmp_path / ROSTER_FILE).write_text(text)
    with pytest.raises(CorruptRun):
        settled(tmp_path, Nodes([1, 2, 3]))
