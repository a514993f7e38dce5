"""Notice that this run's process will be killed: SIGTERM, which queues and spot machines send half a minute before.

Nothing that was paid for is lost. While a release is charged and in no checkpoint, the process ends behind its
checkpoint; at any other moment it ends at once. It does not wait for a round to end: the workers hear of the end too,
and without them the server would pay for a cohort that failed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 20.0
"""For which a launcher waits for a process that has notice; queues allow 30 s in all."""
_TWICE = 0.1
"""Seconds between two looks that must agree: a charge counts once it is on the disk."""
ENDED = 128 + signal.SIGTERM

_given = threading.Event()
_unsaved: list[Callable[[], bool]] = []


def listen() -> None:
    """Take SIGTERM for notice from now on, in this process; done again where a library has taken it for itself."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python hears signals there only
    signal.signal(signal.SIGTERM, lambda number, frame: _given.set())
    if not any(thread.name == "notice" for thread in threading.enumerate()):
        threading.Thread(target=_end_once_saved, name="notice", daemon=True).start()


def is_given() -> bool:
    """Whether this process is to end."""
    return _given.is_set()


def end_if_given() -> None:
    """End this process where there is notice. For a place where nothing is unsaved."""
    if is_given():
        os._exit(ENDED)


@contextmanager
def protect(unsaved: Callable[[], bool]) -> Iterator[None]:
    """Keep this process from ending by notice while something is ``unsaved``, within the block."""
    _unsaved.append(unsaved)
    try:
        yield
    finally:
        _unsaved.remove(unsaved)


def _end_once_saved() -> None:
    _given.wait()
    while True:
        before = _anything_unsaved()
        time.sleep(_TWICE)
        if not before and not _anything_unsaved():
            os._exit(ENDED)


def _anything_unsaved() -> bool:
    return any(unsaved() for unsaved in list(_unsaved))
