"""``python -m simulations``: the ``lacquer`` command."""

from simulations.cli import app

app(prog_name="lacquer")
