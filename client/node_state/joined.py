"""The folder that a node with many clients keeps of a run it has joined: the secret of its cohorts, its records, the
plan.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from client.data.local import OwnData
from privacy import durable
from privacy.errors import CorruptRun
from privacy.randomness.sampling import CohortSampler
from strategies.messages.own_clients import PlannedDraws, draws_from_json
from strategies.messages.records import BadMessage


@dataclass(frozen=True, repr=False)
class Joined:
    """The state that a node with many clients keeps of a run, in a folder that outlives messages, resumes and restarts.

        sampling.key    the secret that draws its cohorts
        joined.json     the number of its clients, the digest of their records, the seed of local randomness, the plan
        drawn.jsonl     the draws that it has answered

    Attributes:
        clients: the public number.
        records: digest; the records of a run stay the same.
        seed: of the clients' local randomness; known to the node alone.
        draws: the run's plan, by label of releases.
    """

    clients: int
    records: str
    seed: int
    sampler: CohortSampler
    draws: Mapping[str, PlannedDraws]

    @staticmethod
    def begin(folder: Path, clients: int, records: str, draws: Mapping[str, PlannedDraws]) -> None:
        """Make the folder of the run."""
        durable.new_folder(folder)
        CohortSampler.create().save(folder / "sampling.key")
        plan = json.dumps({label: planned.to_json() for label, planned in draws.items()})
        said = {"clients": clients, "records": records, "seed": secrets.randbits(62), "draws": plan}
        durable.write(folder / "joined.json", json.dumps(said) + "\n", mode=0o600)

    @staticmethod
    def load(folder: Path) -> "Joined":
        """CorruptRun if what was kept is not whole."""
        try:
            said = json.loads((folder / "joined.json").read_text(encoding="utf-8"))
            clients, records, seed = int(said["clients"]), str(said["records"]), int(said["seed"])
            sampler, draws = CohortSampler.load(folder / "sampling.key"), draws_from_json(str(said["draws"]))
            return Joined(clients, records, seed, sampler, draws)
        except (OSError, KeyError, TypeError, ValueError, BadMessage) as error:
            raise CorruptRun(f"{folder} is not what this node kept of the run: {error}; restore it") from error

    def refuse_others(self, clients: int, data: OwnData) -> None:
        """BadMessage unless the clients, their number and their records are those with which the node joined."""
        if (clients, data.digest) != (self.clients, self.records):
            raise BadMessage(
                "this node joined the run with other clients or records: put its file and its number of clients back; "
                "clients leave and join between runs"
            )
