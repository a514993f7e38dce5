"""What the server's public records alone are worth: no client takes part, nothing is released, nothing is charged.

This is the public-only baseline of every comparison: a private result below it was not worth its privacy budget. It is
the warm start of a run (``public.*``: AdamW on the first ``training-fraction`` of the public records, from the same
initial adapter), evaluated as a run is, and it leaves ``results.json`` and ``environment.json`` like one, but no
ledger: there is nothing to keep account of.
"""

import json
import time
from pathlib import Path

import numpy as np
import torch

from client.data.prepare import prepare
from server.config.load import ConfigError
from server.config.methods import methods
from server.config.schema import RunConfig
from server.run_folder.names import RESULTS_FILE
from server.run_folder.provenance import write_environment
from server.run_folder.telemetry import Telemetry
from server.runs.artefacts import class_results, majority_accuracy, split_results
from server.runs.assembly import data_spec, make_assembly
from server.runs.public_data import PublicTraining


def check_public_only(config: RunConfig) -> None:
    """Refuse a configuration that would train on nothing.

    Raises:
        ConfigError: no warm start is asked for.
    """
    if not config.public.warm_start_epochs:
        raise ConfigError("public.warm-start-epochs = 0: training on public records alone needs at least 1")


def run_public_only(config: RunConfig, folder: Path) -> None:
    """Train on the public records, evaluate, write the results into `folder`."""
    started = time.monotonic()
    check_public_only(config)
    torch.set_num_threads(1)
    with Telemetry(folder, tensorboard=False) as telemetry:
        telemetry.status("preparing", "public records only")
        write_environment(folder)
        assembly = make_assembly(config, methods(config), prepare(data_spec(config)))
        public = PublicTraining.of(assembly)
        assert public.engine is not None
        adapter = public.warm_start(assembly.start)
        data = assembly.data
        held_back = data.validation.select(np.arange(public.num_records, len(data.validation)))
        validation, test = (public.engine.evaluate(adapter, records) for records in (held_back, data.test))
        results = {
            **split_results("validation", validation),
            **split_results("test", test),
            **class_results(test, data.label_names),
            "majority_accuracy": majority_accuracy(data),
            "seconds": time.monotonic() - started,
            "rounds_done": 0,
            "stopped": None,
            "dimension": assembly.layout.dim,
            "model": config.model.name,
            "not_private": None,
            "public_only": True,
        }
        (folder / RESULTS_FILE).write_text(json.dumps(results, indent=2) + "\n")
        telemetry.status("completed", "trained on public records alone")
