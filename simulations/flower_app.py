"""The ServerApp of ``flwr run`` and of a bundle made by ``flwr build``: the run, and its report.

``lacquer run`` starts :mod:`server.app` and writes the report itself.
"""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from server.app import main as train
from server.app import run_folder
from simulations.report.page import attempt_report

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what ``context.run_config`` describes. The report is written when the run failed, too."""
    folder = run_folder(context)
    try:
        train(grid, context)
    finally:
        if folder.is_dir():
            attempt_report(folder)
