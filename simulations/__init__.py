"""The outside of a run: the `lacquer` command, the two engines, presets, progress and reports; and Lacquer in Python.

What Python programs may use is :data:`__all__`, defined in :mod:`simulations.api`. It is imported when it is first
asked for: the command imports this package too, and must start at once.
"""

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulations.api import Compared, RunResult, compare, load_run, resume, run

__all__ = ["Compared", "RunResult", "compare", "load_run", "resume", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with warnings.catch_warnings():
        # tqdm's word in a notebook without ipywidgets; none of its bars is shown
        warnings.filterwarnings("ignore", message="IProgress not found")
        from simulations import api

    return getattr(api, name)
