"""What the packages of `privacy` offer under their own names; outsiders import from these addresses."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ["accountants", "clipping", "ledger", "secagg", "sensitive_text"]
PROMISED = {
    "accountants": {"epsilon", "tightest_bound", "curve", "calibrate"},
    "clipping": {"FlatClip", "PerAdapterClip", "AdaClip", "SubspaceClip", "CLIP_MAPS", "clip_from_json"},
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_offers_what_it_defines_and_no_more(name: str) -> None:
    package = importlib.import_module(f"privacy.{name}")
    assert sorted(package.__all__) == sorted(set(package.__all__))
    assert PROMISED.get(name, set()) <= set(package.__all__)
    for offered in package.__all__:
        owner = getattr(getattr(package, offered), "__module__", package.__name__)  # constants have no module
        assert str(owner).startswith((package.__name__, "builtins")), f"{offered} is {owner}'s"


@pytest.mark.run
@pytest.mark.parametrize("name", [*PACKAGES, "mechanism"])
def test_every_door_opens_first(name: str) -> None:
    """No import needs another to have gone before it: a circle would show in one order only."""
    subprocess.run([sys.executable, "-c", f"import privacy.{name}"], check=True, timeout=120)
