"""T8: noise of differential privacy is drawn in one place, read from the source of every room.

Outside ``privacy`` nothing may draw from a normal-like law, reach for the noise machinery, or touch global random
state. Seeded random numbers that are no such noise are allowed one function at a time, with the reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("client", "strategies", "server")

LAWS = {
    "normal",
    "normal_",
    "standard_normal",
    "randn",
    "randn_like",
    "lognormal",
    "log_normal_",
    "laplace",
    "multivariate_normal",
    "gauss",
    "normalvariate",
    "standard_t",
}
GLOBAL_STATE = {"manual_seed", "set_rng_state", "default_rng", "RandomState"}
MACHINERY = {"SecureRandom", "discrete_gaussian", "SEAL"}
MACHINERY_MODULES = {"random", "privacy.randomness.discrete_gaussian"}

# (file, function): why its random numbers are no noise of differential privacy. Entries that no longer occur fail.
ALLOWED = {
    ("client/votes.py", "_trials"): "a client simulates noise on its own update to choose its vote; it is never sent",
    ("strategies/conformance/controllers.py", "made_up_units"): "updates of clients who do not exist",
    ("strategies/conformance/purity.py", "<module>"): "watches that methods leave global random state alone",
    ("strategies/controllers/rl/sac.py", "_drawn"): "an agent explores: its own actions, from a seed",
    ("strategies/controllers/geoclip.py", "_fresh"): "first directions of a projection, public and from a seed",
    ("client/generation.py", "continuations"): "a model's samples of text, under a fork of torch's generator",
    ("client/engine/cohort.py", "build"): "a made-up adapter, from a seed, for the test of a device",
    ("client/models/frozen/kernels.py", "cancelling_sums"): "made-up rows, from a seed, that show how a kernel rounds",
    ("client/models/toy.py", "build"): "initial weights of a test model, under a fork of torch's generator",
}


def sites(source: str) -> Iterator[tuple[str, str]]:
    """(function, what) for every place in a source text that draws noise, seeds global state or uses the machinery."""
    yield from _walk(ast.parse(source), "<module>")


def _walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
    if isinstance(node, ast.Attribute):
        seeding = node.attr == "seed" and ast.unparse(node.value).endswith("random")
        if seeding or node.attr in LAWS | GLOBAL_STATE | MACHINERY:
            yield function, ast.unparse(node)
        if node.attr == "draw" and not ast.unparse(node.value).endswith("sampler"):
            yield function, ast.unparse(node)  # CohortSampler.draw is fine, Noise.draw is not
    if isinstance(node, ast.Name) and node.id in MACHINERY:
        yield function, node.id
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        forbidden = names & (LAWS | GLOBAL_STATE | MACHINERY)
        if node.module in MACHINERY_MODULES or forbidden:
            yield function, ast.unparse(node)
    if isinstance(node, ast.Import) and {alias.name for alias in node.names} & MACHINERY_MODULES:
        yield function, ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, function)


def found() -> dict[tuple[str, str], list[str]]:
    """All sites of the rooms under test."""
    result: dict[tuple[str, str], list[str]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for function, what in sites(path.read_text(encoding="utf-8")):
                result.setdefault((path.relative_to(ROOT).as_posix(), function), []).append(what)
    return result


def test_no_room_but_privacy_draws_noise():
    unexpected = {site: what for site, what in found().items() if site not in ALLOWED}
    assert not unexpected, f"noise belongs into privacy/mechanism.py; simulated randomness into ALLOWED: {unexpected}"


def test_the_allow_list_is_current():
    stale = set(ALLOWED) - set(found())
    assert not stale, f"these no longer draw anything, remove them: {stale}"


def test_within_privacy_two_lines_add_noise():
    """``.draw(`` of a noise is called in the mechanism only, in an addition: by the server, or by a client for a share.

    The second line is the noise of privacy.trust = "secagg", where no server may see a sum without noise: it runs in
    the client, behind a charge that ``charged_request`` made before the client was asked.
    """
    callers = []
    for path in sorted((ROOT / "privacy").rglob("*.py")):
        for function, what in sites(path.read_text(encoding="utf-8")):
            if what.endswith(".draw"):
                callers.append((path.relative_to(ROOT).as_posix(), function, what))
    assert callers == [
        ("privacy/mechanism.py", "charged_release", "noise.draw"),
        ("privacy/mechanism.py", "noisy_share", "noise.draw"),
    ]
    tree = ast.parse((ROOT / "privacy/mechanism.py").read_text(encoding="utf-8"))
    additions = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    assert sum(addition.startswith("joint + noise.draw(") for addition in additions) == 1
    assert sum(addition.startswith("coarse + noise.draw(") for addition in additions) == 1


def test_within_privacy_only_the_noise_kinds_draw_from_a_normal():
    drawing = set()
    for path in sorted((ROOT / "privacy").rglob("*.py")):
        for _, what in sites(path.read_text(encoding="utf-8")):
            if what.rpartition(".")[2] in LAWS:
                drawing.add(path.relative_to(ROOT).as_posix())
    assert drawing == {
        "privacy/randomness/noise.py",
        "privacy/randomness/correlated.py",
        "privacy/audit/one_shot.py",
    }  # the second makes canaries, from a seed


@pytest.mark.parametrize(
    "planted",
    [
        "import numpy as np\nupdate += np.random.normal(0, 1, 5)",
        "import numpy as np\nnp.random.seed(0)",
        "import torch\nx = torch.randn(5)",
        "import torch\nx = torch.randn_like(y) * sigma",
        "import torch\nx = torch.empty(5).normal_(0, sigma)",
        "import torch\ntorch.manual_seed(0)",
        "from torch import randn as innocent\nx = innocent(5)",
        "import random\nx = random.gauss(0, 1)",
        "from random import gauss",
        "make = generator.standard_normal\nx = make(5)",
        "from privacy.randomness.rng import SecureRandom\nx = SecureRandom().normal(5)",
        "from privacy.randomness.discrete_gaussian import discrete_gaussian",
        "import privacy.randomness.discrete_gaussian",
        "from privacy.mechanism import GaussianNoise\nx = y + GaussianNoise().draw([(1.0, 5)])",
        "from privacy.mechanism import SEAL",
        "def f():\n    def g():\n        return rng.laplace(0, 1)",
    ],
)
def test_planted_noise_is_found(planted):
    assert list(sites(planted))


@pytest.mark.parametrize(
    "innocent",
    [
        "cohort = self.sampler.draw(sampling, round)",
        "order = simulation_generator(seed, 'batches', client).permutation(n)",
        "from privacy.mechanism import GaussianNoise, charged_release\nnoise = GaussianNoise()",
        "x = torch.nn.functional.normalize(y)",
        "import numpy as np\ndef f(generator: np.random.Generator) -> None: ...",
    ],
)
def test_other_randomness_is_not(innocent):
    assert not list(sites(innocent))
