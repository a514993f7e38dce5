"""Warnings that judge: what a run has learnt is nothing, or will be, and what to change.

Every judgement rests on released values, public data and settings, so it may stand in a report. Some can be made before
the run starts (:func:`foresee_problems`), the others when it has ended (:func:`judgements`).
"""

import math
from collections.abc import Iterator, Sequence

from server.config.schema import RunConfig
from server.run_folder.canaries import canary_note
from server.run_folder.data_facts import DataFacts
from server.run_folder.round_record import RoundRecord
from simulations.report.data_block import shares_cut
from simulations.report.notation import number_text, percent_text
from simulations.report.outcome import beside_public, clearly_better, gain_of, validation_losses
from simulations.report.read_run import Run

LEAST_COHORT = 20
"""Clients expected in a round below which noise drowns what they say: it is divided by their number."""

MUCH_CUT = 0.2
"""Share of the training records that are cut, from which the length is too small for the data."""

SKEWED = 1.5
"""A data set is skewed where its most frequent class is so many times as frequent as classes are on average."""

MOVED = 1.25
"""A clip threshold has settled where it changes by less than this factor in the last quarter of the rounds."""

DEVIATIONS = 2.0
"""A signal is told from noise where it exceeds so many standard deviations of what noise alone would show."""


def foresee_problems(config: RunConfig, facts: DataFacts | None) -> list[str]:
    """Warn of what can be foreseen before the run starts."""
    found = []
    if config.privacy.unit == "client" and config.expected_cohort < LEAST_COHORT and not config.privacy.non_private:
        found.append(
            f"Only {number_text(config.expected_cohort)} clients are expected in a round. The noise is shared by them, "
            f"so below {LEAST_COHORT} it usually drowns what they learn: raise sampling-rate or clients."
        )
    cut = 0.0 if facts is None else shares_cut(facts).get("train", 0.0)
    if cut > MUCH_CUT:
        found.append(
            f"{percent_text(cut)} of the training records are cut at {config.model.max_length} tokens: raise "
            "model.max-length."
        )
    return found + [f"{count:,} {what}." for what, count in ({} if facts is None else facts.noted).items()]


def judgements(run: Run) -> list[str]:
    """Judge what is wrong with what a run has learnt, the worst first; empty where nothing is."""
    planted = [note] if run.config is not None and (note := canary_note(run.config)) else []
    found = [*planted, *_missing(run), *_worthless(run), *_absent(run.rounds), *_drowned(run), *_unsettled(run.rounds)]
    if run.config is not None:
        found += _skewed(run) + foresee_problems(run.config, run.facts)
    return found


def _missing(run: Run) -> Iterator[str]:
    for name, reason in ((run.results or {}).get("missing") or {}).items():
        yield (
            f"{name[0].upper()}{name[1:]}: missing, it failed ({reason}). The adapter and its guarantee are whole; "
            f"`lacquer resume {run.shown_path}` does what is missing and spends nothing."
        )


def _worthless(run: Run) -> Iterator[str]:
    test, majority = run.result("test_accuracy"), run.result("majority_accuracy")
    if test is not None and majority is not None and test < majority:
        yield (
            f"Test accuracy, {percent_text(test)}, is below {percent_text(majority)}, which always answering the most "
            "frequent class gives. This model is worse than a constant: do not use it."
        )
    beside = beside_public(run)
    if beside is not None and not beside.better:
        yield (
            f"The run did not clearly beat public records alone, which cost no privacy: {beside.public} with them, "
            f"{beside.run} after private training. Raise the number of {_protected(run)} or privacy.epsilon, or use "
            "the public start."
        )
    found = gain_of(run)
    if found is not None and run.rounds and not found.better:
        yield (
            f"The run has learnt nothing beyond its start: validation {found.name} is {found.after_text} after "
            f"{run.rounds[-1].round} rounds and was {found.before_text} before the first. Raise the number of "
            f"{_protected(run)}, the rounds or privacy.epsilon."
        )


def _protected(run: Run) -> str:
    """The plural of what there must be more of to share the same noise."""
    return "clients" if run.config is None or run.config.privacy.unit == "client" else "records at each site"


def _absent(rounds: Sequence[RoundRecord]) -> Iterator[str]:
    short = [
        (record.round, record.presence) for record in rounds if record.presence and not record.presence.is_complete
    ]
    if short:
        number, presence = short[-1]
        yield (
            f"{len(short)} of {len(rounds)} rounds went without some of the clients, the last of them round {number}: "
            f"{presence.text}."
        )


def is_drowned(run: Run) -> bool:
    """Whether the released updates cannot be told from noise: by their squared norms, less the noise in them, against
    the spread of those under noise alone. False where that is not known."""
    values = [(r.update_norm, r.noise_norm) for r in run.rounds if r.update_norm is not None and r.noise_norm]
    dimension = run.result("dimension")
    if not values or not dimension or run.not_private:
        return False
    signal = sum(update**2 - noise**2 for update, noise in values if update is not None and noise is not None)
    spread = math.sqrt(sum(2.0 * noise**4 / dimension for _, noise in values if noise is not None))
    return signal < DEVIATIONS * spread


def sum_text(run: Run) -> str:
    """Say that the sum of releases shows a signal though no single one does, since the model clearly beats its start.

    Signals of T rounds add up like T and noise like sqrt(T). Empty where a single release can be told from its noise
    (:func:`is_drowned`), or where the model does not clearly beat its start.
    """
    found, (before, after) = gain_of(run), validation_losses(run)
    if found is None or before is None or after is None or not clearly_better(run) or not is_drowned(run):
        return ""
    return (
        f"No single release can be told from its noise here. Their sum over {len(run.rounds)} rounds can: validation "
        f"loss fell from {number_text(before)} to {number_text(after)}; {found.name} was {found.before_text} before "
        f"round 1 and is {found.after_text} now."
    )


def _drowned(run: Run) -> Iterator[str]:
    if is_drowned(run) and not sum_text(run):
        measured = sum(r.update_norm is not None and bool(r.noise_norm) for r in run.rounds)
        yield (
            f"Over {measured} rounds the released updates cannot be told from their noise. Lower the clip "
            "threshold, train fewer values (model.rank, model.layers), or raise "
            f"the number of {_protected(run)} or privacy.epsilon."
        )


def _unsettled(rounds: Sequence[RoundRecord]) -> Iterator[str]:
    bounds = [(record.round, record.clip_bound) for record in rounds if record.clip_bound]
    last = bounds[-max(3, len(bounds) // 4) :]
    if len(bounds) < 4:
        return
    (first, before), (_, after) = last[0], last[-1]
    assert before is not None
    assert after is not None
    if max(before, after) >= MOVED * min(before, after):
        yield (
            f"The clip threshold C is still moving: {number_text(before)} in round {first}, {number_text(after)} at "
            "the end. Start the controller nearer to where it ends, or plan more rounds."
        )


def _skewed(run: Run) -> list[str]:
    config, majority = run.config, run.result("majority_accuracy")
    labels = len((run.results or {}).get("label_names") or ())
    if config is None or majority is None or config.local.balance != "prior" or majority * labels < SKEWED:
        return []
    return [
        f"local.balance = 'prior' trains for balanced classes, but {percent_text(majority)} of the test records are of "
        f"one of {labels} classes. Set local.balance = 'none' unless rare classes matter most."
    ]
