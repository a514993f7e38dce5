"""From a configuration to everything a run needs, checked, before any budget is spent."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from jaxtyping import Float
from torch import Tensor, nn

from client.data import PreparedData, prepare
from client.job import Job
from client.lora import AdapterLayout, LoraSpec, Part, adapter_layout, initial_adapter
from client.model_files import fingerprint
from client.models import load_base, refuse_company_in_positions, refuse_longer_than_positions
from client.training import LocalTraining
from privacy.commitment import Commitment
from privacy.ledger import Ledger
from privacy.mechanism import GaussianNoise, InsecureZeroNoise, Noise
from privacy.noise import DiscreteGaussianNoise
from privacy.sampling import CohortSampler
from server.budget import commit, round_sampling
from server.config import ConfigError, RunConfig
from server.data_spec import data_spec, reading
from server.methods import Methods, methods
from server.rouge import refuse_without_rouge
from strategies.aggregation.aggregation import Adapters
from strategies.controller import Setting
from strategies.dp_fedavg import DpFedAvg, RoundFailed, Subspace

LEDGER_FILE = "ledger.jsonl"
SAMPLING_SECRET = "sampling.key"
HEADS = {"classification": ("classifier",)}
"""What is trained beside the adapters, by task."""


@dataclass(frozen=True)
class Assembly:
    """A run ready to start."""

    config: RunConfig
    data: PreparedData
    methods: Methods
    spec: LoraSpec
    layout: AdapterLayout
    start: Float[Tensor, " size"]
    job: Job
    commitment: Commitment
    setting: Setting


def assemble(config: RunConfig) -> Assembly:
    """Prepare data and model, calibrate the noise, describe the job. Nothing private leaves, no budget is spent.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    parts = methods(config)
    commitment, multipliers = commit(config, parts.controller)
    data = prepare(data_spec(config))
    model, _ = load_base(config.model.name, config.model.task, data.num_labels)
    adapters = Adapters(config.model.rank, config.clients, config.seed)
    spec = lora_spec(config, model, parts.aggregation.part(adapters, 1))
    layout = adapter_layout(model, spec)
    job = Job(
        model=config.model.name,
        task=config.model.task,
        num_labels=data.num_labels,
        balance=config.local.balance,
        spec=spec,
        local=local_training(config),
        data=str(data.folder),
        seed=config.seed,
        sequential=config.engine.sequential,
        precision=config.engine.precision,
        token_budget=config.engine.token_budget,
        prefix_cache_mb=config.engine.prefix_cache_mb,
        reading=reading(config, data.label_names),
        fingerprint=fingerprint(config.model.name) if config.deployed else "",
    )
    layouts = tuple(parts.aggregation.part(adapters, t).layout(layout).blocks() for t in range(1, config.rounds + 1))
    layouts = layouts[:1] if len(set(layouts)) == 1 else layouts
    setting = Setting(config.rounds, layouts, round_sampling(config), multipliers, commitment.order)
    start = initial_adapter(layout, model, config.seed)
    return Assembly(config, data, parts, spec, layout, start, job, commitment, setting)


def lora_spec(config: RunConfig, model: nn.Module, part: Part) -> LoraSpec:
    """The adapters of a run; ``model.layers = n`` means the top n layers."""
    base: Any = model.config
    total = int(base.num_hidden_layers)
    if config.model.layers > total:
        raise ConfigError(f"model.layers = {config.model.layers}: {config.model.name} has {total} layers; 0 takes all")
    refuse_longer_than_positions(model, config.model.max_length)
    refuse_company_in_positions(model, config.model.max_length)
    refuse_without_rouge(config, model)
    layers = tuple(range(total - config.model.layers, total)) if config.model.layers else None
    targets = tuple(name.strip() for name in config.model.targets.split(",") if name.strip())
    heads = HEADS.get(config.model.task, ())
    return LoraSpec(config.model.rank, config.model.alpha, targets, layers, part.factors, heads)


def local_training(config: RunConfig) -> LocalTraining:
    """The clients' local training."""
    local = config.local
    return LocalTraining(
        optimizer=local.optimizer,
        learning_rate=local.learning_rate,
        batch_size=local.batch_size,
        epochs=local.epochs,
        weight_decay=local.weight_decay,
        momentum=local.momentum,
        max_steps=local.max_steps or None,
    )


def make_strategy(
    assembly: Assembly,
    run_folder: Path,
    nodes: int | tuple[int, ...],
    ledger: Ledger,
    subspace: Subspace | None = None,
) -> DpFedAvg:
    """The strategy of a run, with its sampling secret in the run folder (readable by its owner only).

    ``nodes`` is how many workers there are, or the node of every client, see :class:`strategies.dp_fedavg.DpFedAvg`.
    """
    config = assembly.config
    return DpFedAvg(
        controller=assembly.methods.controller,
        optimizer=assembly.methods.optimizer,
        aggregation=assembly.methods.aggregation,
        setting=assembly.setting,
        layout=assembly.layout,
        ledger=ledger,
        sampler=make_sampler(config, run_folder),
        job=assembly.job.to_json(),
        nodes=nodes,
        clients_per_node=1 if config.deployed else config.simulation.clients_per_node or None,
        served_average=config.strategy.served_average,
        work=None if config.deployed else np.asarray(assembly.data.client_tokens),
        noise=make_noise(config),
        subspace=subspace,
        seed=config.seed,
    )


def make_sampler(config: RunConfig, run_folder: Path) -> CohortSampler:
    """What draws the cohorts, with its secret in the run folder."""
    secret = run_folder / SAMPLING_SECRET
    if config.privacy.seeded_cohorts:
        return CohortSampler.insecure_from_seed(config.seed)
    if secret.exists():
        return CohortSampler.load(secret)
    sampler = CohortSampler.fresh()
    sampler.save(secret)
    return sampler


def make_noise(config: RunConfig) -> Noise:
    """The noise the configuration names."""
    match config.privacy.noise:
        case "discrete":
            return DiscreteGaussianNoise()
        case "insecure-zero":
            return InsecureZeroNoise()
        case _:
            return GaussianNoise()


def connected_nodes(grid: Grid, expected: int, patience: float = 600.0) -> int:
    """Wait for ``expected`` nodes, or, if that is 0, until their number stays the same for two seconds."""
    deadline, seen, since = time.monotonic() + patience, 0, time.monotonic()
    while time.monotonic() < deadline:
        now = len(list(grid.get_node_ids()))
        if now != seen:
            seen, since = now, time.monotonic()
        if (expected and seen >= expected) or (not expected and seen and time.monotonic() - since > 2.0):
            return expected or seen
        time.sleep(0.1)
    raise RoundFailed(f"{seen} of {expected or 'at least 1'} nodes connected within {patience:g} s")
