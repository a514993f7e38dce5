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


def controller_of(silo: RecordLevelSettings) -> Controller[Any]:
    """Build the controller of the settings; ValueError naming what is wrong with its name or options."""
    controller: Controller[Any] = build("strategy.controller", CONTROLLERS, silo.controller, silo.controller_options)
    if isinstance(controller, RawRule) and silo.not_private is None:
        raise ValueError(f"strategy.controller = {silo.controller!r}: {controller.refusal()}")
    return controller


def commit(
    silo: RecordLevelSettings, population: int, extra: Sequence[FloorStep] = (), *, records: int = 0
) -> Calibrated:
    """Calibrate for so many units, with what else the target must pay for.

    Args:
        records: as of :meth:`RecordLevelSettings.sampling`.

    Raises:
        ValueError: no noise keeps the target, or there are fewer units (records) than a batch expects.
    """
    controller = controller_of(silo)
    if isinstance(controller, RawRule) and silo.sampling_level == "example":
        raise ValueError(
            f"strategy.controller = {silo.controller!r} is shown the rows of units; set silo.sampling-level = 'user'"
        )
    found = calibrate(
        controller,
        silo.sampling(population, records),
        silo.steps,
        epsilon=silo.epsilon,
        delta=silo.delta,
        mode=silo.mode,
        extra=extra,
        not_private=silo.not_private,
    )
    if isinstance(controller, RawRule):
        return found._replace(commitment=controller.commit_noise(found.commitment))
    return found
