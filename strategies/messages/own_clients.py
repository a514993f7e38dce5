"""Typed messages to a node that holds the records of many clients and draws its cohorts among them itself.

When a run starts every node joins it and says how many clients it has, a public number that its operator has set. In a
round it is told how cohorts are drawn and draws its own: the server neither sends ids nor gets any, nor the number
drawn. What comes back is the same bounded sum as of any node.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, RecordDict

from privacy.commitment import Commitment
from privacy.events import CyclicPoisson, Json, Poisson
from strategies.messages.records import BadMessage, config_of, exactly, read_setting

JOIN = "clients"
"""Of Flower's query messages: the one by which a node joins a run."""


@dataclass(frozen=True)
class Draw:
    """The rule by which a node draws its part of a cohort.

    Equal values name equal draws: the node's secret does the rest.

    Attributes:
        run: of the server's ledger; the same when the run is resumed.
        label, attempt: of the release, and how often it was charged before.
        sampling: of all clients of the run; the node's own population is ``clients``.
        clients: how many the roster says the node has.
    """

    run: str
    label: str
    attempt: int
    sampling: Poisson
    clients: int

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"sampling": self.sampling.to_json()}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Draw":
        """BadMessage for what is no draw."""
        try:
            said = json.loads(text)
            run, label, attempt, clients = (said.pop(name) for name in ("run", "label", "attempt", "clients"))
            sampling = Poisson.from_json(said.pop("sampling"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"draw cannot be read: {type(error).__name__}") from None
        whole = type(attempt) is int and type(clients) is int and attempt >= 0 and clients >= 1
        if said or type(run) is not str or type(label) is not str or not whole:
            raise BadMessage("draw must hold run, label, attempt, sampling and clients and no others")
        return Draw(run, label, attempt, sampling, clients)


@dataclass(frozen=True)
class PlannedDraws:
    """The most that a run draws for releases of one label: a node answers no more, and draws in no other way.

    Attributes:
        samplings: of all clients of the run; where they take turns, without a turn.
        count: draws, >= 1; a release that is charged and lost, and done again, is two.
    """

    samplings: tuple[Poisson, ...]
    count: int

    def __post_init__(self) -> None:
        if not self.samplings or self.count < 1:
            raise ValueError(f"there must be a sampling, and count >= 1, got {self.samplings} and {self.count}")

    def to_json(self) -> Json:
        return {"samplings": [sampling.to_json() for sampling in self.samplings], "count": self.count}

    def holds(self, sampling: Poisson) -> bool:
        """Whether a draw of this sampling is one of the plan."""
        if isinstance(sampling, CyclicPoisson):
            within = sampling.turn is not None and sampling.turn < self.count
            return within and replace(sampling, turn=None) in self.samplings
        return sampling in self.samplings


@dataclass(frozen=True)
class JoinRequest:
    """Server to node: join this run, and say how many clients are yours.

    Attributes:
        job: as in a request to train.
        draws: the run's plan, by label of releases.
        commitment: of the server's ledger, in JSON; the server's word, for the account of a node's owner.
    """

    run: str
    job: str
    draws: Mapping[str, PlannedDraws] = field(default_factory=dict)
    commitment: str = ""

    def to_records(self) -> RecordDict:
        draws = json.dumps({label: draws.to_json() for label, draws in self.draws.items()}, sort_keys=True)
        return RecordDict(
            {"config": ConfigRecord({"run": self.run, "job": self.job, "draws": draws, "commitment": self.commitment})}
        )

    @staticmethod
    def from_records(records: RecordDict) -> "JoinRequest":
        config = config_of(records)
        draws = draws_from_json(read_setting(config, "draws", str))
        run, job, commitment = (read_setting(config, name, str) for name in ("run", "job", "commitment"))
        return JoinRequest(run, job, draws, commitment)


def planned_draws(commitment: Commitment) -> dict[str, PlannedDraws]:
    """The most draws of a run in floor mode, by label of releases, for nodes that hold requests against it."""
    draws = dict[str, PlannedDraws]()
    for label in {step.label for step in commitment.floor}:
        steps = [step for step in commitment.floor if step.label == label]
        samplings = tuple(dict.fromkeys(step.sampling for step in steps))
        draws[label] = PlannedDraws(samplings, sum(step.count for step in steps))
    return draws


def draws_from_json(text: str) -> dict[str, PlannedDraws]:
    """A run's plan of draws by label; BadMessage for what is none."""
    try:
        return {
            str(label): PlannedDraws(tuple(map(Poisson.from_json, said["samplings"])), int(said["count"]))
            for label, said in json.loads(text).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"the plan of draws cannot be read: {type(error).__name__}") from None


def join_reply(clients: int, code: str) -> RecordDict:
    """Node to server: the public number of its clients, and the code it runs."""
    return RecordDict({"config": ConfigRecord({"clients": clients, "code": code})})


def read_join_reply(records: RecordDict, code: str) -> int:
    """The number of clients that a node says it has; BadMessage for anything but one, or from other code."""
    config = config_of(records)
    exactly(records, "config")
    if read_setting(config, "code", str) != code:
        raise BadMessage(f"client runs other code than the server ({code[:12]})")
    clients = int(read_setting(config, "clients", int))
    if clients < 1 or len(config) != 2:
        raise BadMessage("a node with clients of its own must have at least one")
    return clients
