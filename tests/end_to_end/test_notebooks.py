"""The notebooks run from first cell to last, in a folder of their own; their outputs name nobody's folders."""

import re
from pathlib import Path

import nbformat
import pytest

from simulations.tools.notebooks import executed

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def outputs(notebook: object) -> list[str]:
    return [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    now, shown = executed(notebook, tmp_path), nbformat.read(notebook, as_version=4)
    assert list((tmp_path / "runs").iterdir())
    assert len(outputs(now)) == len(outputs(shown)) >= 3
    assert not re.findall(r"/(?:home|root|tmp|work|Users)/[^\s'\"]*", " ".join(outputs(now) + outputs(shown)))


@pytest.mark.slow
def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from simulations import no_such_name")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(CellExecutionError, match="no_such_name"):
        executed(tmp_path / "broken.ipynb", tmp_path)
