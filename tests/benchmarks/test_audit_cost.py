"""What a command costs is told with every process it leaves behind, and without those of the command before."""

import json
import subprocess
import sys

BURN = "import time\nwhile time.process_time() < {}: pass"

MEASURE = """
import json, os, sys
from simulations.benchmarks.privacy import audit_cost
audit_cost.adopt_orphans()
commands = [[sys.executable, "-c", text] for text in json.loads(sys.argv[1])]
print(json.dumps([audit_cost.both_clocks(command, os.environ) for command in commands]))
"""


def test_orphans_are_counted_and_the_dead_of_one_command_are_not_counted_for_the_next() -> None:
    left_behind = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BURN.format(2.0)!r}])\nprint('one')"
    )
    commands = [left_behind, BURN.format(0.5) + "\nprint('two')"]
    measure = [sys.executable, "-c", MEASURE, json.dumps(commands)]
    (first, _, one), (second, _, two) = json.loads(subprocess.run(measure, capture_output=True, check=True).stdout)
    assert (one, two) == ("one", "two")
    assert 1.8 < first < 2.8
    assert 0.3 < second < 1.2
