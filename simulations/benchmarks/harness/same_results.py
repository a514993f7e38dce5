"""Whether a change of the code changes results: digests of the adapters of small runs of every kind, without noise.

    python -m simulations.benchmarks.harness.same_results [--checkout FOLDER] [--only NAME] [--out FILE]

Every case is a run of a few seconds through the command line, with cohorts from a seed and no noise, so its adapter is
the same to the last bit whenever it is run on one machine. The results file holds a column a commit; a run of this
script adds the column of the code in ``--checkout`` (this code by default), and says which digests differ from the
columns that are there. Digests of different machines need not agree: kernels round differently.

Runs in phases have no setting that takes their noise away, so there it is multiplied by zero, and their sampling secret
is a constant, by a ``sitecustomize`` that only this script puts on the path.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.numpy import load_file

from simulations.benchmarks.harness.results import RESULTS

FILE = RESULTS / "same-results.json"
_FLAGS = {"privacy.non-private": "true", "privacy.noise": "insecure-zero", "privacy.seeded-cohorts": "true"}
_NOISELESS = """
import hashlib
try:
    from privacy.randomness.noise import GaussianNoise
    from privacy.randomness.sampling import CohortSampler
except ImportError:  # the layout before packages had packages
    from privacy.noise import GaussianNoise
    from privacy.sampling import CohortSampler
drawn = GaussianNoise.draw
GaussianNoise.draw = lambda *arguments: drawn(*arguments) * 0
# `fresh` is the name of `create` in older checkouts
CohortSampler.create = classmethod(lambda cls: cls(hashlib.sha256(b"digest").digest(), insecure=False))
CohortSampler.fresh = CohortSampler.create
"""
_SMALL = {"model.name": "random:bert", "model.rank": "2", "model.layers": "0", "privacy.delta": "1e-3"}
_LLAMA = {"model.name": "random:llama", "model.targets": "q_proj,v_proj"}
_CLIENTS = _SMALL | {
    "rounds": "3", "clients": "40", "sampling-rate": "0.3", "model.max-length": "24", "data.records-per-client": "6",
    "data.validation-records": "30", "data.test-records": "30", "public.warm-start-epochs": "1",
}  # fmt: skip
_RECORDS = _SMALL | {
    "rounds": "4", "model.max-length": "16", "data.records-per-client": "60", "data.validation-records": "20",
    "data.test-records": "10", "site.batch-size": "8", "site.records-per-unit": "1", "evaluation.every": "2",
    "site.checkpoint-every": "3", "site.warm-up": "1", "public.warm-start-epochs": "1",
}  # fmt: skip
_SITES = _SMALL | {
    "rounds": "2", "model.max-length": "16", "data.records-per-client": "40", "data.validation-records": "20",
    "data.test-records": "10", "site.batch-size": "8", "site.records-per-unit": "1", "site.steps": "2",
}  # fmt: skip
_TEXTS = {
    "model.name": "random:llama", "data.source": "notes", "data.test-source": "", "model.max-length": "16",
    "model.rank": "2", "data.validation-records": "20", "data.test-records": "20", "privacy.delta": "1e-3",
}  # fmt: skip
_SPAN = _TEXTS | {
    "rounds": "3", "data.train-records": "40", "data.records-per-client": "40", "site.batch-size": "10",
    "site.span.samples": "8",
}  # fmt: skip
_QUICK = {"batch-size = 256": "batch-size = 10", "steps = 100": "steps = 4", "steps = 20": "steps = 3"} | {
    "noise-multiplier = 4.0": "noise-multiplier = 8.0", "learning-rate = 1e-3": "learning-rate = 1e-2"
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run: preset, settings, and the engine's options where clients train; ``phases`` are made shorter."""

    preset: str
    settings: dict[str, str]
    options: tuple[str, ...] = ()
    phases: bool = field(default=False)


def _on(engine: str) -> tuple[str, ...]:
    return ("--engine", engine, "--workers", "2")


