"""Folders and files stay small, imports go one way, and a name has one address."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from server.run_folder.provenance import DISTRIBUTION
from simulations.benchmarks.harness.results import ROOT
from simulations.benchmarks.harness.structure import (
    BENCHMARKS,
    Module,
    against_layers,
    circles,
    folders,
    layer_contracts,
    mirrored,
    read_modules,
    report,
    siblings_named,
)

MOST_IN_A_FOLDER, MOST_LINES = 15, 440
LEAST_MIRRORED = 0.29


@functools.cache
def modules() -> dict[str, Module]:
    """Read once, by the worker whose turn it is."""
    return read_modules()


def product() -> dict[str, Module]:
    return {name: module for name, module in modules().items() if not f"{name}.".startswith(f"{BENCHMARKS}.")}


def test_no_folder_holds_more_than_fits_on_a_page() -> None:
    assert {name: count for name, count in folders(modules()).items() if count > MOST_IN_A_FOLDER} == {}


def test_no_file_is_longer_than_one_idea_needs() -> None:
    assert {name: module.lines for name, module in modules().items() if module.lines > MOST_LINES} == {}


def test_tests_mirror_the_product_as_far_as_they_did() -> None:
    """The share is to rise to 0.8."""
    found = mirrored(modules())
    assert found["privacy.mechanism"]
    assert sum(found.values()) / len(found) >= LEAST_MIRRORED


def test_no_files_of_the_product_import_each_other_in_a_circle() -> None:
    assert circles({name: module.imports for name, module in product().items()}) == []


def test_no_import_goes_against_the_layers() -> None:
    imports = {name: module.imports | module.later for name, module in modules().items()}
    contracts = layer_contracts()
    assert len(contracts) >= 5
    assert [pair for layers in contracts for pair in against_layers(imports, layers)] == []


def test_a_name_is_offered_by_the_module_that_defines_it() -> None:
    assert siblings_named(product()) == []


def test_the_import_rules_have_no_exceptions() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [each["name"] for each in contracts if each.get("ignore_imports")] == []


SOURCES = {
    "__init__": "from house.low import thing\n__all__ = ['thing']\n",
    "low": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.high\nthing = 1\n",
    "high": "from .low import thing\ndef late():\n    from house.first import a\n__all__ = ['late', 'thing']\n",
    "first": "import house.second\nimport json\na = 1\n",
    "second": "class Holder:\n    from house import first\n",
}
"""Modules with one fault each, but for the first."""


def test_nothing_stands_behind_what_a_module_does_when_it_is_run() -> None:
    """It would not be defined yet."""
    for path in sorted(path for name in ("client", "server", "simulations") for path in (ROOT / name).rglob("*.py")):
        *before, _ = ast.parse(path.read_text(encoding="utf-8")).body or [None]
        assert not any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in before), path


@pytest.fixture
def house(tmp_path: Path) -> dict[str, Module]:
    (tmp_path / "house").mkdir()
    for name, source in SOURCES.items():
        (tmp_path / "house" / f"{name}.py").write_text(source)
    return read_modules(tmp_path, ["house"])


def test_what_the_sources_import_and_when(house: dict[str, Module]) -> None:
    assert {name: (set(module.imports), set(module.later)) for name, module in house.items()} == {
        "house": ({"house.low"}, set()),
        "house.low": (set(), {"house.high"}),
        "house.high": ({"house.low"}, {"house.first"}),
        "house.first": ({"house.second"}, set()),
        "house.second": ({"house.first"}, set()),
    }
    assert folders(house) == {"house": 4}


def test_faults_are_found(house: dict[str, Module]) -> None:
    at_import = {name: module.imports for name, module in house.items()}
    assert circles(at_import) == [["house.first", "house.second"]]
    layers = [["house.low"], ["house.high", "house.first"]]
    assert against_layers(at_import, layers) == [("house.high", "house.low")]
    later = {name: module.later for name, module in house.items()}
    assert against_layers(later, layers) == [("house.high", "house.first")]
    assert siblings_named(house) == [("house.high", "thing")]


def test_the_report_has_a_line_for_every_package() -> None:
    text = report(modules(), layer_contracts())
    assert all(f"| `{name}/` |" in text for name in ("privacy", "client/engine", "simulations/benchmarks/papers"))
    assert "Circles of files: 0 on import" in text


def test_no_message_tells_people_to_install_somebody_elses_package() -> None:
    """`lacquer` on PyPI is another project's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] != "lacquer"
    assert project["name"] == DISTRIBUTION
    rooms = ("privacy", "client", "strategies", "server", "simulations")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    texts = [*sources, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?lacquer\b(?!-)")
    assert [str(path) for path in texts if wrong.search(path.read_text(encoding="utf-8"))] == []
