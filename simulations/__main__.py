"""``python -m simulations``: the ``lacquer`` command."""

from simulations.cli.app import run_command

run_command()
