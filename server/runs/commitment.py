"""The noise of a run over clients or records: calibrated once, for the first release to be planned with it.

Whoever starts a run calibrates its noise to refuse a target that cannot be kept, and hands it on in the run's folder
(:mod:`server.run_folder.handed_on`); the run's own process takes it from there. What it takes is of the run's settings
and of this code, or it is calibrated anew; and it is not trusted: a commitment to another target is passed over, the
ledger accounts the whole of it when it is created, and refuses every release that it does not name.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client.record_level import calibration
from client.record_level.settings import RecordLevelSettings
from privacy.accountants import buffered, factorisation
from privacy.accountants import calibrate as calibrate_noise
from privacy.commitment import WEAKEST_NOISE_MULTIPLIER, FloorStep
from privacy.contribution import Plan
from privacy.events import Banded, Correlation, PartPoisson, Poisson
from privacy.randomness.sampling import split_units
from server.config.load import ConfigError
from server.config.methods import methods
from server.config.schema import RunConfig
from server.evaluation.private import MOST_WITHIN, accuracy_within
from server.run_folder import handed_on
from server.run_folder.names import CANDIDATE_FILE, COMMITMENT_FILE
from strategies.calibration import Calibrated, calibrate
from strategies.controllers.controller import Controller, NoBudgetLeft, PublicSignals, RunInfo
from strategies.plugins import BadAnswer, expect, place
from strategies.published.raw_rows import UnsoundRule


def round_sampling(config: RunConfig, noise: Calibrated | None = None) -> Poisson:
    """The sampling by which a round's cohort is drawn; ``noise`` says it where clients take turns."""
    if noise is not None and config.privacy.noise_correlation != "none":
        return noise.commitment.floor[0].sampling
    everyone = Poisson(config.sampling_rate, config.clients)
    return everyone if config.evaluation.data == "public" else _split(config, everyone)[0]


def held_out_sampling(config: RunConfig) -> PartPoisson:
    """The sampling by which the clients are drawn that answer a private evaluation."""
    return _split(config, Poisson(config.sampling_rate, config.clients))[1]


def _split(config: RunConfig, everyone: Poisson) -> tuple[PartPoisson, PartPoisson]:
    asked = config.evaluation
    try:
        return split_units(everyone, asked.held_out, config.seed, asked.sampling_rate)
    except ValueError as error:
        raise ConfigError(f"evaluation.held-out = {asked.held_out:g}: {error}") from error


