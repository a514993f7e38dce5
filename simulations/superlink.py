"""Flower's SuperLink as a child of the launcher: it ends when the launcher ends, however that happens."""

import sys

from flwr.superlink.cli import flower_superlink

from simulations.processes import exit_with_parent

if __name__ == "__main__":
    exit_with_parent(int(sys.argv.pop(1)))
    sys.argv[0] = "flower-superlink"
    flower_superlink()
