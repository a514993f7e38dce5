"""A small run of every kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.config.load import parse
from server.config.schema import RunConfig
from server.run_folder.names import ORIGIN_FILE
from server.runs.phase_config import parse_phases
from server.runs.phase_plan import PhasesConfig
from simulations.engines.inprocess import run_inprocess
from tests.cases.phases import train

Config = RunConfig | PhasesConfig


def common(cache: Path, records: int) -> dict[str, Any]:
    data = {"partition": "iid", "validation-records": 10, "test-records": 10, "cache": str(cache)}
    return {
        "model": {"name": "random:bert", "rank": 2, "max-length": 16},
        "data": data | {"records-per-client": records},
    }


def over_clients(cache: Path) -> Config:
    """A first release for thresholds, then three rounds."""
    table = {
        "rounds": 3, "clients": 12, "sampling-rate": 0.5, "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "strategy": {"controller": "dp-lac", "optimizer": "fedadam", "served-average": 0.5}, "engine": {"workers": 2},
    }  # fmt: skip
    return parse(table | common(cache, 4))


def correlated(cache: Path) -> Config:
    """Noise that hangs together over rounds, and dies with its process."""
    table = {
        "rounds": 5, "clients": 12, "sampling-rate": 0.25, "privacy": {
            "epsilon": 8.0, "delta": 1e-2, "noise-correlation": "banded", "bands": 3,
        },
        "strategy": {"controller": "fixed", "aggregation": "ffa", "optimizer": "fedavgm"}, "engine": {"workers": 2},
    }  # fmt: skip
    return parse(table | common(cache, 4))


def over_records(cache: Path) -> Config:
    """Every second step is kept and recorded, but for the third pair."""
    table = {
        "rounds": 6, "clients": 1, "sampling-rate": 1.0, "privacy": {"unit": "record", "delta": 1e-3},
        "strategy": {
            "controller": "percentile", "controller-options": {"query-noise": 8.0}, "optimizer": "fedadam",
            "served-average": 0.5,
        },
        "site": {"batch-size": 8, "checkpoint-every": 2, "warm-up": 1, "schedule": "cosine"},
        "evaluation": {"every": 3},
    }  # fmt: skip
    return parse(table | common(cache, 30))


def in_phases(cache: Path) -> Config:
    """Two private phases, one of rising noise, behind one without noise."""
    private = {"kind": "private", "steps": 3, "batch-size": 16}
    rising = {"controller": "rise-reset", "controller-options": {"clip-norm": 0.1, "seed": 3, "every": 2}}
    phases = [
        {"kind": "ordinary", "name": "open", "text": "original", "batch-size": 8, "learning-rate": 0.01},
        {**private, "name": "level", "noise-multiplier": 2.0},
        {**private, "name": "rising", "noise-multiplier": 6.0, **rising},
    ]
    return parse_phases({"privacy": {"epsilon": 6.0, "delta": 1e-3}, "phases": phases, **common(cache, 60)})


def over_sites(cache: Path) -> Config:
    """Two sites with ledgers of their own, two steps a round."""
    table = {
        "rounds": 3, "clients": 2, "sampling-rate": 1.0, "privacy": {"unit": "record", "delta": 1e-3},
        "strategy": {
            "controller": "percentile", "controller-options": {"query-noise": 8.0}, "served-average": 0.5,
        },
        "site": {"batch-size": 5, "steps": 2}, "engine": {"workers": 1},
    }  # fmt: skip
    return parse(table | common(cache, 30))


def in_span(cache: Path) -> Config:
    """Two sites that send coefficients of texts which evolve, and a server with an optimizer of its own."""
    table = {
        "rounds": 3, "clients": 2, "sampling-rate": 1.0, "privacy": {"unit": "record", "delta": 1e-3},
        "strategy": {"controller": "fixed", "optimizer": "fedadam", "served-average": 0.5},
        "site": {"batch-size": 5, "span": {
            "method": "coefficients", "samples": 6, "openings": "Notes: |A patient", "warm-start-epochs": 1,
        }},
        "engine": {"workers": 1},
    }  # fmt: skip
    model = {"name": "random:llama", "task": "causal-lm", "rank": 2, "max-length": 16, "targets": "q_proj,v_proj"}
    return parse(table | common(cache, 30) | {"model": model})


KINDS: dict[str, Callable[[Path], Config]] = {
    "clients": over_clients,
    "correlated": correlated,
    "records": over_records,
    "phases": in_phases,
    "sites": over_sites,
    "span": in_span,
}


def begin_or_resume(config: Config, folder: Path) -> None:
    """Run to the end in a folder, or resume the run there."""
    begun = (folder / ORIGIN_FILE).is_file()
    if isinstance(config, PhasesConfig):
        train(config, folder)
    else:
        folder.mkdir(exist_ok=True)
        run_inprocess(config, folder, keys={"resume": str(folder)} if begun else None)
