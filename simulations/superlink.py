"""Flower's SuperLink as a child of the launcher: it ends with the launcher, however that ends, and takes all along."""

import sys
from pathlib import Path

from flwr.superlink.cli import flower_superlink

from simulations.processes import end_with_launcher

if __name__ == "__main__":
    launcher, folder = sys.argv[1:3]
    end_with_launcher(int(launcher), Path(folder))
    sys.argv[:3] = ["flower-superlink"]
    flower_superlink()
