"""A site by name: from plain settings to its commitment and its private training.

Nothing here looks at a record: the commitment is calibrated from the number of units, which is taken as public.
"""

from typing import TYPE_CHECKING, Any

from client.engine.engine import Engine
from client.models.tasks import make_task
from client.record_level.calibration import controller_of
from client.record_level.dp_sgd import PrivateSgd
from client.record_level.settings import PrivacyTarget, RecordLevelSettings
from client.record_level.units import GradientEngine, UnitGradients, UnitIndex
from client.worker import Job, make_engine
from privacy import checks
from privacy.ledger.ledger import Ledger
from privacy.randomness.noise import DiscreteGaussianNoise, GaussianNoise, InsecureZeroNoise, Noise
from privacy.randomness.sampling import CohortSampler
from strategies import AGGREGATIONS, OPTIMIZERS
from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Adapters
from strategies.calibration import run_info
from strategies.controllers.controller import RunInfo
from strategies.plugins import build
from strategies.private_training import Planner
from strategies.published.raw_rows import RawRule, ShownRaw
from strategies.server_update import ServerUpdate

if TYPE_CHECKING:
    from client.engine.sequential import OpacusEngine


class UnsoundSgd(ShownRaw, PrivateSgd):
    """The training of a published rule that is shown raw rows."""


def info_of(
    site: RecordLevelSettings,
    population: int,
    layout: AdapterLayout,
    multipliers: tuple[float, ...],
    order: int | None,
    *,
    records: int = 0,
) -> RunInfo:
    """The facts that the controller is told; public. ``records`` as of :meth:`RecordLevelSettings.sampling`."""
    adapters, sampling = Adapters(layout.rank, population, site.seed), site.sampling(population, records)
    return run_info(_aggregation(site), adapters, layout, site.steps, sampling, multipliers, order)


def private_training(
    site: RecordLevelSettings,
    engine: GradientEngine,
    index: UnitIndex,
    ledger: Ledger,
    multipliers: tuple[float, ...],
    sampler: CohortSampler,
) -> PrivateSgd:
    """The site's training, which holds everything but its adapter.

    Args:
        ledger: created from :func:`client.record_level.calibration.commit`, or reopened.
        multipliers: of :func:`client.record_level.calibration.commit`.
    """
    controller, aggregation = controller_of(site), _aggregation(site)
    layout, population = engine.layout, len(index)
    info = info_of(site, population, layout, multipliers, ledger.commitment.order, records=index.kept)
    rows = index.cap_units() if site.sampling_level == "example" else index
    optimizer = build("strategy.optimizer", OPTIMIZERS, site.optimizer, site.optimizer_options)
    noise = noise_of(site)
    kind = UnsoundSgd if isinstance(controller, RawRule) else PrivateSgd
    return kind(
        gradients=UnitGradients(engine, rows, site.combine),
        planner=Planner(controller, info, aggregation, Adapters(layout.rank, population, site.seed)),
        server=ServerUpdate(optimizer, aggregation, layout, site.served_average, noise),
        ledger=ledger,
        sampler=sampler,
        schedule=site.learning_rates,
    )


def record_level_engine(job: Job, gradients: str) -> "Engine | OpacusEngine":
    """The engine of a site on a freshly loaded base model: ``"stacked"``, or ``"opacus"`` for its hooks.

    An adapter that cannot be stacked is trained one record at a time unless Opacus is asked for.
    """
    checks.one_of(("stacked", "opacus"), gradients=gradients)
    if gradients == "stacked":
        return make_engine(job)
    device = job.base.chosen_device()
    model, _ = job.base.load_rounded(job.model, job.task, job.num_labels)
    job.base.refuse_unfit(model, device, job.token_budget, plain=True)
    from client.engine.sequential import OpacusEngine  # Opacus and PEFT: not in the image, and slow to import

    return OpacusEngine(
        model,
        job.spec,
        make_task(job.task, job.num_labels, **dict(job.local.preference)),
        token_budget=job.token_budget or 2048,
        device=device,
    )


def noise_of(target: PrivacyTarget) -> Noise:
    """The noise that the settings of a site, or of a run, name."""
    match target.noise:
        case "discrete":
            return DiscreteGaussianNoise()
        case "insecure-zero":
            return InsecureZeroNoise()
        case _:
            return GaussianNoise()


def _aggregation(site: RecordLevelSettings) -> Any:
    aggregation = build("strategy.aggregation", AGGREGATIONS, site.aggregation, site.aggregation_options)
    if aggregation.individual:
        raise ValueError(
            f"strategy.aggregation = {site.aggregation!r}: combines several sites, and this is one; "
            "take plain, ffa, rolora, fedsvd or dp-dylora"
        )
    return aggregation
