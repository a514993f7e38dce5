"""Processes a run starts: a free port, a tag to know them by, and an end for all of them.

Flower and Ray start trees of processes that detach from their parents. Every process of a run inherits an environment
variable with the run's tag; together with the family tree seen while the run lives, that finds all of them later, also
those whose parent is gone. Only processes found so are ever stopped, each by its id and start time.
"""

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

TAG = "LACQUER_RUN_TAG"
DRIVER = "flwr-simulation"  # Flower's command that holds the ServerApp and drives Ray


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Family:
    """The processes of one run: those that carry its tag, and all their descendants."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self._seen: set[psutil.Process] = set()  # psutil compares by id and start time: a reused id is another process

    def adopt(self, pid: int) -> None:
        """Take in a process that was started before the run had a tag."""
        self._seen.add(psutil.Process(pid))

    def members(self) -> list[psutil.Process]:
        """Living processes of the run (zombies are not living). Call it now and then while the run lasts."""
        me = psutil.Process()
        found = {process for process in psutil.process_iter() if _environment(process).get(TAG) == self.tag}
        for process in list(self._seen | found):
            found.update(_descendants(process))
        found.discard(me)
        self._seen = {process for process in self._seen | found if alive(process)}
        return sorted(self._seen, key=lambda process: process.pid)

    def stop(self, first: str = DRIVER, grace: float = 3.0) -> list[psutil.Process]:
        """End every member, and return those that would not die (none, unless the kernel holds them).

        Members that run ``first`` are killed before anybody else hears of the end: were the workers to
        go first, the server would take their silence for a cohort that failed, and spend budget on it. A killed server
        loses nothing, for what it has spent is on disk. The others are asked (SIGTERM), then killed after ``grace``
        seconds.
        """
        drivers = [process for process in self.members() if running([process], first)]
        for process in drivers:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(drivers, timeout=grace)
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

    A launcher stops its run itself, unless it is killed (by hand, or for want of memory). Then this process, which it
    started, does it: Ray's daemons outlive a driver that had no time to shut them down.
    """
    tag = os.environ[TAG]

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        Family(tag).stop()
        shutil.rmtree(folder, ignore_errors=True)
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


def running(members: Iterable[psutil.Process], command: str) -> bool:
    """Whether one of the processes runs ``command``, a program or a script that an interpreter runs."""
    return any(command in (Path(part).name for part in _command_line(process)[:2]) for process in members)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):  # another user's process, or one that just ended: not ours
        return {}


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []


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
