"""The notebooks run from first cell to last, in a folder of their own; their outputs name nobody's folders."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = DOCS / "notebooks"
execute_notebook = runpy.run_path(str(DOCS / "tools/notebooks.py"))["execute_notebook"]
NAMES = ("quickstart", "own_strategy", "preference", "go_on", "synthesise")
ON_FLOWER = {"quickstart", "own_strategy"}


def outputs(notebook: object) -> list[dict]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]  # type: ignore[attr-defined]


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)


def check(name: str, notebook: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a notebook, and compare the kinds of its outputs with those that are shown in the documentation."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as the kernels of some desktops have it
    shown = outputs(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4))
    now = outputs(execute_notebook(notebook, folder))
    runs = list((folder / "runs").iterdir())
    assert runs
    assert all((run / "flower.log").exists() == (name in ON_FLOWER) for run in runs)
    assert [output.output_type for output in now] == [output.output_type for output in shown]
    for each in (now, shown):
        assert not [output for output in each if output.get("name") == "stderr"]
        assert sum("<progress" in str(output) for output in each) == len(runs), "every run showed its bar"
        assert not re.findall(r"/(?:home|root|tmp|work|Users)/[^\s'\"]*", str(each))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_prints_no_warning(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, NOTEBOOKS / f"{name}.ipynb", tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_the_first_notebook_runs_with_a_round_for_its_ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (NOTEBOOKS / "quickstart.ipynb").read_text()
    short = whole.replace('\\"rounds\\": 10', '\\"rounds\\": 1, \\"sampling-rate\\": 0.05')
    assert short != whole
    (tmp_path / "short.ipynb").write_text(short)
    check("quickstart", tmp_path / "short.ipynb", tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from simulations import no_such_name")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(CellExecutionError, match="no_such_name"):
        execute_notebook(tmp_path / "broken.ipynb", tmp_path)
