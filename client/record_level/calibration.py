"""The noise of one site's training, known before there is a model."""

from collections.abc import Sequence
from typing import Any

from client.record_level.settings import RecordLevelSettings
from privacy.commitment import FloorStep
from strategies import CONTROLLERS
from strategies.calibration import Calibrated, calibrate
from strategies.controllers.controller import Controller
from strategies.plugins import build
from strategies.published.raw_rows import RawRule


def controller_of(site: RecordLevelSettings) -> Controller[Any]:
    """Build the controller of the settings; ValueError naming what is wrong with its name or options."""
    controller: Controller[Any] = build("strategy.controller", CONTROLLERS, site.controller, site.controller_options)
    if isinstance(controller, RawRule) and site.not_private is None:
        raise ValueError(f"strategy.controller = {site.controller!r}: {controller.refusal()}")
    return controller


def commit(
    site: RecordLevelSettings, population: int, extra: Sequence[FloorStep] = (), *, records: int = 0
) -> Calibrated:
    """Calibrate for so many units, with what else the target must pay for.

    Args:
        records: as of :meth:`RecordLevelSettings.sampling`.

    Raises:
        ValueError: no noise keeps the target, or there are fewer units (records) than a batch expects.
    """
    controller = controller_of(site)
    if isinstance(controller, RawRule) and site.sampling_level == "example":
        raise ValueError(
            f"strategy.controller = {site.controller!r} is shown the rows of units; set site.sampling-level = 'user'"
        )
    found = calibrate(
        controller,
        site.sampling(population, records),
        site.steps,
        epsilon=site.epsilon,
        delta=site.delta,
        mode=site.mode,
        extra=extra,
        not_private=site.not_private,
    )
    if isinstance(controller, RawRule):
        return found._replace(commitment=controller.commit_noise(found.commitment))
    return found
