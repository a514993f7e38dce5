"""Processes a run starts: a tag to know them by, and an end for all of them.

Ray starts trees of processes that detach from their parents. Every process of a run inherits an environment variable
with the run's tag; together with the family tree seen while the run lives, that finds all of them later, also those
whose parent is gone. Only processes found so are ever stopped, each by its id and start time.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from server.notice import SECONDS

TAG = "LACQUER_RUN_TAG"
REFUSED = 2
"""Exit code of a run's process that refused to begin; the run's status says why."""


class Family:
    """The processes of one run: those that carry its tag, and all their descendants."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._leader: psutil.Process | None = None
        self._seen: set[psutil.Process] = set()  # psutil compares by id and start time: a reused id is another process

    def lead(self, pid: int) -> None:
        """Name the process of the ServerApp, which :meth:`stop` ends before anybody else hears of the end."""
        self._leader = psutil.Process(pid)

    def members(self) -> list[psutil.Process]:
        """Living processes of the run (zombies are not living). Call it now and then while the run lasts."""
        me = psutil.Process()
        found = {process for process in psutil.process_iter() if _environment(process).get(TAG) == self.tag}
        for process in list(self._seen | found):
            found.update(_descendants(process))
        found.discard(me)
        self._seen = {process for process in self._seen | found if alive(process)}
        return sorted(self._seen, key=lambda process: process.pid)

    def stop(self, grace: float = 3.0) -> list[psutil.Process]:
        """End every member, and return those that would not die (none, unless the kernel holds them).

        The leader ends before anybody else hears of the end: were the workers to go first, the server would take their
        silence for a cohort that failed, and spend budget on it. It has notice (:mod:`server.notice`) and is then
        killed. The others are asked (SIGTERM), then killed after ``grace`` seconds.
        """
        self.members()  # the leader's children are known by it, and must be seen before it goes
        if self._leader is not None:
            _signal(self._leader, signal.SIGTERM)
            psutil.wait_procs([self._leader], timeout=SECONDS)
            _signal(self._leader, signal.SIGKILL)
            psutil.wait_procs([self._leader], timeout=grace)
        members = self.members()
        for process in members:
            _signal(process, signal.SIGTERM)
        psutil.wait_procs(members, timeout=grace)
        for _ in range(5):
            if not (members := self.members()):
                break
            for process in members:
                _signal(process, signal.SIGKILL)
            psutil.wait_procs(members, timeout=grace)
        return members


def end_with_launcher(launcher: int, folder: Path) -> None:
    """Watch the process ``launcher``, the parent; when it is gone, end the whole run and remove its private folder.

    A launcher stops its run itself, unless it is killed (by hand, or for want of memory). Then this process, the one of
    the ServerApp, ends at once, and one that it starts for it ends the others: Ray's daemons outlive a driver that had
    no time to shut them down.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        command = [sys.executable, "-m", "simulations.engines.processes", os.environ[TAG], str(folder)]
        subprocess.Popen(command, cwd="/", start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()


@contextmanager
def deaf() -> Iterator[None]:
    """Ignore Ctrl-C and requests to end within the block: an impatient second one must not interrupt the stopping."""
    names = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    before = {name: signal.signal(name, signal.SIG_IGN) for name in names} if main else {}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):  # another user's process, or one that just ended: not ours
        return {}


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


if __name__ == "__main__":  # the end of a run whose launcher is gone
    tag, private = sys.argv[1:]
    Family(tag).stop()
    shutil.rmtree(private, ignore_errors=True)
