"""The few lines that use a run's adapter, with the names and sizes of that run filled in."""

import re

from simulations.run_folder import ADAPTER_FOLDER, Run

_CODE = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def loading_code(run: Run) -> str | None:
    """Python that loads the adapter onto its base model; None if the run has left no adapter.

    It stands in the adapter's card, for whoever gets the adapter alone (:func:`server.artefacts.how_to_use`); here the
    path is that from the current folder.
    """
    folder = run.path / ADAPTER_FOLDER
    card = folder / "README.md"
    if not card.is_file() or not (folder / "adapter_config.json").is_file():
        return None
    code = _CODE.search(card.read_text(encoding="utf-8"))
    if code is None:
        return None
    load = 'from_pretrained(base, "{}")'
    return code[1].replace(load.format(ADAPTER_FOLDER), load.format(run.shown_path / ADAPTER_FOLDER))
