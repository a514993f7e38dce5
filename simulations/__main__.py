"""``python -m simulations``: the ``lacquer`` command."""

from simulations.cli.app import app

app(prog_name="lacquer")
