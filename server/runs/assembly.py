"""Building everything a run needs from its configuration, checked, before any budget is spent.

Runs of every kind are assembled alike (:class:`Assembly`): the data set and the job as the clients know them, the
adapter on its base model. Then what a server over clients adds: its commitment, its strategy, the secret that draws
cohorts, and with secure sums the federation's list, in a simulation the identities of everyone on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from jaxtyping import Float
from torch import Tensor, nn

from client.data.local import ReadSettings
from client.data.prepare import prepare
from client.data.prepared import PreparedData
from client.data.spec import DataSpec
from client.models.base import refuse_batch_dependent_positions, refuse_longer_than_positions
from client.models.files import fingerprint
from client.models.lora import LoraSpec, adapter_layout, initial_adapter
from client.models.targets import targets_of
from client.models.tasks import MOST_CLASSES
from client.record_level.training import noise_of
from client.secure_sum import LIST_FILE, identity_file
from client.worker import Job
from privacy import durable
from privacy.commitment import Commitment
from privacy.errors import CorruptRun
from privacy.ledger.ledger import Ledger
from privacy.randomness.correlated import CorrelatedNoise
from privacy.randomness.sampling import CohortSampler, RemoteSampler
from privacy.secagg import keys
from privacy.secagg.federation import Federation, load_identity, save_identity
from server.config.load import ConfigError
from server.config.methods import Methods, methods
from server.config.schema import RunConfig
from server.evaluation.answers import refuse_without_rouge
from server.evaluation.started_from import load_start, refuse_other_labels
from server.network.grid import exchange_messages
from server.run_folder.canaries import canaries_of, canary_key
from server.run_folder.names import SAMPLING_SECRET
from server.runs.commitment import commit_clients, round_sampling
from strategies.adapter.layout import AdapterLayout
from strategies.adapter.trainable import TrainedSubset
from strategies.aggregations.aggregation import Adapters
from strategies.calibration import Calibrated, run_info
from strategies.controllers.controller import RunInfo
from strategies.dp_fedavg import DpFedAvg
from strategies.messages.dispatch import await_nodes
from strategies.plugins import explain_options
from strategies.secure_aggregation import SecureAggregation


def data_spec(config: RunConfig) -> DataSpec:
    """Describe the data set of a run, as :func:`client.data.prepare.prepare` needs it; refuses nothing itself."""
    return DataSpec.of(
        config.data,
        config.model,
        tokenizer=config.model.name,
        clients=config.clients,
        seed=config.seed,
        whole_units=config.privacy.unit == "group" and not config.is_single_site,
    ).public_only


def node_reading(config: RunConfig, labels: Sequence[str]) -> ReadSettings | None:
    """The settings by which nodes read their own records; None where the server's host holds everybody's."""
    if not config.is_deployed:
        return None
    whose = config.data.client_column if config.data.nodes else ""
    if config.model.task == "classification":
        return ReadSettings.of(config.data, config.model, client_column=whose, labels=tuple(labels))
    return ReadSettings.of(config.data, config.model, client_column=whose, label_column="")


HEADS = {"classification": ("classifier",)}
"""Modules that are trained beside the adapters, by task."""


@dataclass(frozen=True)
class Assembly:
    """A run of any kind, ready to start but for its noise.

    Attributes:
        methods: built from their names; in a run of phases these are the shared ones.
        spec: form of the adapter.
        layout: places of the adapter's values in its vector.
        start: adapter before training, float32 ``[size]``.
        job: the clients' job.
    """

    config: RunConfig
    data: PreparedData
    methods: Methods
    spec: LoraSpec
    layout: AdapterLayout
    start: Float[Tensor, " size"]
    job: Job


@dataclass(frozen=True)
class CommittedAssembly(Assembly):
    """A run with a ledger of its own: the commitment of that, and what the controller is told."""

    commitment: Commitment
    setting: RunInfo


def assemble_client_level(config: RunConfig, folder: Path | None = None) -> CommittedAssembly:
    """Calibrate a run over clients and prepare its data and model. Nothing private leaves, no budget is spent.

    Args:
        folder: of the run; what was calibrated for it is taken from there.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    parts = methods(config)
    noise = commit_clients(config, parts.controller, folder)
    return with_noise(make_assembly(config, parts, prepare(data_spec(config)), folder), noise)


