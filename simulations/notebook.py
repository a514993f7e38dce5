"""The progress of a run in the output of a notebook's cell."""

import html
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from server.run_folder.round_record import RoundRecord
from server.run_folder.telemetry import read_status


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show a cell's output anew."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class NotebookProgress:
    """A progress bar with what the run says of itself, shown at once and renewed in place.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        shown: Any = import_module("IPython.display")  # its functions have no types
        self._folder, self._html, self._shown = folder, shown.HTML, ""
        self._handle = shown.display(shown.HTML("Starting the run ..."), display_id=True)

    def show(self, records: Sequence[RoundRecord]) -> None:
        """Show the newest record and the run's own words."""
        status = read_status(self._folder)
        words = [html.escape(text) for text in (status.message if status else "", str(records[-1]) if records else "")]
        bar = f'<progress value="{records[-1].round}" max="{records[-1].rounds}"></progress> ' if records else ""
        text = bar + "<br>".join(dict.fromkeys(filter(None, reversed(words))))
        if text and text != self._shown:
            self._shown = text
            self._handle.update(self._html(text))
