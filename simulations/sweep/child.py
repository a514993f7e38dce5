"""One cell of a sweep, in a process of its own: a federated run, one of one site or public training, and its CPU time.

Started by :func:`simulations.engines.launcher.run_child`, with the arguments of :mod:`simulations.engines.inprocess`.
"""

import json
import logging
import sys
import time
from pathlib import Path

from server import notice
from server.config.load import load
from server.run_folder.names import CONFIG_FILE
from simulations.engines.inprocess import run_inprocess
from simulations.engines.processes import end_with_launcher
from simulations.engines.public_only import run_public_only
from simulations.sweep.cells import CELL_FILE, USAGE_FILE


def main(launcher: int, private: Path, folder: Path, plugins: str, keys: str = "{}") -> None:
    """Run, or by its keys resume, the cell whose folder holds ``config.toml`` and ``cell.json``."""
    end_with_launcher(launcher, private)
    notice.listen()
    sys.path.append(plugins)  # a user's own modules are found there, and shadow nothing
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    kind = json.loads((folder / CELL_FILE).read_text())["kind"]
    config = load(folder / CONFIG_FILE)
    if kind == "public-only":
        run_public_only(config, folder)
    else:
        run_inprocess(config, folder, keys=json.loads(keys))
    (folder / USAGE_FILE).write_text(json.dumps({"cpu_seconds": time.process_time()}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
