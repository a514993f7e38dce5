"""Completions for the shell: presets, sweeps and settings."""

from server.config.load import known_keys
from simulations.presets.load import preset_files
from simulations.sweep.cells import sweep_files


def presets(begun: str) -> list[str]:
    """The names of presets that begin so."""
    return [name for name in preset_files() if name.startswith(begun)]


def sweeps(begun: str) -> list[str]:
    """The names of sweeps that begin so."""
    return [name for name in sweep_files() if name.startswith(begun)]


def settings(begun: str) -> list[str]:
    """The keys of settings that begin so, each with `=` behind it."""
    return [f"{key}=" for key in known_keys() if key.startswith(begun) and not key.endswith(".")]
