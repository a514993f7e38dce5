"""SIGTERM, as queues and spot machines send it: whatever was paid for by then is kept."""

import subprocess
import sys
from pathlib import Path

import pytest

from server.notice import ENDED
from server.run_folder.checkpoint import checkpoint_folder
from server.run_folder.resume import read_resumed
from tests.cases.kinds import KINDS, begin_or_resume
from tests.cases.moments import charges

RUN = """
import os, signal, sys
from pathlib import Path
from privacy.ledger.ledger import Ledger
from server import notice
from tests.cases.kinds import KINDS, begin_or_resume
charge, calls = Ledger.charge, []
def paying(*given):
    receipt = charge(*given)
    calls.append(given)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGTERM)  # the noise is not drawn yet
    return receipt
Ledger.charge = paying
notice.listen()
folder = Path(sys.argv[2])
folder.mkdir()
begin_or_resume(KINDS[sys.argv[1]](folder.parent / "cache"), folder)
"""


@pytest.mark.parametrize("kind", ["clients", "records"])
def test_notice_in_the_middle_of_a_release_loses_nothing(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", RUN, kind, folder], capture_output=True, text=True, check=False)
    assert done.returncode == ENDED, done.stderr
    assert len(charges(folder)) == 3
    assert checkpoint_folder(folder) is not None
    begin_or_resume(KINDS[kind](tmp_path / "cache"), folder)
    (resumed,) = read_resumed(folder)
    assert resumed.lost == 0
