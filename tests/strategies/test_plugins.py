"""Methods by name: built-in ones, a user's own, and every way to get the name or an option wrong."""

import sys
from pathlib import Path

import pytest

from strategies import AGGREGATIONS, CONTROLLERS, OPTIMIZERS
from strategies.controllers.dp_lac import DpLac
from strategies.controllers.fixed import Fixed
from strategies.optimizers.fedavg import FedAvgM
from strategies.plugins import Option, build

KEY = "strategy.controller"

OWN = """
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass(frozen=True)
class Lazy:
    amount: Decimal = 1
    strength: float = 1.0


@dataclass(frozen=True)
class Mine:
    strength: float = 1.0
    how_often: int = 2
    names: tuple[str, ...] = ()
    made: str = field(init=False, default="here")

    def __post_init__(self) -> None:
        if self.strength < 0:
            raise ValueError(f"strength must be >= 0, got {self.strength}")


@dataclass(frozen=True)
class Needs:
    strength: float


class Plain:
    def __init__(self, some_word: str = "a") -> None:
        self.some_word = some_word


def function() -> None: ...


CONSTANT = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of a user's own that can be imported."""
    (tmp_path / "lacquer_plugin_under_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "lacquer_plugin_under_test"


@pytest.mark.parametrize("table", [CONTROLLERS, OPTIMIZERS, AGGREGATIONS], ids=["controllers", "optimizers", "lora"])
def test_every_built_in_name_makes_an_object(table: dict[str, str]) -> None:
    for name, place in table.items():
        assert type(build(KEY, table, name, {})).__name__ == place.partition(":")[2]


def test_options_reach_the_object_in_kebab_case_and_integers_serve_as_floats() -> None:
    made = build(KEY, CONTROLLERS, "dp-lac", {"clip-norm": 2, "smooth": True})
    assert made == DpLac(clip_norm=2.0, smooth=True)
    assert type(made.clip_norm) is float
    assert build("strategy.optimizer", OPTIMIZERS, "fedavgm", {"momentum": 0}) == FedAvgM(momentum=0.0)


def test_a_class_of_ones_own_is_imported_and_checked_alike(own: str) -> None:
    made = build(KEY, CONTROLLERS, f"{own}:Mine", {"strength": 3, "how-often": 4})
    assert (made.strength, made.how_often, made.made) == (3.0, 4, "here")
    assert type(made.strength) is float
    assert build(KEY, CONTROLLERS, f"{own}:Plain", {"some-word": "b"}).some_word == "b"
    assert build(KEY, CONTROLLERS, f"{own}:Lazy", {"strength": 2.5}).strength == 2.5
    assert build(KEY, {"mine": f"{own}:Mine"}, "mine", {}).strength == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp-lak", "did you mean 'dp-lac'"),
        ("zzz", "known: adaclip, automatic, "),
        ("", "known: adaclip, automatic, "),
        (":Fixed", "or 'package.module:Object'"),
        ("strategies.controllers.fixed:", "or 'package.module:Object'"),
        ("no_such_package_anywhere.x:Y", "cannot import it: No module named 'no_such_package_anywhere'"),
        (".fixed:Fixed", "cannot import it"),
        ("strategies.controllers.fixed:Fixd", "cannot import it"),
        ("strategies.controllers.fixed:Fixed.plan", "cannot import it"),
        ("strategies.controllers.loss_following:GRID", "must name a class, found tuple"),
        ("strategies.controllers.controller:check_queries", "must name a class, found function"),
    ],
)
def test_a_wrong_name_is_refused_with_its_key(name: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        build(KEY, CONTROLLERS, name, {})
    assert str(error.value).startswith(f"strategy.controller = {name!r}: ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fixed", {"clip-nrom": 1.0}, "strategy.controller-options.clip-nrom: fixed has no such option; did you mean"),
        ("fixed", {"clip_norm": 1.0}, "strategy.controller-options.clip_norm: fixed has no such option; did you mean"),
        ("fixed", {"zzzz": 1.0}, "its options are: clip-norm"),
        ("fixed", {"clip-norm": "1"}, "strategy.controller-options.clip-norm must be of type float, got '1'"),
        ("fixed", {"clip-norm": True}, "strategy.controller-options.clip-norm must be of type float, got True"),
        ("dp-lac", {"smooth": 1}, "strategy.controller-options.smooth must be of type bool, got 1"),
        ("fixed", {"clip-norm": -1}, "strategy.controller-options.clip-norm must be > 0 and finite, got -1.0"),
        ("fixed", {"clip-norm": float("nan")}, "strategy.controller-options.clip-norm must be"),
    ],
)
def test_a_wrong_option_is_refused_with_its_key(name: str, options: dict[str, Option], words: str) -> None:
    with pytest.raises(ValueError) as error:
        build(KEY, CONTROLLERS, name, options)
    assert words in str(error.value)


def test_what_a_kind_takes_stands_beside_it(own: str) -> None:
    for options in ({"how-oftn": 1}, {"how-often": "1"}, {"strength": -1.0}):
        with pytest.raises(ValueError, match=rf"^phases\[1\]\.{next(iter(options))}[: ]"):
            build("phases[1].kind", {"mine": f"{own}:Mine"}, "mine", options)


@pytest.mark.parametrize(
    ("thing", "options", "words"),
    [
        ("Mine", {"strength": "much"}, "options.strength must be of type float, got 'much'"),
        ("Mine", {"how-often": 2.0}, "options.how-often must be of type int, got 2.0"),
        ("Mine", {"strength": -1}, "strength must be >= 0, got -1.0"),
        ("Mine", {"made": "there"}, "has no such option"),
        ("Needs", {}, "strength"),
        ("Plain", {"other": "b"}, "other"),
        ("function", {}, "must name a class, found function"),
        ("CONSTANT", {}, "must name a class, found int"),
    ],
)
def test_a_class_of_ones_own_is_refused_alike(own: str, thing: str, options: dict[str, Option], words: str) -> None:
    with pytest.raises(ValueError) as error:
        build(KEY, CONTROLLERS, f"{own}:{thing}", options)
    assert "strategy.controller" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_library_anywhere", "needs 'no_such_library_anywhere'; install that"),
        ("class Mine:\n    strength: float = ", "SyntaxError: invalid syntax (lacquer_plugin_broken.py, line 2)"),
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero (FOLDER/lacquer_plugin_broken.py, line 2)"),
        ("from strategies.controllers.controller import Seting", "ImportError: cannot import name 'Seting'"),
        ("class Main: ...", "has no 'Mine'; did you mean Main?"),
        ("Mine = None", "has no 'Mine'"),
    ],
)
def test_a_module_of_ones_own_that_cannot_be_used_says_where(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacquer_plugin_broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lacquer_plugin_broken", raising=False)
    with pytest.raises(ValueError) as error:
        build(KEY, CONTROLLERS, "lacquer_plugin_broken:Mine", {})
    assert str(error.value).startswith("strategy.controller = 'lacquer_plugin_broken:Mine': cannot import it: ")
    assert words.replace("FOLDER", str(tmp_path)) in str(error.value)


def test_a_folder_that_is_not_on_the_path_is_said() -> None:
    with pytest.raises(ValueError, match=r"folder that holds it.* PYTHONPATH"):
        build(KEY, CONTROLLERS, "no_such_package_anywhere.inner:Mine", {})


def test_a_built_in_name_is_the_class_it_says() -> None:
    assert type(build(KEY, CONTROLLERS, "fixed", {})) is Fixed