def with_noise(run: Assembly, noise: Calibrated) -> CommittedAssembly:
    """Add calibrated noise to the assembly of a run over clients."""
    config, aggregation, order = run.config, run.methods.aggregation, noise.commitment.order
    adapters, sampling = Adapters(config.model.rank, config.clients, config.seed), round_sampling(config, noise)
    info = run_info(aggregation, adapters, run.layout, config.rounds, sampling, noise.multipliers, order)
    return CommittedAssembly(**vars(run), commitment=noise.commitment, setting=info)


def make_assembly(config: RunConfig, parts: Methods, data: PreparedData, folder: Path | None = None) -> Assembly:
    """Build the adapter and the job of a run of any kind, on its data.

    Args:
        folder: of the run; its own copy of what it goes on from is taken from there.

    Raises:
        ConfigError, ValueError: naming the setting that cannot work.
    """
    spec, layout, start = adapter_of(config, parts, data.num_labels, folder)
    refuse_other_labels(config, data.label_names, folder)
    if config.evaluation.confusion and data.num_labels > MOST_CLASSES:
        raise ConfigError(
            f"evaluation.confusion = true counts at most {MOST_CLASSES} labels, the data have {data.num_labels}: leave "
            "it out"
        )
    job = Job(
        model=config.model.name,
        task=config.model.task,
        num_labels=data.num_labels,
        spec=spec,
        local=config.local,
        data=str(data.folder),
        seed=config.seed,
        sequential=config.engine.sequential,
        base=config.engine.base,
        token_budget=config.engine.token_budget,
        prefix_cache_mb=config.engine.prefix_cache_mb,
        reading=node_reading(config, data.label_names),
        fingerprint=fingerprint(config.model.name) if config.is_deployed else "",
    )
    return Assembly(config, data, parts, spec, layout, start, job)


def adapter_of(
    config: RunConfig, parts: Methods, num_labels: int, folder: Path | None = None
) -> tuple[LoraSpec, AdapterLayout, Tensor]:
    """Load the base model and lay out the adapters on it.

    Returns:
        the adapters' form, where their values lie, and where they start.

    Raises:
        ConfigError, ValueError: the base model lacks what is named, or the aggregation does not fit the adapter in some
            round; naming the setting.
    """
    trained = _trained(config, parts)
    device = config.engine.base.chosen_device()
    model, _ = config.engine.load(config.model.name, config.model.task, num_labels)
    plain = config.engine.sequential or (config.is_single_site and config.site.gradients == "opacus")
    config.engine.refuse_unfit(model, device, config.engine.token_budget, plain=plain)
    spec, layout = _laid_out(config, model, trained)
    if config.model.adapter:
        return spec, layout, load_start(config, spec, layout, folder)
    return spec, layout, initial_adapter(layout, model, config.seed)


def trained_values(config: RunConfig, parts: Methods, model: nn.Module) -> int:
    """The number D of values that a round trains, clips and sends, the most of all rounds.

    Errors as of :func:`adapter_of`.

    Args:
        model: the base model, or its skeleton: no weight is looked at.
    """
    trained = _trained(config, parts)
    _, layout = _laid_out(config, model, trained)
    return max(part.layout(layout).dim for part in set(trained))


def _trained(config: RunConfig, parts: Methods) -> list[TrainedSubset]:
    """List what of the adapter every round trains."""
    chosen, aggregation = config.strategy.aggregation, parts.aggregation
    adapters = Adapters(config.model.rank, config.clients, config.seed)
    if config.data.nodes and aggregation.client_ranks(adapters, np.arange(1)) is not None:
        raise ConfigError(
            f"strategy.aggregation = {chosen!r} gives clients ranks by their ids, which nodes with many clients do not "
            "tell; take another one, or data.nodes = 0"
        )
    try:
        return [aggregation.part(adapters, number) for number in range(1, config.rounds + 1)]
    except ValueError as error:
        options = vars(aggregation) if hasattr(aggregation, "__dict__") else ()
        raise ConfigError(explain_options("strategy.aggregation", chosen, options, error)) from error


