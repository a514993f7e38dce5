"""Words for whoever waits while a command does one long thing, such as importing torch."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from simulations.report.notation import drawable

EVERY = 5.0
"""Seconds after which something is said again where there is no terminal to draw on."""


@contextmanager
def waiting(text: str, console: Console) -> Iterator[None]:
    """Say ``text`` at once and while the block lasts: a moving line on a terminal, else a line every few seconds."""
    if drawable(console):
        with console.status(text):
            yield
        return
    began, over = time.monotonic(), threading.Event()

    def say() -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        while not over.wait(EVERY):
            spent = f"{text} ({time.monotonic() - began:.0f} s)"
            console.print(spent, markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
