"""What a run relies on in a controller."""

import math
from typing import Any

import torch

from privacy.clip_map import clip_arrays
from privacy.clipping import NoUpdate, clip_from_json
from privacy.commitment import ROUNDING
from privacy.conformance import adversarial_rows, check_clip_map, check_query
from privacy.mechanism import Plan, Units
from privacy.queries import query_from_json
from strategies.conformance.errors import broken, rule
from strategies.conformance.rehearsal import Account, made_up_units, release, settings
from strategies.conformance.repeatability import Subject, survived
from strategies.controller import Controller, InitialRelease, PublicSignals, Setting
from strategies.packing import same_bits

ROUNDS = 8


def check_controller(controller: Controller[Any], *, setting: Setting | None = None, seed: int = 0) -> None:
    """Raise ConformanceError unless ``controller`` keeps its promises in rehearsed runs.

    Checked, under the names of the rules: the protocol is there ("protocol"); every answer is a function of the
    arguments alone ("deterministic", "inputs", "global randomness"); a plan has the dimension of its round, also where
    layouts change ("dimension"), and noise at least that of the setting in floor mode ("noise"); the initial release is
    as announced ("initial release"); a filter is not overspent ("budget"); clip map and queries keep their sensitivity
    on adversarial units ("sensitivity"); the state comes back from a checkpoint and plans the same ("checkpoint");
    step scale and released values are numbers ("numbers"); a round where nobody comes, or whose public loss is NaN, is
    survived ("runs").

    Args:
        controller: a fresh object.
        setting: rehearse this run only, of at least 2 rounds; None rehearses three small ones.
        seed: of the made-up clients.
    """
    for member in vars(Controller):
        if not member.startswith("_") and not hasattr(controller, member):
            broken("protocol", f"{type(controller).__name__} has no {member}", "see strategies/controller.py")
    subject = Subject(controller)
    rounds = ROUNDS if setting is None else setting.rounds
    profile = subject.call("profile", rounds)
    if len(profile) != rounds or not all(_positive(share) for share in profile):
        broken("protocol", f"profile({rounds}) is {profile!r}", "return one finite number > 0 per round")
    runs = settings(profile, rounds) if setting is None else {"the run": setting}
    for run in runs.values():
        _rehearse(subject, run, controller.reads_validation, seed)


def _rehearse(subject: Subject, setting: Setting, reads_validation: bool, seed: int) -> None:
    initial: InitialRelease | None = subject.call("initial", setting.sampling, form=repr)
    account = Account(setting, initial)
    state = start = subject.call("init", setting, PublicSignals(0, 1.0 if reads_validation else None))
    for round in range(0 if initial is not None else 1, setting.rounds + 1):
        plan: Plan = subject.call("plan", state, round, form=_sent)
        _check_plan(plan, round, setting, initial)
        if round <= 2 or round == setting.rounds:
            _check_sensitivity(plan, round, seed)
        back = survived(state, start, {"setting": setting})
        if not same_bits(_sent(subject.call("plan", back, round, form=_sent)), _sent(plan)):
            broken(
                "checkpoint", f"the restored state plans round {round} differently", "keep all it needs in the state"
            )
        _check_numbers(subject, state)
        sampling = setting.sampling if round or initial is None else initial.sampling
        released = release(plan, round, sampling, account, seed)
        public = PublicSignals(round, _public_loss(round) if reads_validation else None, account.rho_spent)
        state = subject.call("update", state, released, public)
    survived(state, start, {"setting": setting})


def _sent(plan: Plan) -> tuple[Any, ...]:
    """All of a plan that nodes are given."""
    return plan.to_json(), clip_arrays(plan.clip)


def _check_plan(plan: Plan, round: int, setting: Setting, initial: InitialRelease | None) -> None:
    if round == 0:
        assert initial is not None
        if plan.components() != initial.components:
            broken(
                "initial release",
                f"plan of round 0 releases {plan.components()}, initial() announced {initial.components}",
                "calibration counts what initial() says: plan exactly that",
            )
        return
    if isinstance(plan.clip, NoUpdate) or plan.clip.params != setting.dimension(round):
        broken(
            "dimension",
            f"plan of round {round} clips {plan.clip.params} values, the round trains {setting.dimension(round)}",
            "size the clip map by setting.dimension(round) or setting.blocks(round), for each round anew",
        )
    least, planned = setting.noise_multiplier(round), plan.effective_noise_multiplier
    if setting.order is None and planned < least * (1 - ROUNDING):
        broken(
            "noise",
            f"round {round} has effective noise multiplier {planned:.6g}, the floor is {least:.6g}",
            "give the update what queries leave: strategies.joint_event.update_multiplier(floor, queries)",
        )


def _check_sensitivity(plan: Plan, round: int, seed: int) -> None:
    remedy = "use the maps of privacy/clipping.py and the queries of privacy/queries.py, or mend yours"
    width = max(plan.clip.params, 1)
    rows = torch.cat([adversarial_rows(width), made_up_units(plan, round, seed).rows[:6]])
    losses = torch.tensor([0.0, -1.0, 1e38, math.nan, math.inf, -math.inf, *(0.1 * i for i in range(len(rows) - 6))])
    units = Units(rows, losses, torch.arange(-1, len(rows) - 1))
    with rule("sensitivity", f"the clip map of round {round} fails", remedy):
        if not isinstance(plan.clip, NoUpdate):
            check_clip_map(plan.clip, rows, clip_from_json)  # nodes are sent a plan as JSON
    for query in plan.queries:
        with rule("sensitivity", f"the query {query.name!r} of round {round} fails", remedy):
            check_query(query, units, query_from_json)


def _check_numbers(subject: Subject, state: Any) -> None:
    scale = subject.call("step_scale", state)
    if not isinstance(scale, float | int) or not math.isfinite(scale) or scale < 0:
        broken("numbers", f"step_scale is {scale!r}", "return a finite number >= 0; 1.0 leaves the optimizer alone")
    values = subject.call("released_values", state)
    if not isinstance(values, dict) or not all(
        isinstance(name, str) and isinstance(value, float | int) for name, value in values.items()
    ):
        broken("numbers", f"released_values is {values!r}", "return a dict of names and numbers")


def _public_loss(round: int) -> float:
    """Falls, with bumps; once not a number, as when a model diverged."""
    return math.nan if round == 4 else 0.96**round * (1 + 0.02 * math.sin(3 * round))


def _positive(share: object) -> bool:
    return isinstance(share, float | int) and math.isfinite(share) and share > 0
