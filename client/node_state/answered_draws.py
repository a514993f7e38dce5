"""The draws that a node with many clients has answered: each within the run's plan, and none in two ways.

A node's secret decides who is in a cohort, but a server that could name any rate would have everybody, and one that
could name any label or attempt would have as many cohorts as it likes without a charge. So the node is told the plan
when it joins the run, in a signed message, and holds every request against it. A server that is resumed asks once more
for what it had not charged; it must then ask the same, which tells it nothing new.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from privacy.errors import CorruptRun
from privacy.events import CyclicPoisson
from strategies.messages.own_clients import Draw, PlannedDraws
from strategies.messages.records import BadMessage

FILE = "drawn.jsonl"


class Answered(NamedTuple):
    """A draw that was answered, and the digest of all that the answer depended on."""

    label: str
    round: int
    attempt: int
    turn: int | None
    request: str


def admit_draw(folder: Path, planned: Mapping[str, PlannedDraws], draw: Draw, round: int, request: str) -> None:
    """Note a draw durably, before it is answered.

    Args:
        folder: what the node keeps of the run.
        planned: by label, as the node was told when it joined.
        request: digest of all that the answer depends on.

    Raises:
        BadMessage: the plan has no such draw, has no more of them, or the draw was answered for another request.
        CorruptRun: the file is damaged.
    """
    plan = planned.get(draw.label)
    if plan is None or not plan.holds(draw.sampling):
        raise BadMessage(
            f"the run was joined with a plan of draws for {', '.join(sorted(planned))}; {draw.sampling} for "
            f"{draw.label!r} is none of them"
        )
    turn = draw.sampling.turn if isinstance(draw.sampling, CyclicPoisson) else None
    with (folder / FILE).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        answered = _read(file.read(), folder / FILE)
        what = f"{draw.label} {round}, attempt {draw.attempt},"
        this = Answered(draw.label, round, draw.attempt, turn, request)
        if this in answered:  # by a server that is resumed
            return
        same = [one for one in answered if one.label == draw.label]
        if any((one.round, one.attempt) == (round, draw.attempt) for one in same):
            raise BadMessage(f"{what} was answered for another request")
        if any(one.round == round and one.attempt > draw.attempt for one in same):
            raise BadMessage(f"{what} comes after a later one was answered")
        if turn is not None and any(one.turn is not None and one.turn >= turn for one in same):
            raise BadMessage(f"{what} comes at turn {turn}, which has passed")
        if len(same) >= plan.count:
            raise BadMessage(f"the run was joined with a plan of {plan.count} draws for {draw.label!r}, all answered")
        file.write(json.dumps(this) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read(text: str, path: Path) -> list[Answered]:
    found = list[Answered]()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            label, round, attempt, turn, request = json.loads(line)
            found.append(Answered(str(label), int(round), int(attempt), None if turn is None else int(turn), request))
        except (ValueError, TypeError) as error:
            raise CorruptRun(f"{path} line {number} is no draw ({error}); restore it") from error
    return found
