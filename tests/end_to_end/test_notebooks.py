"""The notebooks run from first cell to last, in a folder of their own; their outputs name nobody's folders."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = DOCS / "notebooks"
execute_notebook = runpy.run_path(str(DOCS / "tools/notebooks.py"))["execute_notebook"]
TIERS = {
    "quickstart": [pytest.mark.slow, pytest.mark.ray],
    **{name: [pytest.mark.nightly] for name in ("own_strategy", "preference", "go_on", "synthesise")},
}
ON_FLOWER = {"quickstart", "own_strategy"}


def outputs(notebook: object) -> list[dict]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]  # type: ignore[attr-defined]


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(TIERS)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in TIERS.items()])
def test_a_notebook_runs_and_prints_no_warning(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as the kernels of some desktops have it
    notebook = NOTEBOOKS / f"{name}.ipynb"
    now, shown = outputs(execute_notebook(notebook, tmp_path)), outputs(nbformat.read(notebook, as_version=4))
    runs = list((tmp_path / "runs").iterdir())
    assert runs
    assert all((run / "flower.log").exists() == (name in ON_FLOWER) for run in runs)
    assert [output.output_type for output in now] == [output.output_type for output in shown]
    for each in (now, shown):
        assert not [output for output in each if output.get("name") == "stderr"]
        assert sum("<progress" in str(output) for output in each) == len(runs), "every run showed its bar"
        assert not re.findall(r"/(?:home|root|tmp|work|Users)/[^\s'\"]*", str(each))


@pytest.mark.slow
def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from simulations import no_such_name")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(CellExecutionError, match="no_such_name"):
        execute_notebook(tmp_path / "broken.ipynb", tmp_path)
