"""The notebooks of docs/notebooks, executed: outputs are what the code prints today.

    python docs/tools/notebooks.py docs/notebooks            # write the outputs into them

Each runs in a folder of its own, as a reader would who has downloaded it. A cell that fails ends the command.
"""

import argparse
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

TIMEOUT = 1200
"""Seconds for one cell."""


def execute_notebook(notebook: Path, folder: Path) -> Any:
    """Execute a notebook in `folder`; returns it with the outputs of its cells.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message holds its traceback.
    """
    from nbclient import NotebookClient

    document = _format().read(notebook, as_version=4)
    NotebookClient(document, timeout=TIMEOUT, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in document.cells:
        cell.metadata.pop("execution", None)  # when each cell ran
    return document


def _format() -> Any:
    return import_module("nbformat")  # its functions have no types


def main() -> None:
    """Execute every notebook of a folder in place."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", type=Path, help="folder of notebooks")
    for notebook in sorted(parser.parse_args().notebooks.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            _format().write(execute_notebook(notebook, Path(folder)), notebook)
        print(notebook)


if __name__ == "__main__":
    main()
