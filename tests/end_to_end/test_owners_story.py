"""Three organisations with accounts, over two runs, a question and a private evaluation, until two of them refuse."""

import json
import subprocess
from pathlib import Path

import pytest

from privacy.ledger.account import OWN, TOLD
from privacy.ledger.ledger import Ledger
from tests.cases.many_clients import deployed, of_clients, write
from tests.end_to_end.deployment import BIN, Deployment

# Five commands over real nodes, each of some minutes on two cores.
pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(3600)]

USERS = 200
LIFETIMES = {"north": 7.5, "south": 5.5, "west": 20.0}
RUN, ASK = 2.0, 1.0
EVALUATION = """name = "evaluation"
rounds = 2
sampling-rate = 0.2
[privacy]
epsilon = 2.0
delta = 1e-3
account = "{account}"
[strategy]
controller = "fixed"
controller-options = {{ clip-norm = 0.05 }}
[model]
name = "random:bert"
rank = 2
max-length = 16
[data]
source = "{records}"
client-column = "user"
partition = "natural"
validation-records = 20
test-records = 20
cache = "{cache}"
[evaluation]
data = "private"
held-out = 0.3
every = 1000000
[engine]
kind = "inprocess"
"""


class Owner:
    """One organisation: its records, its account, and the machine that holds it."""

    def __init__(self, folder: Path, name: str, federation: Deployment) -> None:
        self.name, self.federation, self.place = name, federation, folder / f"machine-{name}"
        self.account = folder / f"{name}.account"
        epsilon = str(LIFETIMES[name])
        terms = ["--data", name, "--unit", "client", "--epsilon", epsilon, "--delta", "0.1", "--rule", "sum"]
        assert self.lacquer("account", "create", str(self.account), *terms).returncode == 0

    @property
    def settings(self) -> str:
        state = self.place / "clients"
        said = f'account="{self.account}" account-state="{self.place / "lacquer"}"'
        return f'clients={USERS} clients-state="{state}" {said}'

    def lacquer(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        surroundings = {**self.federation.environment, "XDG_STATE_HOME": str(self.place)}
        return subprocess.run(
            [BIN / "lacquer", *arguments],
            cwd=self.federation.folder, env=surroundings, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def debits(self) -> list[tuple[str, float]]:
        shown = json.loads(self.lacquer("account", "show", str(self.account), "--json").stdout)
        return [(run["basis"], run["epsilon"]) for run in shown["runs"]]


def test_the_fourth_request_is_refused_by_two_of_three_and_every_account_verifies(tmp_path: Path) -> None:
    records = {name: tmp_path / name / "records.jsonl" for name in LIFETIMES}
    for name, file in records.items():
        write(file, of_clients(name, USERS))
    text = deployed(tmp_path, [USERS] * 3, 0.1, privacy="").replace("epsilon = 8.0", f"epsilon = {RUN}")
    federation = Deployment(tmp_path, text, records)
    owners = [Owner(tmp_path, name, federation) for name in LIFETIMES]
    north = owners[0]
    try:
        federation.begin([owner.settings for owner in owners])
        for _ in range(2):
            done = federation.lacquer("deploy", "run.toml", "--quiet")
            assert done.returncode == 0, done.stderr
        asked = federation.lacquer("ask", "run.toml", "--epsilon", str(ASK), "--folder", "asked", "--yes")
        assert asked.returncode == 0, asked.stderr
        assert f"This costs epsilon {ASK:g} at delta 0.001 for each of {3 * USERS} clients" in asked.stdout
        assert [owner.debits() for owner in owners] == [[(TOLD, RUN), (TOLD, RUN), (TOLD, ASK)]] * 3

        own = EVALUATION.format(account=north.account, records=f"jsonl:{records['north']}", cache=tmp_path / "cache")
        (tmp_path / "evaluation.toml").write_text(own)
        evaluated = north.lacquer("run", "evaluation.toml", "--quiet")
        assert evaluated.returncode == 0, evaluated.stderr
        assert north.debits()[3:] == [(OWN, RUN)]
        results = json.loads((Path(evaluated.stdout.strip()) / "results.json").read_text())
        assert 0.0 < results["validation_accuracy_within"] <= 0.25

        before = [owner.debits() for owner in owners]
        fourth = federation.lacquer("deploy", "run.toml", "--quiet")
        assert fourth.returncode != 0
        said = " ".join(fourth.stderr.split())
        assert "not every node joined the run with its clients, and nothing was charged" in said
        assert said.count("the client's code raised an exception") == 2, "the server is told no more"
        for owner, spent in zip(owners[:2], before, strict=False):
            assert owner.debits() == spent
            assert "epsilon 0.5 is left of" in federation.log(owner.name)
        assert owners[2].debits() == [*before[2], (TOLD, RUN)], (
            "the third agreed; nothing is refunded on a server's word"
        )
    finally:
        federation.end()
    for owner in owners:
        verified = owner.lacquer("account", "verify", str(owner.account))
        assert verified.returncode == 0, verified.stderr
        assert "within the lifetime; chain whole" in verified.stdout
    ledgers = sorted([*tmp_path.glob("runs/*/ledger.jsonl"), tmp_path / "asked" / "ledger.jsonl"])
    charged = []
    for file in ledgers:
        with Ledger.open(file, read_only=True) as ledger:
            assert ledger.not_private is None
            charged.append(len(ledger.charges))
    assert sorted(charged) == [0, 1, 2, 2, 3], (
        "the fourth run charged nothing; the evaluation is one release beside two"
    )
