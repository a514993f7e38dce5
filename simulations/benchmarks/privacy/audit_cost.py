"""What `lacquer audit` with its defaults adds to the quickstart, in CPU seconds and on the wall.

Run: `python -m simulations.benchmarks privacy.audit_cost [--repeats 3]`.

Each repeat runs the quickstart as a user does, then audits it; the ratio is taken within a repeat. The first repeat
prepares data and calibrates, the others find both in their caches, which makes the audit's share larger. CPU seconds
count every process of the command, Ray's and Flower's too, and depend little on what else the machine does, once
threads that wait sleep (OMP_WAIT_POLICY=PASSIVE): on a busy machine they would spin while others have the core.

Linux: orphans of the command become this process's children, so that none is missed. Processes are looked at ten times
a second; what one uses between its last look and its end is missed (up to a tenth of a second each).
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from simulations.benchmarks.harness.markdown import Columns, provenance
from simulations.benchmarks.harness.markdown import table as rows_of
from simulations.benchmarks.harness.results import say, write

GOAL = 0.25
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
_LOOK = 0.1


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends.

    Raises:
        OSError: if the system refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def both_clocks(command: list[str], environment: Mapping[str, str]) -> tuple[float, float, str]:
    """CPU seconds of a command with all its processes, seconds on the wall, and what it printed last.

    Raises:
        RuntimeError: if it fails.
    """
    own, used, begun = psutil.Process(), dict[tuple[int, float], float](), time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(environment))
        while process.poll() is None:
            _look(own, used)
            time.sleep(_LOOK)
        wall = time.perf_counter() - begun
        while _look(own, used):  # those that end after the command
            time.sleep(_LOOK)
        _forget_the_dead()
        log.seek(0)
        lines = log.read().split("\n")
        if process.returncode:
            raise RuntimeError(f"{command} failed: {lines[-20:]}")
    return sum(used.values()), wall, next(line for line in reversed(lines) if line)


def _forget_the_dead() -> None:
    """Reap the orphans that have ended: until then the next command's children would hold them too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _look(own: psutil.Process, used: dict[tuple[int, float], float]) -> bool:
    """Note what every descendant has used so far; whether one still runs."""
    running = False
    for process in own.children(recursive=True):
        try:
            with process.oneshot():
                times, dead = process.cpu_times(), process.status() == psutil.STATUS_ZOMBIE
                used[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
        running |= not dead
    return running


def measured(scratch: Path) -> dict[str, float]:
    """One run of the quickstart and its audit."""
    program, load = [sys.executable, "-m", "simulations"], os.getloadavg()[0]
    environment = {**os.environ, "XDG_CACHE_HOME": str(scratch / "xdg"), "OMP_WAIT_POLICY": "PASSIVE"}
    folder = [f"--set=output={scratch / 'runs'}", f"--set=data.cache={scratch / 'cache'}"]
    run_cpu, run_wall, run = both_clocks([*program, "run", "quickstart", "--quiet", *folder], environment)
    audit_cpu, audit_wall, _ = both_clocks([*program, "audit", run], environment)
    return {
        "load_before": round(load, 2),
        "run_cpu_seconds": run_cpu,
        "run_seconds": run_wall,
        "audit_cpu_seconds": audit_cpu,
        "audit_seconds": audit_wall,
    }


def table(results: Mapping[str, Any]) -> str:
    """A row a repeat, and the share in words."""
    columns: Columns = {
        "repeat": "{number}",
        "load before": "{load_before:.1f}",
        "quickstart, CPU": "{run_cpu_seconds:.0f} s",
        "audit, CPU": "{audit_cpu_seconds:.0f} s",
        "adds, CPU": lambda row: f"{share(row, 'cpu_seconds'):.0%}".replace("%", " %"),
        "quickstart, wall": "{run_seconds:.0f} s",
        "audit, wall": "{audit_seconds:.0f} s",
        "adds, wall": lambda row: f"{share(row, 'seconds'):.0%}".replace("%", " %"),
    }
    rows = [{"number": number, **row} for number, row in enumerate(results["rows"], 1)]
    most = max(share(row, "cpu_seconds") for row in results["rows"])
    among = "in one repeat" if len(rows) == 1 else f"at most, in {len(rows)} repeats,"
    said = f"The default audit adds {among} {most:.0%} of the quickstart's CPU seconds; the goal is {GOAL:.0%}."
    cores = results["environment"]["cores"]
    return (
        f"{said.replace('%', ' %')}\n\n{rows_of(rows, columns)}\nThe first repeat also prepares data and calibrates. "
        f"A load above {cores} says that other programs had the cores: then compare CPU seconds. Waiting threads slept "
        f"(`OMP_WAIT_POLICY=PASSIVE`).\n{provenance(results)}"
    )


def share(row: Mapping[str, float], clock: str) -> float:
    """What the audit adds, over what the run took."""
    return row[f"audit_{clock}"] / row[f"run_{clock}"]


def main(repeats: Annotated[int, typer.Option(min=1, help="runs, each with its audit")] = 3) -> None:
    """Measure and write the results."""
    adopt_orphans()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(repeats):
            rows.append(measured(Path(scratch)))
            say(rows[-1])
            write("audit-cost", {"goal": GOAL, "rows": rows})
    say(f"audit over quickstart, CPU: {statistics.median(share(row, 'cpu_seconds') for row in rows):.3f}")


if __name__ == "__main__":
    typer.run(main)
