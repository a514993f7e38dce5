"""Choosing the kind of run that a folder's configuration describes, and running it."""

from pathlib import Path

from flwr.serverapp import Grid

from server.config.load import ConfigError
from server.config.schema import RunConfig
from server.run_folder.names import PHASES_FILE
from server.run_folder.resume import check_sites
from server.run_folder.verify import verify_run
from server.runs.lifecycle import open_run


def run_in_folder(
    config: RunConfig, folder: Path, grid: Grid | None = None, *, resume: bool = False, other_code: bool = False
) -> None:
    """Run a configuration to its end in a folder, or resume the run there.

    Args:
        config: resolved; of a folder with a file of phases the tables that all phases share.
        folder: exists.
        grid: to the clients or the sites; None for a run that needs none.
        other_code: although the code has changed.

    Raises:
        ConfigError: the folder holds another run, or a run over clients has no grid.
        CannotResume, CorruptRun: why the run cannot be resumed.
    """
    if not config.clients:
        raise ConfigError("clients = 0 is counted by `lacquer run`; set clients to the number it says")
    # Imported here: a kind of run need not load what the others need.
    if (folder / PHASES_FILE).is_file():
        from server.runs.phase_config import load_phases
        from server.runs.phases import run_phases

        with open_run(config, folder, resume=resume, other_code=other_code, ledger=False) as run:
            run_phases(run, load_phases(folder / PHASES_FILE))
    elif config.is_single_site:
        from server.runs.record_level import run_record_level

        with open_run(config, folder, resume=resume, other_code=other_code) as run:
            run_record_level(run)
    elif grid is None:
        raise ConfigError(f"clients = {config.clients}: a run over several clients needs a grid to reach them")
    elif config.several_sites:
        from server.runs.sites import run_sites

        with open_run(config, folder, resume=resume, other_code=other_code, ledger=False) as run:
            if resume:
                check_sites(verify_run(folder))
            run_sites(run, grid)
    else:
        from server.runs.client_level import run_client_level

        with open_run(config, folder, resume=resume, other_code=other_code) as run:
            run_client_level(run, grid)
