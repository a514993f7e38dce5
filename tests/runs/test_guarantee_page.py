"""docs/guarantee.md: its script runs and catches what it says, its names exist, its tables are generated."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from privacy.accountants.calibration import floor_commitment
from privacy.clipping.norms import FlatClip, NoUpdate
from privacy.clipping.units import Units
from privacy.commitment import FloorStep
from privacy.contribution import Plan, contribute
from privacy.events import Poisson
from privacy.ledger.journal import canonical
from privacy.ledger.ledger import Ledger
from privacy.ledger.statement import privacy_statement
from privacy.mechanism import charged_release
from privacy.queries import NormBit, OneHotVote
from simulations.benchmarks.harness.tables import fill
from tests.cases.drawn import cohort

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guarantee.md"
TEXT = PAGE.read_text(encoding="utf-8")
SAMPLING = Poisson(0.1, 500)
DIM = 8


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as the mechanism leaves it: a histogram, then four of five rounds of update and norm bit."""
    folder = tmp_path_factory.mktemp("run")
    histogram = FloorStep("histogram", Poisson(1.0, 500), 10.0)
    commitment, z = floor_commitment(4.0, 1e-5, SAMPLING, 5, extra=(histogram,), queries=(2 * 5.0,))
    vote = OneHotVote((0.5, 1.0, 2.0), 10.0, simulated_noise_std_per_bound=0.0)
    rows = torch.randn(50, DIM, generator=torch.Generator().manual_seed(0))
    with Ledger.create(folder / "ledger.jsonl", commitment) as ledger:
        plan, votes = Plan(NoUpdate(), 1.0, (vote,)), torch.zeros(50, dtype=torch.int64)
        total = contribute(Units(rows, votes=votes), plan)
        charged_release(total, plan, cohort(histogram.sampling, 0, ledger, "histogram"), ledger=ledger)
        plan = Plan(FlatClip(1.0, DIM), z, (NormBit(1.0, 5.0),))
        for number in range(1, 5):
            total = contribute(Units(rows), plan)
            charged_release(total, plan, cohort(SAMPLING, number, ledger), ledger=ledger)
        (folder / "privacy.json").write_text(json.dumps(privacy_statement(ledger)))
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, and the working directory."""
    monkeypatch.chdir(shutil.copytree(finished_run, tmp_path / "run"))
    return tmp_path / "run"


SCRIPT = (ROOT / "docs/examples/check_by_hand.py").read_text(encoding="utf-8")


class TestCheckByHand:
    def test_a_real_ledger_agrees_with_its_statement(self, run: Path) -> None:
        assert "import privacy" not in SCRIPT
        assert "from privacy" not in SCRIPT
        result = subprocess.run([sys.executable, "-I", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        found = re.fullmatch(r"epsilon ([\d.]+) at delta 1e-05; stated ([\d.]+), committed 4.0\n", result.stdout)
        assert found, result.stdout
        by_hand, stated = float(found[1]), float(found[2])
        assert by_hand == pytest.approx(stated, abs=2e-3)
        assert stated <= 4.0

    @staticmethod
    def check() -> None:
        """All but the last part, which only computes."""
        exec(SCRIPT.partition("# Another accountant")[0], {})

    def test_an_unaltered_ledger_passes(self, run: Path) -> None:
        self.check()

    @pytest.mark.parametrize(
        ("old", "new"),
        [('"rate":0.1', '"rate":0.2'), ('"kind":"charge"', '"kind":"refund"'), ('"noise_std":5.0', '"noise_std":9.0')],
    )
    def test_an_altered_line_fails(self, run: Path, old: str, new: str) -> None:
        text = (run / "ledger.jsonl").read_text()
        assert old in text
        (run / "ledger.jsonl").write_text(text.replace(old, new, 1))
        with pytest.raises(AssertionError):
            self.check()

    def test_a_removed_charge_fails(self, run: Path) -> None:
        lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
        (run / "ledger.jsonl").write_text("".join(lines[:-2]))
        with pytest.raises(AssertionError):
            self.check()

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"noise_std":5.0', '"noise_std":4.9'),
            ('"kind":"released"', '"kind":"not-private"'),
            ('"step":0', '"step":1'),
        ],
    )
    def test_a_broken_commitment_fails_though_every_hash_fits(self, run: Path, old: str, new: str) -> None:
        """Whoever rewrites all lines gets past the chain, not past the arithmetic."""
        text, previous, lines = (run / "ledger.jsonl").read_text(), "0" * 64, []
        assert old in text
        for altered in text.replace(old, new).splitlines():
            line = {**json.loads(altered), "previous": previous}
            del line["hash"]
            previous = hashlib.sha256(canonical(line).encode()).hexdigest()
            lines.append(canonical({**line, "hash": previous}) + "\n")
        (run / "ledger.jsonl").write_text("".join(lines))
        statement = json.loads((run / "privacy.json").read_text())
        statement["ledger"]["head"] = f"{len(lines)}:{previous}"
        (run / "privacy.json").write_text(json.dumps(statement))
        with pytest.raises(AssertionError):
            self.check()


def test_every_code_name_in_the_tables_exists() -> None:
    """Names in backticks that look like classes or modules."""
    rooms = ROOT / "privacy", ROOT / "client"  # where a unit becomes a row
    sources = "\n".join(path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py"))
    for name in set(re.findall(r"`([A-Z]\w+|[a-z]+_\w+)`", TEXT)):
        assert re.search(rf"\b{name}\b", sources), f"the page names `{name}`, which is nowhere in privacy/ and client/"
    for file in set(re.findall(r"\b([a-z_]+\.py)\b", TEXT)):
        found = [path for room in (*rooms, ROOT / "tests", ROOT / "docs") for path in room.rglob(file)]
        assert found, f"the page names {file}, which does not exist"


def test_the_tables_are_what_the_results_say() -> None:
    tables = (ROOT / "docs/results/guarantee.md").read_text(encoding="utf-8")
    assert fill(tables) == tables
