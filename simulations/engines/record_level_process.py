"""The run of one silo, in a process of its own; started by :func:`simulations.engines.launcher.run_child`."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

MODULE = "simulations.engines.record_level_process"


def run(folder: Path, keys: Mapping[str, str | bool]) -> None:
    """Run what ``folder/config.toml`` describes, or, with ``resume`` in ``keys``, go on with it."""
    from server.app import held
    from server.config.load import load
    from server.runs.record_level import run_record_level

    config = load(folder / "config.toml")
    with held(folder, resume=bool(keys.get("resume"))) as (telemetry, ledger):
        run_record_level(config, folder, telemetry, ledger, other_code=bool(keys.get("other-code", False)))


def main(launcher: int, private: Path, folder: Path, plugins: str, keys: Mapping[str, str | bool]) -> None:
    """A child process: ends with its launcher, finds a user's own modules in ``plugins``."""
    from simulations.engines.processes import end_with_launcher

    end_with_launcher(launcher, private)
    sys.path.append(plugins)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(folder, keys)


if __name__ == "__main__":
    given = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], given)