def _laid_out(config: RunConfig, model: nn.Module, trained: Sequence[TrainedSubset]) -> tuple[LoraSpec, AdapterLayout]:
    try:
        spec = _lora_spec(config, model, trained[0])
        layout = adapter_layout(model, spec)
    except ValueError as error:
        if isinstance(error, ConfigError) or str(error).startswith("model."):  # it names its key
            raise
        layers = f", model.layers = {config.model.layers}" if config.model.layers else ""
        raise ConfigError(f"model.targets = {config.model.targets!r}{layers}: {error}") from error
    for part in set(trained):
        part.layout(layout)
    return spec, layout


def _lora_spec(config: RunConfig, model: nn.Module, part: TrainedSubset) -> LoraSpec:
    """The form of a run's adapters; ``model.layers = n`` means the top n layers."""
    base: Any = model.config
    total = int(base.num_hidden_layers)
    if config.model.layers > total:
        raise ConfigError(f"model.layers = {config.model.layers}: {config.model.name} has {total} layers; 0 takes all")
    refuse_longer_than_positions(model, config.model.max_length)
    refuse_batch_dependent_positions(model, config.model.max_length)
    refuse_without_rouge(config, model)
    layers = tuple(range(total - config.model.layers, total)) if config.model.layers else None
    targets = targets_of(model, config.model.targets)
    heads = HEADS.get(config.model.task, ())
    return LoraSpec(config.model.rank, config.model.alpha, targets, layers, part.factors, heads)


def make_strategy(
    assembly: CommittedAssembly,
    run_folder: Path,
    nodes: int | tuple[int, ...],
    ledger: Ledger,
    held: Sequence[int] = (),
) -> DpFedAvg:
    """Make the strategy of a run, with its sampling secret in the run folder (readable by its owner only).

    Args:
        nodes: number of workers, or the node of every client, see :class:`strategies.dp_fedavg.DpFedAvg`.
        held: number of clients of every node, where nodes have many and draw among them.
    """
    canaries = canaries_of(assembly.config, run_folder, assembly.config.clients, fresh=not ledger.events)
    job = assembly.job
    if canaries is not None:
        key = str(canary_key(run_folder).resolve())
        job = job.replace(canaries=canaries.count, first_canary=canaries.first, canary_key=key)
    config, correlation = assembly.config, ledger.commitment.floor[0].correlation if ledger.commitment.floor else None
    return DpFedAvg(
        controller=assembly.methods.controller,
        optimizer=assembly.methods.optimizer,
        aggregation=assembly.methods.aggregation,
        info=assembly.setting,
        layout=assembly.layout,
        ledger=ledger,
        sampler=RemoteSampler(held) if held else make_sampler(config, run_folder),
        job=job.to_json(),
        nodes=nodes,
        clients_per_node=1 if config.is_deployed else config.simulation.clients_per_node or None,
        served_average=config.strategy.served_average,
        work=None if config.is_deployed else np.asarray(assembly.data.client_tokens),
        noise=noise_of(config.privacy) if correlation is None else CorrelatedNoise(correlation),
        seed=config.seed,
    )


def make_sampler(config: RunConfig, run_folder: Path) -> CohortSampler:
    """Load or make what draws the cohorts, with its secret in the run folder."""
    secret = run_folder / SAMPLING_SECRET
    if config.privacy.seeded_cohorts:
        return CohortSampler.insecure_from_seed(config.seed)
    if secret.exists():
        return CohortSampler.load(secret)
    sampler = CohortSampler.create()
    sampler.save(secret)
    return sampler


