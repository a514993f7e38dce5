"""`python -m simulations.benchmarks [NAME ...]`: measure again, write the results, and the tables made from them.

Without names, everything that needs no data from outside. ``sst2`` needs the folder of its files and is run on its own.
"""

import subprocess
import sys

BENCHMARKS = (
    "noise_throughput",
    "mechanism_audit",
    "flower_dp_control",
    "engine_speed",
    "engine_record_level",
    "engine_peak",
    "engine_population",
)


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; the exit code of the first that fails, else 0."""
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        sys.exit(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    for name in [*(names or BENCHMARKS), "tables"]:
        done = subprocess.run([sys.executable, "-m", f"simulations.benchmarks.{name}"], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
