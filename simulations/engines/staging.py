"""The Flower app of a run: a wrapper of a few lines around the installed packages.

Flower puts an app's folder first on the path of the server's process and copies what is submitted to a SuperLink. A
copied ``client`` package and an installed one could so both be live in one run. Here nothing is copied: the app has one
package of a name that nobody else bears, which imports ``server.app`` and ``client.app`` from where they are installed
and refuses to run any other file of those names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w

PACKAGE = "lacquer_simulation"
SERVER_APP, CLIENT_APP = f"{PACKAGE}.server:app", f"{PACKAGE}.client:app"


@dataclass(frozen=True)
class App:
    """Dotted modules that hold ``app``: a Flower ServerApp and a ClientApp."""

    server: str = "server.app"
    client: str = "client.app"


def packages_root() -> Path:
    """The folder that holds our packages: the checkout, or site-packages."""
    return Path(__file__).resolve().parents[2]


def stage(
    folder: Path,
    app: App,
    *,
    config_file: Path,
    run_folder: Path,
    log: Path | None,
    plugins: Path,
    keys: Mapping[str, str | bool] | None = None,
) -> Path:
    """Write the wrapper app into ``folder``.

    Args:
        app: the modules to run; they are looked for in ``packages_root()`` and then on the path.
        config_file: the resolved configuration, absolute.
        run_folder: where the run writes, absolute.
        log: file that gets everything the server process and the actors print, from the first import on. None for a
            deployment: what a node prints stays on the node, and there are no Ray actors.
        plugins: folder appended to the path of server and actors: a user's modules are found but shadow nothing.
        keys: further keys for the ServerApp, see ``server.app.SPECIAL_KEYS``.

    Returns:
        the folder of the app.
    """
    package = folder / PACKAGE
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(_project(config_file, run_folder, keys or {})))
    (package / "__init__.py").write_text(
        _INIT.format(root=str(packages_root()), plugins=str(plugins), log=str(log or ""))
    )
    for part, module in (("server", app.server), ("client", app.client)):
        (package / f"{part}.py").write_text(_PART.format(package=PACKAGE, module=module))
    return folder


def _project(config_file: Path, run_folder: Path, keys: Mapping[str, str | bool]) -> dict[str, object]:
    return {
        "project": {
            "name": "lacquer-run",
            "version": "0.0.0",
            "description": "One run of Lacquer",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "lacquer",
                    "components": {"serverapp": SERVER_APP, "clientapp": CLIENT_APP},
                    "config": {"config-file": str(config_file), "run-folder": str(run_folder), **keys},
                }
            }
        },
    }


_INIT = '''\
"""Written by simulations/engines/staging.py for one run."""

import gc
import importlib
import os
import sys


def load(module):
    # An actor prints into a file of Ray's, which ends with the run, and a deployed ServerApp to the SuperLink only.
    if {log!r}:
        log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    if {plugins!r} not in sys.path:
        sys.path.append({plugins!r})
    gc.disable()  # collecting slows so large an import
    found = importlib.import_module(module)
    gc.enable()
    own = os.path.join({root!r}, *module.split(".")) + ".py"
    if os.path.exists(own) and not os.path.samefile(own, found.__file__):
        raise ImportError(f"{{module}} was found at {{found.__file__}}, but this run belongs to {{own}}")
    return found.app
'''

_PART = '''\
"""Written by simulations/engines/staging.py for one run."""

from {package} import load

app = load({module!r})
'''
