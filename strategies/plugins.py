"""Objects from a name and options in a configuration: built-in methods and a user's own by the same road.

What such an object answers in a run is held against what is expected of it (:func:`expect`, :func:`expect_finite`), so
a wrong answer ends the run where it was given, before anything else is charged. Only released values (behind the noise)
and public ones reach these methods, so what they answer may be shown.
"""

import dataclasses
import difflib
import importlib
import math
import traceback
from collections.abc import Collection, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

if TYPE_CHECKING:  # names are looked up where nothing is trained, too
    from torch import Tensor

Option = str | int | float | bool


def build(key: str, table: Mapping[str, str], name: str, options: Mapping[str, Option]) -> Any:
    """The object that ``name`` stands for, made with ``options``.

    Args:
        key: the configuration key the name was given for; named in errors.
        table: built-in names and the ``"package.module:Object"`` each stands for.
        name: a built-in name, or ``"package.module:Object"``.
        options: keyword arguments with kebab-case names; an integer serves where a float is wanted.

    Raises:
        ValueError: unknown name or option, a value of the wrong type, or one the object itself refuses.
    """
    kind = _find(key, table, name)
    types = _option_types(kind)
    arguments: dict[str, Option] = {}
    for option, value in options.items():
        if types is None:
            arguments[option.replace("-", "_")] = value
            continue
        if option not in types:
            near = difflib.get_close_matches(option, types, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its options are: {', '.join(sorted(types)) or 'none'}"
            raise ValueError(f"{_option_key(key, option)}: {name} has no such option; {hint}")
        arguments[option.replace("-", "_")] = _typed(_option_key(key, option), types[option], value)
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        known = arguments if types is None else [option.replace("-", "_") for option in types]
        raise ValueError(explain_options(key, name, known, error)) from error


def explain_options(key: str, name: str, known: Collection[str], error: Exception) -> str:
    """Rephrase an object's error about its own arguments (``known``), with the key that a person looks for in front."""
    text = str(error)
    argument, _, rest = text.partition(" ")
    if argument not in known:
        return f"{key} = {name!r}: {text}"
    return f"{_option_key(key, argument.replace('_', '-'))} {rest}"


def _option_key(key: str, option: str) -> str:
    """The options of a method have a table of their own; what a ``kind`` takes stands beside it, as in a phase."""
    return f"{key.removesuffix('kind')}{option}" if key.endswith(".kind") else f"{key}-options.{option}"


def _find(key: str, table: Mapping[str, str], name: str) -> type[Any]:
    module, _, attribute = table.get(name, name).partition(":")
    if name not in table and not (module and attribute):
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(table))}"
        raise ValueError(f"{key} = {name!r}: unknown; {hint} (or 'package.module:Object' for one of your own)")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{key} = {name!r}: cannot import it: {error}; run from the folder that holds it, or name that folder "
                "in PYTHONPATH"
            ) from error
        raise ValueError(f"{key} = {name!r}: cannot import it: {module} needs {error.name!r}; install that") from error
    except Exception as error:  # whatever a module of the user's own raises while it is imported; TypeError: ".module"
        raise ValueError(
            f"{key} = {name!r}: cannot import it: {type(error).__name__}: {error}{place(error)}"
        ) from error
    found = getattr(imported, attribute, None)
    if found is None:
        near = difflib.get_close_matches(
            attribute, [n for n, value in vars(imported).items() if isinstance(value, type)], n=1
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{key} = {name!r}: cannot import it: {module} has no {attribute!r}{hint}")
    if not isinstance(found, type):
        raise ValueError(f"{key} = {name!r}: must name a class, found {type(found).__name__}")
    return found


def place(error: Exception) -> str:
    """Name the place in a file where something went wrong, in brackets; for messages about a user's own methods."""
    if isinstance(error, SyntaxError):  # its text names file and line
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _option_types(kind: type[Any]) -> dict[str, Any] | None:
    """The kebab-case options of a dataclass and their types; None for another class, which checks its own arguments."""
    if not dataclasses.is_dataclass(kind):
        return None
    try:
        hints = get_type_hints(kind)  # field.type is a string where annotations are postponed
    except NameError:  # a type imported for type checkers only: its class still checks its own values
        hints = {}
    return {
        field.name.replace("_", "-"): hints.get(field.name, Any) for field in dataclasses.fields(kind) if field.init
    }


def _typed(key: str, wanted: Any, value: Option) -> Option:
    if wanted is float and type(value) is int:
        return float(value)
    if wanted in (str, int, float, bool) and type(value) is not wanted:
        raise ValueError(f"{key} must be of type {wanted.__name__}, got {value!r}")
    return value


class BadAnswer(ValueError):
    """A method of a run answered something that the run cannot go on with."""


def expect(role: str, method: object, call: str, answer: Any, kind: type[Any] | UnionType, wanted: str) -> Any:
    """The answer of a method; BadAnswer unless it is of a type.

    Args:
        role: of the method in a strategy: controller, optimizer or aggregation.
        call: name of the function that was called.
        wanted: what it must return, in words.
    """
    if not isinstance(answer, kind) or (isinstance(answer, bool) and kind is not bool):
        raise_bad_answer(role, method, call, show_answer(answer), wanted)
    return answer


def expect_tensor(role: str, method: object, call: str, answer: Any, like: "Tensor") -> "Tensor":
    """Return a method's answer; BadAnswer unless it is a tensor of the shape of another."""
    from torch import Tensor

    wanted = f"a tensor of shape {tuple(like.shape)}"
    found: Tensor = expect(role, method, call, answer, Tensor, wanted)
    if found.shape != like.shape:
        raise_bad_answer(role, method, call, show_answer(answer), wanted)
    return found


def expect_finite(role: str, method: object, call: str, answer: "Tensor", when: str) -> None:
    """BadAnswer if numbers of a tensor are not finite; ``when`` says in which round."""
    if bad := int((~answer.isfinite()).sum()):
        first = float(answer[~answer.isfinite()].flatten()[0])
        raise_bad_answer(
            role, method, call, f"{first} ({bad} of {answer.numel()} numbers are not finite) {when}", "finite numbers"
        )


def finite_number(role: str, method: object, call: str, *arguments: Any) -> float:
    """Ask a method for a number with these arguments; BadAnswer unless it is a finite number."""
    answer = getattr(method, call)(*arguments)
    if not math.isfinite(expect(role, method, call, answer, float | int, "a number")):
        raise_bad_answer(role, method, call, show_answer(answer), "a finite number")
    return float(answer)


def raise_bad_answer(role: str, method: object, call: str, returned: str, wanted: str) -> NoReturn:
    """Raise BadAnswer that names the method."""
    kind = type(method)
    name = f"{kind.__module__}:{kind.__qualname__}"
    raise BadAnswer(f"strategy.{role} = {name!r}: {kind.__name__}.{call} returned {returned}; it must return {wanted}")


def show_answer(answer: Any) -> str:
    """An answer in a few words."""
    if hasattr(answer, "shape"):
        return f"a {type(answer).__name__} of shape {tuple(answer.shape)}"
    if isinstance(answer, tuple | list):
        return f"a {type(answer).__name__} of {len(answer)} ({', '.join(map(show_answer, answer[:3]))})"
    return repr(answer) if answer is None or isinstance(answer, str | int | float) else type(answer).__name__
