"""The next steps for a reader of a report: what to change, which command to type.

Advice rests on released values, public data and settings, like the warnings of :mod:`simulations.report.judgement`,
which name what is wrong; this says what would be worth trying where nothing is.
"""

from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from server.run_folder import names
from simulations.report.judgement import is_drowned
from simulations.report.notation import epsilon_text, number_text
from simulations.report.outcome import guaranteed_pair
from simulations.report.read_run import Run

NOTABLE = 0.1
"""A change of the loss worth a word, as a share of all that the run took off it."""

NOT_SPENT = 0.95
"""A budget was not used up where less than this share of it is spent."""


class Command(NamedTuple):
    """A command to type, and what it is for."""

    purpose: str
    line: str


def advice(run: Run) -> list[str]:
    """Advise what to change in another run, each with its key; empty where the run has no rounds."""
    if not run.rounds or run.phases:
        return []
    return [*_unspent(run), *_faint(run), *_course(run)]


def _unspent(run: Run) -> Iterator[str]:
    pair, spent = guaranteed_pair(run), (run.guarantee or {}).get("epsilon_spent")
    if pair and spent is not None and run.state == "completed" and spent < NOT_SPENT * pair[0]:
        yield (
            f"The releases cost ε {epsilon_text(spent)} of {epsilon_text(pair[0])}: raise rounds to use the rest, or "
            "lower privacy.epsilon."
        )


def _faint(run: Run) -> Iterator[str]:
    """Compare the signal with the noise, where it can be told from it at all."""
    squares = [
        (record.signal_estimate**2, record.noise_norm**2)
        for record in run.rounds
        if record.signal_estimate is not None and record.noise_norm
    ]
    if not squares or run.not_private or is_drowned(run):
        return
    signal, noise = (sqrt(sum(column)) for column in zip(*squares, strict=True))
    if signal < noise:
        more = "More clients in a round (clients, sampling-rate)"
        if run.config and run.config.is_single_site:
            more = "A larger site.batch-size"
        yield (
            f"The signal in the released updates has {number_text(signal / noise)} times the norm of their noise. "
            f"{more} or fewer trained values (model.rank, model.layers) raise it."
        )


def _course(run: Run) -> Iterator[str]:
    """Whether the loss still fell at the end, or was lower before."""
    start = [run.start] if run.start else []
    losses = [(r.round, r.validation_loss) for r in (*start, *run.rounds) if r.validation_loss is not None]
    if len(losses) < 8:
        return
    best_round, best = min(losses, key=lambda pair: pair[1])
    (_, first), (_, last), quarter = losses[0], losses[-1], max(1, len(losses) // 4)
    gained, late = first - best, losses[-1 - quarter][1] - last
    if gained > 0 and late > NOTABLE * gained:
        yield (
            f"Validation loss still fell over the last {quarter} evaluations, by {number_text(late)} of "
            f"{number_text(first - last)} in all: raise rounds; lacquer plan says what that costs in noise."
        )
    elif gained > 0 and last - best > NOTABLE * gained:
        smooth = "" if run.config and run.config.strategy.served_average else ", or set strategy.served-average = 0.9"
        yield (
            f"Validation loss was lowest after round {best_round}, {number_text(best)}, and ended at "
            f"{number_text(last)}: lower the learning rate in strategy.optimizer-options{smooth}."
        )


def commands(run: Run) -> list[Command]:
    """List what can be done with the run, typed where the folder of runs lies."""
    return list(_commands(run, run.short_path))


def _commands(run: Run, folder: Path) -> Iterator[Command]:
    if run.state == "failed" and (run.path / names.LEDGER_FILE).is_file():
        yield Command("Go on with it", f"lacquer resume {names.shell_quoted(folder)}")
    if (run.path / names.ADAPTER_FOLDER / "adapter_config.json").is_file():
        if (run.results or {}).get("label_names"):
            yield Command("Classify a text", f'lacquer predict {names.shell_quoted(folder)} "a text"')
        else:
            yield Command("Ask the model", f'lacquer generate {names.shell_quoted(folder)} --prompt "a text"')
        yield Command(
            "Measure it on other public records", f"lacquer evaluate {names.shell_quoted(folder)} --data records.jsonl"
        )
        yield Command("Hand it on", f"lacquer export {names.shell_quoted(folder)} exported")
        if run.config and not run.config.is_deployed and not run.phases:
            yield Command("Attack it, for a lower bound on ε", f"lacquer audit {names.shell_quoted(folder)}")
    if run.config and not run.config.is_deployed and not run.phases:
        file = folder / names.CONFIG_FILE
        yield Command(
            "Repeat it with another seed", f"lacquer run {names.shell_quoted(file)} --set seed={run.config.seed + 1}"
        )
    yield Command("Set it beside the other runs", f"lacquer compare {names.shell_quoted(folder.parent)}")
    yield Command("Add up ε over runs on the same data", f"lacquer budget {names.shell_quoted(folder.parent)}")