def evaluation_steps(config: RunConfig) -> tuple[FloorStep, ...]:
    """The private evaluations of a run, with the least noise that keeps their target; none where public data validate.

    Raises:
        ConfigError: no noise keeps it, or what the noise leaves says nothing.
    """
    asked, privacy = config.evaluation, config.privacy
    if asked.data == "public":
        return ()
    sampling, count = held_out_sampling(config), -(-config.rounds // asked.every)
    target = asked.epsilon or privacy.epsilon
    with name_target(target, " of the private evaluations (evaluation.epsilon, else privacy.epsilon)"):
        found = calibrate_noise(target, privacy.delta, sampling, count, force=True)
    step = FloorStep("evaluation", sampling, max(found, WEAKEST_NOISE_MULTIPLIER), count)
    within = accuracy_within(sampling, step.noise_multiplier, 3 if asked.confusion or asked.tokens else 2)
    if within > MOST_WITHIN and not privacy.non_private:
        raise ConfigError(
            f"evaluation.data = 'private': {sampling.members} held-out clients, asked {count} times with noise "
            f"multiplier {step.noise_multiplier:g}, give an accuracy that is known to +-{100 * within:.0f} points (95 "
            f"%), more than {100 * MOST_WITHIN:.0f}: it says nothing. Raise evaluation.every (now {asked.every}), "
            f"clients (now {config.clients}), evaluation.held-out (now {asked.held_out:g}) or the epsilon (now "
            f"{target:g}), or evaluate on public data"
        )
    return (step,)


def choose_correlation(config: RunConfig) -> tuple[Poisson, Correlation | None]:
    """Choose how cohorts are drawn and how their noise is correlated over rounds.

    With 0 bands or buffers this is whatever leaves least noise. That may be independent noise, which is one band; a run
    of it is one without correlation.

    Raises:
        ValueError: no noise keeps the target.
    """
    if config.privacy.noise_correlation == "none":
        return round_sampling(config), None
    privacy, momentum = config.privacy, server_momentum(config)
    run = (privacy.epsilon, privacy.delta, config.clients, config.sampling_rate, config.rounds)
    if privacy.noise_correlation == "blt":
        if privacy.buffers:
            sampling = buffered.turns(config.clients, config.sampling_rate, config.rounds)
            return sampling, buffered.optimise(privacy.buffers, config.rounds, sampling.groups, momentum)
        best = buffered.choose(*run, momentum)[0]
        if best.error < factorisation.price_strategy(1, *run, momentum).error:
            return best.sampling, best.correlation
        return round_sampling(config), None
    bands = privacy.bands
    if not bands:
        bands = factorisation.choose(*run, momentum)[0].correlation.bands
    if bands == 1:
        return round_sampling(config), None
    sampling = factorisation.cyclic(bands, config.clients, config.sampling_rate)
    return sampling, Banded(factorisation.optimise(bands, config.rounds, momentum))


def server_momentum(config: RunConfig) -> float:
    """The momentum with which the server adds up releases; 0 for plain sums."""
    return float(getattr(methods(config).optimizer, "momentum", 0.0))


def not_private_reason(config: RunConfig) -> str | None:
    """The reason why the configured run gives no guarantee; None if it gives one."""
    reasons = []
    if config.privacy.noise == "insecure-zero":
        reasons.append("no noise is added (privacy.noise = insecure-zero)")
    if config.privacy.seeded_cohorts:
        reasons.append("cohorts can be foretold (privacy.seeded-cohorts = true)")
    if not reasons and config.privacy.non_private:
        reasons.append("privacy.non-private = true")
    return "; ".join(reasons) or None


@contextmanager
def name_target(epsilon: float, what: str = "") -> Iterator[None]:
    """Turn a ValueError of calibration into a ConfigError that names the target, and ``what`` it is for."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"privacy.epsilon = {epsilon:g}{what}: {error}") from error


def commit_clients(config: RunConfig, controller: Controller[Any], folder: Path | None = None) -> Calibrated:
    """Calibrate and commit the noise of a run over clients, or take what ``folder`` holds of it.

    The controller's initial release is part of the target. Nothing is sampled, no budget is spent.

    Raises:
        ConfigError: no noise keeps the target, or the controller cannot work at the noise that does.
    """
    privacy = config.privacy

    def made() -> Calibrated:
        sampling, correlation = choose_correlation(config)
        found = calibrate(
            controller,
            sampling,
            config.rounds,
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            mode=privacy.mode,
            noise_shares=config.noise_shares,
            correlation=correlation,
            not_private=not_private_reason(config),
            apart=evaluation_steps(config),
        )
        if isinstance(controller, UnsoundRule):
            return found._replace(commitment=controller.commit_noise(found.commitment))
        return found

    with name_target(privacy.epsilon):
        found = _once(config, config.clients, made, folder)
    sampling = round_sampling(config, found)
    # the plan's queries must leave the update some budget; the layout is not known yet and does not matter to that
    info = RunInfo(config.rounds, ((1,),), sampling, found.multipliers, found.commitment.order)

    def sendable(plan: Plan) -> None:
        _refuse_unsendable(plan)
        if config.noise_shares is not None:
            config.noise_shares.grid_bits([part.noise_multiplier for part in plan.components()])
            if plan.effective_noise_multiplier < WEAKEST_NOISE_MULTIPLIER and not privacy.non_private:
                raise ConfigError(
                    f"privacy.epsilon = {privacy.epsilon:g} with rounds = {config.rounds} leaves a noise multiplier of "
                    f"{plan.effective_noise_multiplier:.2g}; clients of secure sums take part from "
                    f"{WEAKEST_NOISE_MULTIPLIER:g} on: lower privacy.epsilon, or raise rounds"
                )

    what = f"strategy.controller = {config.strategy.controller!r}"
    try:
        refuse_unplannable(controller, info, what, sendable)
    except ConfigError as error:
        if isinstance(error.__cause__, NoBudgetLeft):
            raise ConfigError(_too_few(config, what, error.__cause__)) from error
        raise
    return found


def _too_few(config: RunConfig, what: str, error: NoBudgetLeft) -> str:
    """The refusal of a cohort that is too small: what is counted of it has noise in proportion to its size."""
    return (
        f"{what}: an expected cohort of {config.expected_cohort:g} is too small. What it asks beside the update "
        f"({error.names}) takes {error.times:.3g} times the budget of a round. Raise clients (now {config.clients}) or "
        f"sampling-rate (now {config.sampling_rate:g}), raise privacy.epsilon (now {config.privacy.epsilon:g}), or "
        f"give {error.names} more noise (strategy.controller-options)"
    )


def commit_records(
    config: RunConfig, site: RecordLevelSettings, population: int, folder: Path | None = None, *, records: int = 0
) -> Calibrated:
    """Calibrate and commit the noise of a run over the records of one site.

    Args:
        population: number of the site's protected units.
        folder: of the run; what was calibrated for it is taken from there.
        records: number of the units' records under their cap.
    """
    drawn = f"{population} units" if site.sampling_level == "user" else f"{records} records of {population} units"
    with name_target(config.privacy.epsilon, f" over {site.steps} steps of {site.batch_size} of {drawn}"):
        return _once(config, population, lambda: calibration.commit(site, population, records=records), folder)


def _once(config: RunConfig, population: int, made: Callable[[], Calibrated], folder: Path | None) -> Calibrated:
    """The noise that ``folder`` holds for this run, else noise that is made now, which it then holds."""
    if folder is None:
        return made()
    found = handed_on.read_noise(folder, config, Calibrated.from_json)
    candidate = (folder / CANDIDATE_FILE).is_file()
    tuned = found is not None and found.commitment.tuning is not None
    if found is None or not _is_of(found, config, population) or tuned != candidate:
        if candidate:
            raise ConfigError(
                f"{folder / COMMITMENT_FILE} holds no noise for these settings and this code, and that of a candidate "
                "of a private sweep is never calibrated anew: it would be that of a run by itself; continue the sweep"
            )
        found = made()
        handed_on.write_noise(folder, config, found.to_json())
    return found


def _is_of(found: Calibrated, config: RunConfig, population: int) -> bool:
    """Whether noise is for the target of the run; what it costs is for the ledger to find out."""
    commitment, privacy = found.commitment, config.privacy
    stated = (commitment.unit, commitment.population, commitment.epsilon, commitment.delta, commitment.mode)
    return (
        stated == (config.unit, population, privacy.epsilon, privacy.delta, privacy.mode)
        and commitment.adjacency == ("add_remove" if config.noise_shares is None else "zero_out")
        and commitment.noise_shares == config.noise_shares
        and commitment.not_private == not_private_reason(config)
        and len(found.multipliers) == config.rounds
    )


def refuse_unplannable(controller: Controller[Any], info: RunInfo, what: str, check: Callable[[Plan], object]) -> None:
    """Refuse a controller that cannot plan its first release at the noise there is.

    Args:
        what: how the error begins, ending with the name it is configured by.
        check: of the plan; raises ValueError.

    Raises:
        ConfigError: what it raised, with its place if it is one of the user's own.
    """
    first = 0 if controller.initial(info.sampling) else 1
    try:
        plan = controller.plan(controller.init(info, PublicSignals(0, None)), info, first)
        check(expect("controller", controller, "plan", plan, Plan, "a Plan (privacy.contribution)"))
    except BadAnswer as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error
    except Exception as error:
        if ":" not in what.rpartition(" = ")[2]:
            raise
        raise ConfigError(f"{what}: {type(error).__name__}: {error}{place(error)}") from error


def _refuse_unsendable(plan: Plan) -> None:
    """Refuse a plan that nodes, which are sent it as JSON, could not rebuild: every reply would fail, charged.

    Raises:
        ValueError: it cannot be sent.
    """
    try:
        Plan.from_json(json.loads(json.dumps(plan.to_json())), plan.clip.arrays())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"its plan cannot be sent to the nodes: {type(error).__name__}: {error}; plan with the clip maps of "
            "privacy/clipping/norms.py and the queries of privacy/queries.py"
        ) from error
