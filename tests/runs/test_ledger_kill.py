"""kill -9 at any moment of the real charged_release: never a release without its charge, and the budget stays spent.

A warm process (this file run as a script) forks a worker per kill. Each worker opens the ledger, makes charged
releases one after the other and writes each to a file of its own; it is killed with SIGKILL, half of the time at a
random moment, half of the time between the durable charge and the release: the noise announces itself and waits.
"""

import importlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

KILLS_PER_LEDGER = 10
STEPS = 10_000


def test_t7_kill_between_charge_and_release_a_few_times(tmp_path: Path) -> None:
    check(tmp_path, kills=4)


@pytest.mark.slow
def test_t7_kill_between_charge_and_release_a_hundred_times(tmp_path: Path) -> None:
    check(tmp_path, kills=100)


def check(folder: Path, kills: int) -> None:
    root = Path(__file__).parents[2]
    script = [sys.executable, __file__, str(folder), str(kills)]
    done = subprocess.run(script, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    survived, charges, unreleased = map(int, done.stdout.split())
    assert survived == 0, done.stderr
    assert unreleased >= kills // 2, "every second kill must have hit the window between charge and release"
    assert charges >= kills // 2


def main(folder: Path, kills: int) -> None:
    """Kill, look, repeat. Prints: workers that survived, charges in all, charges that were never released."""
    from privacy.commitment import Commitment, FloorStep
    from privacy.events import Poisson
    from privacy.ledger.ledger import Ledger

    importlib.import_module("privacy.mechanism")  # once, so that every fork starts warm
    moment = random.Random(5)
    sampling = Poisson(0.1, 1000)
    survived = charges = unreleased = 0
    for kill in range(kills):
        path = folder / f"ledger-{kill // KILLS_PER_LEDGER}.jsonl"
        releases = path.with_suffix("")
        if not path.exists():
            releases.mkdir()
            floor = (FloorStep("round", sampling, 30.0, STEPS),)
            Ledger.create(path, Commitment("client", "add_remove", 1000, 4.0, 1e-5, floor=floor)).close()
        before = count(path)
        aimed, noises = kill % 2 == 0, moment.randint(1, 3)
        signals, noise_drawn = os.pipe()
        worker = os.fork()
        if worker == 0:
            work(path, releases, noise_drawn, last=noises if aimed else 0)
        os.close(noise_drawn)
        drawn = -1  # the first byte says that the worker is ready, then there is one per noise drawn
        for _ in range(noises + aimed):
            drawn += len(os.read(signals, 1))
        time.sleep(moment.uniform(0.0, 0.004 if aimed else 0.02))
        os.kill(worker, signal.SIGKILL)
        survived += os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) != -signal.SIGKILL
        while late := os.read(signals, 1):
            drawn += len(late)
        os.close(signals)
        after = count(path)
        assert after[0] - before[0] >= drawn, "noise is drawn for a charge that is on the disk, or not at all"
        assert after[0] >= before[0], "no charge is ever forgotten"
        released = {int(file.name) for file in releases.iterdir()}
        assert released <= set(range(after[0])), "never a release without its charge"
        with Ledger.open(path) as ledger:
            noted = {i for i, charge in enumerate(ledger.charges) if charge.released_at is not None}
            assert released <= noted
            assert ledger.steps_left("round") == STEPS - after[0]
        charges += after[0] - before[0]
        unreleased += after[1] - before[1]
    print(survived, charges, unreleased)


def count(path: Path) -> tuple[int, int]:
    """Charges of a ledger, and how many of them were never released."""
    from privacy.ledger.ledger import Ledger

    with Ledger.open(path, read_only=True) as ledger:
        return len(ledger.charges), sum(charge.released_at is None for charge in ledger.charges)


def work(path: Path, releases: Path, noise_drawn: int, last: int) -> None:
    """Release until killed; in the noise number ``last`` (from 1; 0 for none), wait for that."""
    import torch

    from privacy.clipping.norms import FlatClip
    from privacy.contribution import Contribution, Plan
    from privacy.events import Poisson
    from privacy.ledger.ledger import Ledger
    from privacy.mechanism import charged_release
    from privacy.randomness.noise import GaussianNoise
    from privacy.randomness.sampling import CohortSampler

    numbers = itertools.count(1)

    class DawdlingNoise(GaussianNoise):
        """The real noise, which takes its time, so that a kill finds it at work."""

        def draw(self, parts: object) -> torch.Tensor:
            os.write(noise_drawn, b"n")
            time.sleep(600 if next(numbers) == last else 0.003)
            return super().draw(parts)  # type: ignore[arg-type]

    try:
        torch.set_num_threads(1)
        plan = Plan(FlatClip(1.0, 50), 30.0)
        ledger = Ledger.open(path)
        os.write(noise_drawn, b"r")
        while True:
            number = len(ledger.events)
            release = charged_release(
                Contribution.zero(plan),
                plan,
                CohortSampler.create().draw(Poisson(0.1, 1000), number),
                ledger=ledger,
                noise=DawdlingNoise(),
            )
            (releases / str(number)).write_bytes(release.update.numpy().tobytes())
    except BaseException:  # whatever happens here must end the fork, never unwind into the parent's code
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
