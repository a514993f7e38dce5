"""What a command says at its end and beside its work."""

import warnings

import pytest

from simulations.cli.exits import Warned


def test_a_warning_is_one_line_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = Warned()
        for _ in range(2):
            warnings.warn("delta = 0.01 is large", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert capfd.readouterr().err.splitlines() == ["Warning: delta = 0.01 is large", "Warning: another"]
