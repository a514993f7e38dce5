"""`lacquer calibrate --controller`: what a run with a controller commits to, release by release and part by part.

The controller is rehearsed on an empty cohort without noise: its plans come from its own code, nothing is written down
a second time, and no client is involved.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from privacy.accountants import composition
from privacy.contribution import Contribution, Plan
from privacy.errors import UnsupportedEvent
from privacy.events import Poisson, ReleaseEvent
from privacy.mechanism import Release, charged_release
from privacy.randomness.noise import InsecureZeroNoise
from privacy.randomness.sampling import CohortSampler
from server.config.load import parse
from server.config.methods import methods
from server.config.schema import RunConfig
from server.runs.commitment import commit_clients, round_sampling
from simulations.presets.load import parse_setting
from simulations.report.notation import delta_text, epsilon_text, number_text, plain_table
from strategies.controllers.controller import Controller, PublicSignals, RunInfo


@dataclass(frozen=True)
class Rehearsed:
    """A release of the rehearsed run: where it stands, who takes part, and what is asked with how much noise."""

    name: str
    sampling: Poisson
    plan: Plan


def controller_config(
    name: str, options: list[str], *, epsilon: float, delta: float, clients: int, rate: float, rounds: int
) -> RunConfig:
    """The configuration of a run with such a controller. ConfigError (a ValueError) names what is wrong with it."""
    chosen = dict(parse_setting(f"strategy.controller-options.{option}") for option in options)
    prefix = "strategy.controller-options."
    strategy = {"controller": name, "controller-options": {key.removeprefix(prefix): v for key, v in chosen.items()}}
    privacy = {"epsilon": epsilon, "delta": delta}
    return parse(
        {"clients": clients, "sampling-rate": rate, "rounds": rounds, "privacy": privacy, "strategy": strategy}
    )


def controller_page(config: RunConfig, dimension: int | None) -> RenderableType:
    """Draw what is committed to, what every kind of round releases, and its epsilon by each accountant."""
    controller = methods(config).controller
    noise = commitment, multipliers = commit_clients(config, controller)
    sampling = round_sampling(config, noise)
    setting = RunInfo(config.rounds, ((dimension or 1,),), sampling, multipliers, commitment.order)
    table = plain_table()
    for column in ("Release", "part", "sensitivity", "noise on the sum", "noise multiplier"):
        table.add_column(column, justify="left" if column in ("Release", "part") else "right")
    for release in rehearsal(controller, setting):
        together = f"{release.plan.effective_noise_multiplier:.4f}"
        for i, part in enumerate(release.plan.components()):
            unit = " C" if part.name == "update" else ""
            row = (number_text(part.sensitivity) + unit, number_text(part.noise_std) + unit)
            table.add_row(release.name if i == 0 else "", part.name, *row, f"{part.noise_multiplier:.4f}")
        table.add_row("", "together", "", "", together, style="bold")
    accounts = plain_table()
    accounts.add_column("Accountant")
    accounts.add_column("Epsilon", justify="right")
    for accountant in ("pld", "rdp"):
        try:
            value = epsilon_text(composition.epsilon(commitment.floor, config.privacy.delta, accountant), 4)
        except UnsupportedEvent:
            value = "-"
        accounts.add_row(accountant, value)
    headline = (
        f"Epsilon {number_text(config.privacy.epsilon)} at delta {delta_text(config.privacy.delta)}, controller "
        f"{config.strategy.controller}: {config.clients:,} clients, Poisson rate {config.sampling_rate:g}, "
        f"{config.rounds:,} rounds"
    )
    note = "Parts of one release are one Gaussian on one cohort; the run is calibrated for its multiplier, together."
    return Group(
        Text(headline, style="bold"),
        Padding(table, (1, 0, 1, 2)),
        Padding(accounts, (0, 0, 1, 2)),
        Padding(Text(note, style="dim"), (0, 0, 0, 2)),
    )


def rehearsal(controller: Controller[Any], setting: RunInfo) -> list[Rehearsed]:
    """Rehearse the initial release if there is one, rounds 1 and 2, and the last one."""
    found: list[Rehearsed] = []
    state = controller.init(setting, PublicSignals(0, 1.0))
    initial = controller.initial(setting.sampling)
    if initial is not None:
        found.append(Rehearsed("histogram", initial.sampling, controller.plan(state, setting, 0)))
        state = controller.update(state, setting, _released(found[-1], 0), PublicSignals(0, 1.0))
    for round in sorted({1, min(2, setting.rounds), setting.rounds}):
        found.append(Rehearsed(f"round {round}", setting.sampling, controller.plan(state, setting, round)))
        state = controller.update(state, setting, _released(found[-1], round), PublicSignals(round, 1.0))
    return found


def _released(release: Rehearsed, round: int) -> Release:
    plan, sampling = release.plan, release.sampling
    cohort = CohortSampler.insecure_from_seed(0).draw(sampling, round, label="round" if round else "histogram")
    return charged_release(Contribution.zero(plan), plan, cohort, ledger=_NoLedger(), noise=InsecureZeroNoise())


class _NoLedger:
    """A ledger that charges nothing, since nobody takes part in a rehearsal."""

    not_private: str | None = "a rehearsal without clients"

    def stamp_not_private(self, reason: str) -> None: ...

    def attempts(self, label: str, round: int) -> int:
        return 0

    def charge(self, event: ReleaseEvent) -> None: ...

    def note_release(self, receipt: None) -> None: ...
