"""Which node is which client: settled once, kept, and never guessed."""

from pathlib import Path

import pytest

from privacy.errors import CorruptRun
from server.config.load import ConfigError
from server.network.grid import roster
from server.run_folder.names import ROSTER_FILE
from strategies.messages.dispatch import RoundFailed, quorum


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
    # who else is connected later does not matter
    assert settled(tmp_path, Nodes([1, 2, 3, 4, 5, 9])) == (2, 5, 9)


def test_too_many_nodes_leave_open_who_takes_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clients = 3, but 4 nodes"):
        settled(tmp_path, Nodes([1, 2, 3, 4]))
    assert not (tmp_path / ROSTER_FILE).exists()


def test_too_few_nodes_do_not_start_a_run(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match="2 of 3 nodes connected"):
        settled(tmp_path, Nodes([1, 2]), patience=0.0)


def test_a_resumed_run_waits_for_all_and_goes_on_with_half(tmp_path: Path) -> None:
    settled(tmp_path, Nodes([1, 2, 3]))
    told: list[str] = []
    grid = Nodes([4], [4], [4, 2], [1, 2, 3])
    assert roster(tmp_path / ROSTER_FILE, grid, 3, patience=30.0, tell=told.append) == (1, 2, 3)  # type: ignore[arg-type]
    waiting = "waiting for nodes: {} of 3 nodes are connected"
    assert told == [waiting.format(0), waiting.format(1), "3 of 3 nodes are connected"]
    assert settled(tmp_path, Nodes([2, 3]), patience=0.0) == (1, 2, 3)
    with pytest.raises(RoundFailed, match=r"1 of 3 nodes are connected, at least 2 must be; .* nothing was charged"):
        settled(tmp_path, Nodes([2, 4]), patience=0.0)


def test_a_quorum_is_what_must_answer() -> None:
    assert [quorum(range(nodes)) for nodes in range(1, 7)] == [1, 1, 2, 2, 3, 3]
    assert all(2 * quorum(range(nodes)) >= nodes for nodes in range(1, 50))


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": [1, 2]}', '{"nodes": ["a", 2, 3]}'])
def test_a_damaged_list_is_not_guessed(text: str, tmp_path: Path) -> None:
    (tmp_path / ROSTER_FILE).write_text(text)
    with pytest.raises(CorruptRun):
        settled(tmp_path, Nodes([1, 2, 3]))
