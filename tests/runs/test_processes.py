import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from simulations.engines.processes import TAG, Family, alive, deaf

PATIENCE = 120.0  # for what takes milliseconds, on a machine whose cores are busy


def spawn(code, tag, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, TAG: tag}, stdout=subprocess.PIPE, text=True, **options
    )


@pytest.fixture
def tag():
    return uuid.uuid4().hex


STUBBORN_ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    start_new_session=True)
print(child.pid, flush=True)
"""


def test_an_orphan_that_ignores_sigterm_is_found_and_ended(tag):
    parent = spawn(STUBBORN_ORPHAN, tag)
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    orphan = psutil.Process(int((lines - {"up"}).pop()))
    parent.wait(PATIENCE)
    assert orphan.is_running()
    family = Family(tag)
    assert [member.pid for member in family.members()] == [orphan.pid]
    assert family.stop(grace=0.5) == []
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    parent.stdout.close()


def test_a_member_seen_once_is_known_even_if_it_lost_the_tag(tag):
    """Ray's workers overwrite their environment when they set their title."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'], env={})"
    parent = spawn(code, tag)
    family = Family(tag)
    deadline = time.monotonic() + PATIENCE
    while len(family.members()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    child = next(member for member in family.members() if member.pid != parent.pid)
    parent.kill()
    parent.wait(PATIENCE)
    parent.stdout.close()
    assert [member.pid for member in family.members()] == [child.pid]
    assert family.stop(grace=2) == []


def test_strangers_are_left_alone(tag):
    stranger = spawn("import time; time.sleep(600)", "another")
    family = Family(tag)
    assert family.members() == []
    family.stop()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(PATIENCE)
    stranger.stdout.close()


def test_the_driver_is_killed_before_the_others_hear_of_the_end(tag, tmp_path):
    witness = tmp_path / "witness"
    driver = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, TAG: tag})
    other = spawn(
        f"""
import psutil, signal, sys, time
def ended(*_):
    open({str(witness)!r}, "w").write(str(psutil.pid_exists({driver.pid})))
    sys.exit()
signal.signal(signal.SIGTERM, ended)
print("ready", flush=True)
time.sleep(600)
""",
        tag,
    )
    other.stdout.readline()
    family = Family(tag)
    family.lead(driver.pid)
    assert family.stop(grace=PATIENCE) == []
    driver.wait(PATIENCE)
    other.wait(PATIENCE)
    other.stdout.close()
    assert witness.read_text() == "False", "the driver was gone when the other was asked to end"


def test_a_second_interrupt_does_not_break_the_stopping():
    before = signal.getsignal(signal.SIGINT)
    with deaf():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_killed_launcher_takes_its_run_with_it(tag, tmp_path):
    """Also what the guard, the launcher's child, did not start itself, such as Ray's daemons."""
    folder = tmp_path / "private"
    folder.mkdir()
    guard = f"""
import pathlib, time
from simulations.engines.processes import end_with_launcher
end_with_launcher(__import__("os").getppid(), pathlib.Path({str(folder)!r}))
print("up", flush=True)
time.sleep(600)
"""
    launcher = spawn(
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {guard!r}]); "
        "q = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "print(p.pid, q.pid, flush=True); p.wait()",
        tag,
    )
    lines = {launcher.stdout.readline().strip(), launcher.stdout.readline().strip()}
    run = [psutil.Process(int(pid)) for pid in (lines - {"up"}).pop().split()]
    launcher.kill()
    launcher.wait(PATIENCE)
    launcher.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while (any(map(alive, run)) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, run))
    assert not folder.exists()