def connected_nodes(grid: Grid, expected: int, patience: float = 600.0) -> int:
    """Wait until ``expected`` nodes are connected; 0 waits until their number stays the same for two seconds."""
    nodes = await_nodes(grid, expected or 1, patience, settle=0.0 if expected else 2.0)
    return expected or len(nodes)


IDENTITIES = "secagg"
"""Folder of a simulated run with everybody's identity."""


def secure_aggregation(config: RunConfig, run_folder: Path, grid: Grid, ledger: Ledger) -> SecureAggregation | None:
    """Set up the sums that the run's clients open together; None if the server adds the noise.

    Raises:
        ConfigError: the list of the federation is missing or says something else than the configuration.
        CorruptRun: identities of a resumed run are gone.
    """
    if config.noise_shares is None:
        return None
    given = config.privacy.secagg.federation
    federation = (
        agreed_federation(config, Path(given), ledger.commitment)
        if given
        else simulated_federation(config, run_folder / IDENTITIES, ledger.commitment, goes_on=bool(ledger.events))
    )

    def ask(messages: Iterable[Message]) -> Iterable[Message]:
        return exchange_messages(grid, messages, config.privacy.secagg.step_timeout)

    return SecureAggregation(
        federation,
        ledger.run_id,
        ask,
        source="" if given else str((run_folder / IDENTITIES).resolve()),
        insecure=config.privacy.noise == "insecure-zero",
    )


def agreed_federation(config: RunConfig, path: Path, commitment: Commitment) -> Federation:
    """Load the list of a federation, which must say what the configuration does and pay for ``commitment``.

    What earlier runs have spent of it only the clients know.

    Raises:
        ConfigError: it cannot be read, was agreed on other noise, or does not pay for this run.
    """
    try:
        federation = Federation.from_text(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"privacy.secagg.federation = {str(path)!r}: {error}") from error
    if federation.noise_shares != config.noise_shares:
        raise ConfigError(
            f"privacy.secagg.federation = {str(path)!r} was agreed on {federation.noise_shares}, the configuration "
            f"says {config.noise_shares}; they must be the same"
        )
    theirs = federation.commitment
    assert theirs.order is not None
    assert theirs.rho is not None
    assert commitment.order is not None
    assert commitment.rho is not None
    costs = commitment.rho * theirs.order / commitment.order  # without amplification, divergences grow with the order
    if theirs.not_private is None and costs > theirs.rho * (1 + 1e-9):
        raise ConfigError(
            f"privacy.secagg.federation = {str(path)!r} commits to epsilon {theirs.epsilon:g} at delta "
            f"{theirs.delta:g}, which does not pay for this run (epsilon {commitment.epsilon:g} at delta "
            f"{commitment.delta:g}); ask for a smaller privacy.epsilon, or agree on another list"
        )
    return federation


def simulated_federation(config: RunConfig, folder: Path, commitment: Commitment, *, goes_on: bool) -> Federation:
    """Make the identities of a simulation, once for a run; private ones are readable by their owner only.

    Args:
        goes_on: whether the run has spent budget already.

    Raises:
        CorruptRun: the list is damaged, or is gone although the run goes on.
    """
    assert config.noise_shares is not None
    path = folder / LIST_FILE
    if path.exists():
        try:
            return Federation.from_text(path.read_text(encoding="ascii"))
        except ValueError as error:
            raise CorruptRun(f"{path} is no list of this run: {error}") from error
    if goes_on:
        raise CorruptRun(f"{path} is gone, with what the clients agreed on; restore it")
    folder.mkdir(mode=0o700, exist_ok=True)
    public = []
    for number in range(config.clients):
        private = folder / identity_file(number)
        if not private.exists():
            save_identity(private, keys.fresh_identity())
        public.append(keys.public_identity(load_identity(private)))
    least = {"least_noise_multiplier": 1e-6} if config.privacy.non_private else {}
    federation = Federation(tuple(public), commitment, **least)
    durable.write(path, federation.to_text())
    return federation