CASES = {
    "clients, DP-LAC": Case("quickstart", _CLIENTS, _on("inprocess")),
    "clients, DP-LAC, Flower on Ray": Case("quickstart", _CLIENTS, _on("flower")),
    "clients, quantile, AdamW, FedAdam": Case(
        "quickstart",
        _CLIENTS
        | {"strategy.controller": "quantile", "strategy.optimizer": "fedadam", "local.optimizer": "adamw"}
        | {"local.learning-rate": "0.01"},
        _on("inprocess"),
    ),
    "clients, one at a time": Case("quickstart", _CLIENTS | {"engine.sequential": "true"}, _on("inprocess")),
    "clients, language model, DyLoRA": Case(
        "quickstart",
        _CLIENTS
        | _LLAMA
        | {"model.task": "causal-lm", "strategy.controller": "fixed", "strategy.aggregation": "dp-dylora"}
        | {"local.balance": "none", "model.layers": "1", "data.partition": "iid"},
        _on("inprocess"),
    ),
    "clients, RoLoRA, RL": Case(
        "quickstart", _CLIENTS | {"strategy.aggregation": "rolora", "strategy.controller": "rl"}, _on("inprocess")
    ),
    "clients, FedSVD, percentile": Case(
        "quickstart",
        _CLIENTS
        | {"strategy.aggregation": "fedsvd", "strategy.controller": "percentile", "strategy.optimizer": "fedavgm"},
        _on("inprocess"),
    ),
    "clients, GeoClip": Case("quickstart", _CLIENTS | {"strategy.controller": "geoclip"}, _on("inprocess")),
    "clients, MiniLM": Case(
        "quickstart",
        {"rounds": "2", "clients": "30", "sampling-rate": "0.3", "data.records-per-client": "8"}
        | {"data.validation-records": "50", "data.test-records": "50", "model.max-length": "32"}
        | {"privacy.delta": "1e-3"},
        _on("inprocess"),
    ),
    "records, groups": Case("site-quickstart", _RECORDS),
    "records, RL": Case(
        "site-quickstart",
        _RECORDS | {"strategy.controller": "rl", "privacy.unit": "record", "evaluation.every": "1"},
    ),
    "records, AdaCliP": Case("site-quickstart", _RECORDS | {"strategy.controller": "adaclip"}),
    "records, DC-SGD-E, RoLoRA": Case(
        "site-quickstart",
        _RECORDS | {"strategy.controller": "dc-sgd-e", "strategy.aggregation": "rolora", "privacy.epsilon": "20"},
    ),
    "records, Opacus": Case("site-quickstart", _RECORDS | _LLAMA | {"site.gradients": "opacus"}),
    "records, PE-SGD": Case("pe-sgd", _SPAN),
    "records, PDP-SGD": Case("pe-sgd", _SPAN | {"site.span.method": "projection", "site.span.directions": "4"}),
    "sites": Case("sites", _SITES, _on("inprocess")),
    "sites, FedEx": Case("sites", _SITES | {"strategy.aggregation": "fedex"}, _on("inprocess")),
    "phases, JFT": Case("atdp", _TEXTS | {"data.records-per-client": "80"}, phases=True),
    "phases, DP": Case("dp-atdp", _TEXTS | {"data.records-per-client": "80"}, phases=True),
}


def digest(case: Case, checkout: Path, cache: Path) -> str:
    """SHA-256 of names, shapes and values of the adapter that a case ends with.

    Raises:
        RuntimeError: the run failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as place:
        folder, path = Path(place), [str(checkout)]
        settings, preset = {**case.settings, "data.cache": str(cache)}, case.preset
        if case.phases:
            name = f"{case.preset}.toml"
            file = next(presets for presets in (checkout / "simulations/presets").rglob(name))
            text = file.read_text(encoding="utf-8")
            for long, short in _QUICK.items():
                text = text.replace(long, short)
            (folder / name).write_text(text, encoding="utf-8")
            (folder / "site").mkdir()
            (folder / "site" / "sitecustomize.py").write_text(_NOISELESS, encoding="utf-8")
            path.append(str(folder / "site"))
            preset = name
        else:
            settings |= _FLAGS
        chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        done = subprocess.run(
            [sys.executable, "-m", "simulations", "run", preset, *chosen, *case.options, "--quiet"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-1500:])
        (run,) = (folder / "runs").iterdir()
        hashed = hashlib.sha256()
        for name, value in sorted(load_file(run / "adapter" / "adapter_model.safetensors").items()):
            hashed.update(f"{name}{value.shape}".encode() + value.tobytes())
        return hashed.hexdigest()


def main(
    checkout: Annotated[Path | None, typer.Option(help="Folder of other code; this code by default.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Cases; all by default. Repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Results file.")] = FILE,
) -> None:
    """Run the cases and add a column to the results; exit code 1 if a digest differs from another column's."""
    root = (checkout or Path(__file__).resolve().parents[3]).resolve()
    commit = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"machine": machine, "commits": {}}
    column = results["commits"].setdefault(commit, {})
    different = False
    with tempfile.TemporaryDirectory() as cache:
        for name in only or CASES:
            column[name] = found = digest(CASES[name], root, Path(cache))
            others = {other: column[name] for other, column in results["commits"].items() if name in column}
            same = len(set(others.values())) == 1
            different |= not same
            typer.echo(f"{name}: {found[:16]} {'' if same else f'DIFFERS: {others}'}")
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(int(different))


if __name__ == "__main__":
    typer.run(main)
