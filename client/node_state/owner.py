"""The policy of the owner of a node's records, in the node's own settings, which no server can change.

    flower-supernode --node-config '... account="/state/notes.account" policy="/keys/policy.toml"'

- ``account``: the lifetime budget of the records (:mod:`privacy.ledger.account`), made by ``lacquer account create``.
  A site and a party of secure sums debit what their own ledgers commit to, which is a proof. A node with many clients
  debits what the server says, signed, that it committed to: a policy, since the noise is the server's.
- ``account-state``: the folder in which this machine keeps, apart from the account, how far it had got; default
  ``$XDG_STATE_HOME/lacquer`` or ``~/.local/state/lacquer``. In a container, one that outlives it.
- ``policy``: a file of limits, see :class:`Policy`.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from client.settings import CountOrAuto, Table, explain, state_folder
from privacy.ledger.place import At
from strategies.messages.records import BadMessage

SETTINGS = ("account", "account-state", "policy")


class Policy(Table):
    """The limits of a node's owner; what is left out is not limited.

    Attributes:
        epsilon_per_run: the most of one run.
        epsilon_per_month: the most of all runs of a calendar month together; needs an account.
        releases: the most releases (rounds, or steps at a site) of one run; 0 is no limit.
        other_clients: the least number of clients at other nodes, as the server says; 0 is no limit.
        tasks, models: those that may be trained; empty allows every one.
    """

    epsilon_per_run: Annotated[float, Field(gt=0)] = math.inf
    epsilon_per_month: Annotated[float, Field(gt=0)] = math.inf
    releases: CountOrAuto = 0
    other_clients: CountOrAuto = 0
    tasks: list[str] = Field(default_factory=list)
    models: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Owner:
    """The account and the policy of a node."""

    account: At | None = None
    policy: Policy = field(default_factory=Policy)

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> "Owner":
        """Read both from Flower's node configuration.

        Raises:
            BadMessage: the policy cannot be read; guessing could allow what the owner does not want.
        """
        policy, account = Policy(), None
        if "policy" in node_config:
            file = Path(str(node_config["policy"])).expanduser()
            try:
                policy = Policy.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
            except ValidationError as error:
                raise BadMessage(f"{file}: {'; '.join(map(explain, error.errors()))}") from None
            except (OSError, ValueError) as error:
                raise BadMessage(f"{file} cannot be read: {error}") from None
        if "account" in node_config:
            file = Path(str(node_config["account"])).expanduser()
            place = Path(str(node_config.get("account-state") or state_folder())).expanduser()
            account = At(file, place, policy.epsilon_per_month)
        elif policy.epsilon_per_month < math.inf:
            raise BadMessage("epsilon-per-month in this node's policy needs an account; name one in its settings")
        return Owner(account, policy)

    def refusal(self, *, epsilon: float, releases: int, task: str, model: str, others: int | None) -> str:
        """Explain to the server why a run is not allowed; empty if it is.

        Args:
            releases: that it may make.
            others: number of clients at other nodes; None where nobody says it.
        """
        policy = self.policy
        if epsilon > policy.epsilon_per_run:
            return f"this node's owner allows an epsilon of at most {policy.epsilon_per_run:g} a run"
        if policy.releases and releases > policy.releases:
            return f"this node's owner allows at most {policy.releases} releases a run"
        if policy.other_clients and (others is None or others < policy.other_clients):
            return f"this node's owner asks for at least {policy.other_clients} clients at other nodes"
        for name, asked, allowed in (("task", task, policy.tasks), ("model", model, policy.models)):
            if allowed and asked not in allowed:
                return f"this node's owner allows the {name} {', '.join(allowed)} only"
        return ""
